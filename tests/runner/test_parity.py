"""The forward pass is that of transformers: same weights, same logits, fp32."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ninfer_pool.runner.model import Model
from tests.runner.models import random_folder
from tests.runner.runs import Run

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

BOUND = 1e-5
"""RMS of the difference over RMS of the logits."""
TOKENS, CUTS, STEPS = 230, (37, 64, 200), 32

EXPERTS = {
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "head_dim": 64},
    "odd heads": {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 9,
        "linear_key_head_dim": 24,
        "num_hidden_layers": 5,
        "hidden_size": 60,
    },
    "layers in another order": {
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 3,
        "linear_conv_kernel_dim": 3,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "mlp_only_layers": [0, 1, 2, 3],
        "linear_num_value_heads": 6,
        "rope_parameters": None,
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mtp_num_hidden_layers": 0,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "intermediate_size": None,
        **EXPERTS,
    },
    "qwen3_next with experts in some layers": {
        "model_type": "qwen3_next",
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        **EXPERTS,
    },
}


def rms_ratio(found: torch.Tensor, right: torch.Tensor) -> float:
    """RMS of the difference over RMS of what is right."""
    difference = (found.double() - right.double()).square().mean()
    return float((difference / right.double().square().mean()).sqrt())


class Theirs:
    """The same folder run by transformers, with its cache."""

    def __init__(self, folder: Path) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=torch.float32).eval()
        self.cache = transformers.DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        """Continue with tokens (T,) and return their logits (T, vocab)."""
        out = self.model(tokens[None], cache=self.cache, use_cache=True, **more)
        logits: torch.Tensor = out.logits[0]
        return logits


@pytest.fixture(params=CONFIGS, ids=lambda name: name.replace(" ", "-"))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return random_folder(tmp_path, seed=1, **CONFIGS[request.param])


def prompt(vocab: int = 199, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(5))


def test_prefill_and_decode_give_the_logits_of_transformers(folder: Path) -> None:
    ours, theirs, tokens = Run(Model.load(folder)), Theirs(folder), prompt()
    found = ours.model.logits(ours.prompt(tokens, cuts=CUTS))
    right = theirs.logits(tokens)
    assert rms_ratio(found, right) <= BOUND
    for _ in range(STEPS):
        token = right[-1:].argmax(-1)
        right = theirs.logits(token)
        assert rms_ratio(ours.model.logits(ours.decode(token)), right) <= BOUND


def test_a_resumed_run_gives_the_logits_of_one_resumed_there(folder: Path) -> None:
    ours, theirs, tokens = Run(Model.load(folder)), Theirs(folder), prompt()
    ours.prompt(tokens[:100], cuts=(64,))
    theirs.logits(tokens[:100])
    resumed = ours.fork()
    found = ours.model.logits(resumed.prompt(tokens[100:], cuts=(28, 92)))
    assert rms_ratio(found, theirs.logits(tokens[100:])) <= BOUND
    more = prompt(tokens=5)
    assert rms_ratio(ours.model.logits(resumed.decode(more)), theirs.logits(more)) <= BOUND


def test_the_three_axes_turn_as_in_transformers(tmp_path: Path) -> None:
    folder = random_folder(tmp_path, seed=2)
    ours, theirs, tokens = Run(Model.load(folder)), Theirs(folder), prompt(tokens=90)
    axes = torch.randint(0, 300, (3, 90), generator=torch.Generator().manual_seed(6))
    found = ours.model.logits(ours.prefill(ours.model.embed(tokens), axes))
    right = theirs.logits(tokens, position_ids=axes[:, None])
    assert rms_ratio(found, right) <= BOUND
    text = theirs.model(tokens[None]).logits[0].detach()
    assert rms_ratio(text, right) > 1000 * BOUND  # so the axes matter here


@pytest.mark.parametrize("part", ["recurrent", "conv"])
def test_these_models_need_their_state(part: str, tmp_path: Path) -> None:
    """A test of the tests above: without its state a run is far off."""
    model, tokens = Model.load(random_folder(tmp_path, seed=1)), prompt()
    run = Run(model)
    run.prompt(tokens[:200])
    without = run.fork()
    getattr(without.state, part).zero_()
    right, wrong = (model.logits(one.prompt(tokens[200:])) for one in (run, without))
    assert rms_ratio(wrong, right) > 1000 * BOUND


def test_the_draft_head_is_a_layer_of_transformers(tmp_path: Path) -> None:
    """`fc` of both norms, then their decoder layer over the slots from 1, then a norm."""
    folder, tokens = random_folder(tmp_path, seed=3), prompt(tokens=70)
    model, theirs = Model.load(folder), Theirs(folder)
    run = Run(model)
    hidden, embeddings = run.prompt(tokens), model.embed(tokens)
    assert model.draft_head is not None
    found = model.draft_head.decode(
        embeddings[1:], hidden[:-1], run.rows(1, 70), cache=run.draft_cache
    )
    assert rms_ratio(found, their_draft(folder, theirs.model, embeddings, hidden)) <= BOUND


@torch.inference_mode()
def their_draft(
    folder: Path, model: Any, embeddings: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """The draft head put together from transformers' own modules: slots [1, T)."""
    from safetensors.torch import load_file

    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    found = load_file(folder / "model.safetensors")
    weights = {k.removeprefix("mtp."): v for k, v in found.items() if k.startswith("mtp.")}

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = modeling.Qwen3_5RMSNorm(x.shape[-1], eps=model.config.rms_norm_eps)
        module.load_state_dict({"weight": weights[f"{name}.weight"]})
        out: torch.Tensor = module(x)
        return out

    full = model.config.layer_types.index("full_attention")
    layer = modeling.Qwen3_5DecoderLayer(model.config, full)
    prefix = "layers.0."
    layer.load_state_dict(
        {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    )
    both = [
        norm("pre_fc_norm_embedding", embeddings[1:]),
        norm("pre_fc_norm_hidden", hidden[:-1]),
    ]
    x = (torch.cat(both, -1) @ weights["fc.weight"].T)[None]
    turns = model.model.rotary_emb(x, torch.arange(1, len(embeddings)).expand(3, 1, -1))
    mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
    return norm("norm", layer(x, position_embeddings=turns, attention_mask=mask)[0])

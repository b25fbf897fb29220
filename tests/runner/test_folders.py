"""What a model's folder may hold, and one clear error for each thing that it may not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ninfer_pool.errors import ModelError, PromptError
from ninfer_pool.runner.config import ModelConfig
from ninfer_pool.runner.model import Model
from ninfer_pool.runner.weights import Weights
from tests.runner.models import random_folder, random_model, small_config
from tests.runner.runs import Run

TOKENS = torch.arange(20)


def logits(model: Model) -> torch.Tensor:
    return model.logits(Run(model).prompt(TOKENS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_folder(tmp_path, seed=1)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Apply ``edit`` to the folder's tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """Lay the folder's tensors into three files and an index."""
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for i in range(3):
        name = f"model-{i + 1:05}-of-00003.safetensors"
        save_file(dict(tensors[i::3]), folder / name)
        places |= {key: name for key, _ in tensors[i::3]}
    index = json.dumps({"metadata": {}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


# What a folder may hold


def test_shards_hold_the_same_model(folder: Path) -> None:
    whole = Model.load(folder)
    shard(folder)
    parts = Model.load(folder)
    assert torch.equal(logits(parts), logits(whole))
    assert parts.digest == whole.digest


def test_the_text_part_of_a_multimodal_model_is_read(folder: Path) -> None:
    text = Model.load(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    whole = {"model_type": "qwen3_5", "text_config": config, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            longer = name.replace("model.", "model.language_model.", 1)
            tensors[longer] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(3, dtype=torch.uint8)

    change(folder, rename)
    assert torch.equal(logits(Model.load(folder)), logits(text))


def test_a_tied_model_may_repeat_its_head(tmp_path: Path) -> None:
    folder = random_folder(tmp_path, seed=1, tie_word_embeddings=True)
    without = logits(Model.load(folder))
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(logits(Model.load(folder)), without)


def test_experts_may_lie_one_by_one(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
    folder = random_folder(
        tmp_path,
        seed=1,
        model_type="qwen3_5_moe_text",
        num_experts=5,
        shared_expert_intermediate_size=16,
        **sizes,
    )
    stacked = logits(Model.load(folder))

    def unstack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
            prefix = name.removesuffix("gate_up_proj")
            parts = zip(tensors.pop(name), tensors.pop(prefix + "down_proj"), strict=True)
            for i, (both, down) in enumerate(parts):
                gate, up = both.chunk(2)
                for part, tensor in (("gate", gate), ("up", up), ("down", down)):
                    tensors[f"{prefix}{i}.{part}_proj.weight"] = tensor.contiguous()

    change(folder, unstack)
    assert torch.equal(logits(Model.load(folder)), stacked)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_dtype_asked_for(stored: torch.dtype, tmp_path: Path) -> None:
    folder = random_folder(tmp_path, seed=1, dtype=stored)
    exact = logits(Model.load(folder, dtype="fp32"))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = Model.load(folder, dtype=name)
        assert model.dtype == dtype
        rounded = logits(model)
        assert (rounded - exact).norm() < 0.1 * exact.norm()


def test_rope_may_be_flat_or_nested() -> None:
    nested = ModelConfig.parse(small_config())
    rope: dict[str, Any] = dict(small_config()["rope_parameters"])
    flat = {"rope_theta": rope.pop("rope_theta")}
    flat["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    rope["type"] = rope.pop("rope_type")
    assert (
        ModelConfig.parse(small_config(rope_parameters=None, rope_scaling=rope, **flat)) == nested
    )
    assert nested.rope == "theta=10000,dim=16,sections=3/3/2"


def test_eos_ids_come_from_the_generation_config_first(folder: Path) -> None:
    assert ModelConfig.read(folder).eos_token_ids == (0,)
    text = json.dumps({"eos_token_id": [5, 7]})
    (folder / "generation_config.json").write_text(text, encoding="utf-8")
    assert ModelConfig.read(folder).eos_token_ids == (5, 7)
    assert ModelConfig.parse(small_config(eos_token_id=None)).eos_token_ids == ()


def test_layers_may_be_given_by_an_interval() -> None:
    config = ModelConfig.parse(small_config(full_attention_interval=2))
    assert config.layer_types == ("linear_attention", "full_attention") * 2
    assert (config.num_linear_layers, config.num_attention_layers) == (2, 2)


# The digest


def test_the_digest_sees_every_byte_name_shape_and_dtype(folder: Path) -> None:
    digests = {Weights.open(folder).digest()}
    edits: list[Callable[[dict[str, torch.Tensor]], object]] = [
        lambda t: t["model.norm.weight"].view(torch.uint8)[3].add_(1),
        lambda t: t.update({"model.norms.weight": t.pop("model.norm.weight")}),
        lambda t: t.update({"mtp.norm.weight": t["mtp.norm.weight"].view(8, 8)}),
        lambda t: t.update({"mtp.norm.weight": t["mtp.norm.weight"].view(torch.int32)}),
        lambda t: t.pop("mtp.fc.weight"),
    ]
    for edit in edits:
        change(folder, edit)
        digests.add(Weights.open(folder).digest())
    assert len(digests) == len(edits) + 1


def test_the_digest_is_that_of_the_files_not_of_the_run(folder: Path) -> None:
    assert Model.load(folder, dtype="bf16").digest == Model.load(folder).digest
    assert len(Model.load(folder).digest) == 64


# What it may not hold


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model: '.*nowhere' is no folder; needs a Hugging Face"):
        Model.load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"model: '.*' has no config.json; needs"):
        Model.load(tmp_path)
    (tmp_path / "config.json").write_text("[", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config.json: .*; needs a JSON object"):
        Model.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small_config()), encoding="utf-8")
    with pytest.raises(ModelError, match=r"has no \*.safetensors; needs"):
        Model.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ModelError, match=r"needs safetensors"):
        Model.load(tmp_path)


ROPE = small_config()["rope_parameters"]
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"model_type": "llama"}, r"model_type: 'llama'; needs one of qwen3_5, "),
    "quantised": ({"quantization_config": {"bits": 4}}, r"quantization_config: .*; needs weights"),
    "missing": ({"head_dim": None}, r"head_dim: missing in config.json; needs an int of 1"),
    "no number": ({"hidden_size": "64"}, r"hidden_size: '64'; needs an int of 1 or more"),
    "zero": ({"linear_key_head_dim": 0}, r"linear_key_head_dim: 0; needs an int of 1"),
    "true": ({"vocab_size": True}, r"vocab_size: True; needs an int"),
    "eps": ({"rms_norm_eps": 0}, r"rms_norm_eps: 0; needs a number above 0"),
    "heads": ({"num_key_value_heads": 3}, r"num_attention_heads: 4; needs a multiple of num_key_v"),
    "values": ({"linear_num_key_heads": 3}, r"linear_num_value_heads: 4; needs a multiple"),
    "layer": ({"layer_types": ["mamba"] * 4}, r"layer_types: 'mamba'; needs one of linear_att"),
    "layers": ({"layer_types": ["full_attention"]}, r"layer_types: 1 of them; needs 4"),
    "no attention": ({"layer_types": ["linear_attention"] * 4}, r"layer_types: no full_attention"),
    "yarn": ({"rope_parameters": {**ROPE, "rope_type": "yarn"}}, r"rope_type: 'yarn'; needs one"),
    "theta": ({"rope_parameters": {}}, r"rope_theta: None; needs a number above 0"),
    "part": (
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.5}},
        r"partial_rotary_factor: 1.5 of head_dim 32; needs an even number",
    ),
    "sections": (
        {"rope_parameters": {**ROPE, "mrope_section": [3, 3]}},
        r"mrope_section: \[3, 3\]; needs three ints",
    ),
    "section": (
        {"rope_parameters": {**ROPE, "mrope_section": [3, 3, -1]}},
        r"mrope_section: \[3, 3, -1\]; needs three ints of 0 or more",
    ),
    "interleaved": (
        {"rope_parameters": {**ROPE, "mrope_interleaved": False}},
        r"mrope_interleaved: False; needs True",
    ),
    "width": ({"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim: 1; needs 2 or more"),
    "drafts": ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers: 2; needs 0 or 1"),
    "bias": ({"attention_bias": True}, r"attention_bias: True; needs False"),
    "activation": ({"hidden_act": "gelu"}, r"hidden_act: 'gelu'; needs 'silu'"),
    "too many experts": (
        {
            "model_type": "qwen3_5_moe_text",
            "num_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
        r"num_experts_per_tok: 3; needs at most 2",
    ),
    "no size of experts": (
        {"model_type": "qwen3_5_moe_text", "num_experts": 2, "num_experts_per_tok": 1},
        r"moe_intermediate_size: missing in config.json",
    ),
    "eos": ({"eos_token_id": 199}, r"eos_token_id: 199; needs token ids of the vocabulary"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
def test_a_config_that_cannot_be_run(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.parse(small_config(**fields))


def test_tensors_that_do_not_fit_are_listed_in_one_error(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.linear_attn.A_log"]
        tensors["model.layers.0.linear_attn.extra"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(65)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)

    change(folder, edit)
    with pytest.raises(ModelError) as caught:
        Model.load(folder)
    assert str(caught.value) == (
        "tensors: 4 do not fit config.json: "
        "model.layers.0.linear_attn.A_log missing; "
        "model.layers.0.linear_attn.extra unknown; "
        "lm_head.weight is I8, needs one of F32, BF16, F16; "
        "model.norm.weight is [65], needs [64]"
    )


def test_a_long_list_is_cut(folder: Path) -> None:
    change(folder, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:30]])
    with pytest.raises(ModelError, match=r"^tensors: 30 do not fit .* and 10 more$"):
        Model.load(folder)


def test_a_tensor_under_both_names_is_unknown_under_one(folder: Path) -> None:
    name = "model.language_model.norm.weight"
    change(folder, lambda tensors: tensors.update({name: torch.zeros(64)}))
    with pytest.raises(ModelError, match=r"^tensors: 1 do not fit .*: model.language_model.norm"):
        Model.load(folder)


def test_a_draft_head_is_there_whole_or_not_at_all(folder: Path) -> None:
    change(folder, lambda tensors: tensors.pop("mtp.fc.weight"))
    with pytest.raises(ModelError, match=r"^tensors: 1 do not fit config.json: mtp.fc.weight mis"):
        Model.load(folder)


def test_an_index_that_does_not_fit_its_shards(folder: Path) -> None:
    shard(folder)
    last = folder / "model-00003-of-00003.safetensors"
    tensors = load_file(last)
    save_file(dict(list(tensors.items())[1:]), last)
    with pytest.raises(ModelError, match=r"index.json: does not fit its shards: .* in model-00003"):
        Model.load(folder)
    last.unlink()
    with pytest.raises(ModelError, match=r"lacks model-00003-of-00003.safetensors"):
        Model.load(folder)
    (folder / "model.safetensors.index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"weight_map: missing"):
        Model.load(folder)


def test_a_dtype_that_is_none(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"dtype: 'int8'; needs one of fp32, bf16, fp16"):
        Model.load(folder, dtype="int8")


# Media


def test_media_embeddings_take_the_place_of_their_tokens() -> None:
    model = random_model(1)
    media = torch.randn(4, 64)
    rows = model.embed(TOKENS, spans=[(3, 7, media), (0, 1, media[:1])])
    plain = model.embed(TOKENS)
    assert torch.equal(rows[3:7], media)
    assert torch.equal(rows[0], media[0])
    assert torch.equal(rows[7:], plain[7:])
    assert torch.equal(rows[1:3], plain[1:3])


@pytest.mark.parametrize(
    ("begin", "end", "media", "message"),
    [
        (3, 7, torch.zeros(3, 64), r"embeddings of span \[3, 7\): \(3, 64\); needs \(4, 64\)"),
        (3, 7, torch.zeros(4, 63), r"\(4, 63\); needs \(4, 64\)"),
        (3, 7, torch.zeros(4, 64).half(), r"torch.float16; needs the model's torch.float32"),
        (18, 21, torch.zeros(3, 64), r"span: \[18, 21\); needs rows within \[0, 20\)"),
        (5, 5, torch.zeros(0, 64), r"span: \[5, 5\)"),
        (-1, 1, torch.zeros(2, 64), r"span: \[-1, 1\)"),
    ],
)
def test_media_embeddings_that_do_not_fit(
    begin: int, end: int, media: torch.Tensor, message: str
) -> None:
    with pytest.raises(PromptError, match=message):
        random_model(1).embed(TOKENS, spans=[(begin, end, media)])


def test_the_digest_tells_configs_apart_that_share_their_tensors(tmp_path: Path) -> None:
    folders = [random_folder(tmp_path / str(eps), rms_norm_eps=eps) for eps in (1e-6, 1e-5)]
    first, second = (Model.load(folder).digest for folder in folders)
    assert first != second
    assert first == Model.load(folders[0]).digest

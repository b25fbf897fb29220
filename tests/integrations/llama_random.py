"""Small GGUF models of random weights: a plain attention model, and one of Mamba-2's kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 512, 64, 4, 2, 16, 128, 2
STATE, GROUPS, KERNEL = 16, 1, 4
CONV = WIDTH + 2 * GROUPS * STATE
PLAIN = {
    "attn_q.weight": (HEADS * HEAD, WIDTH),
    "attn_k.weight": (KV_HEADS * HEAD, WIDTH),
    "attn_v.weight": (KV_HEADS * HEAD, WIDTH),
    "attn_output.weight": (WIDTH, HEADS * HEAD),
    "ffn_gate.weight": (INNER, WIDTH),
    "ffn_up.weight": (INNER, WIDTH),
    "ffn_down.weight": (WIDTH, INNER),
}
MAMBA = {
    "ssm_in.weight": (WIDTH + CONV + HEADS, WIDTH),
    "ssm_conv1d.weight": (CONV, KERNEL),
    "ssm_conv1d.bias": (CONV,),
    "ssm_dt.bias": (HEADS,),
    "ssm_d": (HEADS, 1),
    "ssm_norm.weight": (GROUPS, WIDTH // GROUPS),
    "ssm_out.weight": (WIDTH, WIDTH),
}
ARCHITECTURES = ("llama", "falcon-h1")


def write(architecture: str, target: Path) -> Path:
    """Write a model of that architecture, fp32; the same weights each time."""
    writer = gguf.GGUFWriter(target, architecture)
    _sizes(writer)
    if architecture == "falcon-h1":
        writer.add_ssm_conv_kernel(KERNEL)
        writer.add_ssm_inner_size(WIDTH)
        writer.add_ssm_state_size(STATE)
        writer.add_ssm_time_step_rank(HEADS)
        writer.add_ssm_group_count(GROUPS)
    for name, tensor in _tensors(architecture):
        writer.add_tensor(name, tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _sizes(writer: Any) -> None:
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_count(HEAD)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{token}" for token in range(VOCAB)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * VOCAB)
    writer.add_token_merges(["t 1"])
    writer.add_eos_token_id(VOCAB - 1)


def _tensors(architecture: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    rng = np.random.default_rng(0)
    hybrid = architecture == "falcon-h1"
    yield "token_embd.weight", rng.standard_normal((VOCAB, WIDTH))
    yield "output_norm.weight", np.ones(WIDTH)
    yield "output.weight", rng.standard_normal((VOCAB, WIDTH)) / 8
    for layer in range(LAYERS):
        for name, shape in {**PLAIN, **(MAMBA if hybrid else {})}.items():
            yield f"blk.{layer}.{name}", rng.standard_normal(shape) / np.sqrt(shape[-1])
        if hybrid:
            yield f"blk.{layer}.ssm_a", -np.exp(rng.standard_normal((HEADS, 1)))
        yield f"blk.{layer}.attn_norm.weight", np.ones(WIDTH)
        yield f"blk.{layer}.ffn_norm" + ("" if hybrid else ".weight"), np.ones(WIDTH)

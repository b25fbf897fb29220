"""Converts a Qwen3.5 folder in Hugging Face form to a GGUF file for llama.cpp.

    python -m ninfer_pool.integrations.llama_cpp.convert FOLDER FILE.gguf

Dense text models (``Qwen3_5ForCausalLM``) with a byte-level BPE tokenizer; the draft head is left
out. Weights are written as fp32 without loss, so that logits can be compared between
implementations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ninfer_pool.errors import ModelError, install_hint

try:
    import gguf
except ModuleNotFoundError:
    raise ModuleNotFoundError(install_hint("gguf", "llama"), name="gguf") from None

Array = npt.NDArray[Any]

ARCHITECTURE = "qwen35"
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
PRE = {"ByteLevel": "gpt-2"}
"""llama.cpp's name of a pre-tokenizer, by the one in tokenizer.json."""
SECTIONS = (11, 11, 10)
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
"""llama.cpp's name of each tensor of a layer, after ``model.layers.N.`` and ``blk.N.``."""
V_ROWS = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
V_ROWS_LAST = ("in_proj_qkv.weight", "conv1d.weight")
V_COLUMNS = ("out_proj.weight",)
"""Tensors of linear attention whose rows, last rows or columns belong to value heads."""


def convert(folder: str | Path, target: str | Path) -> Path:
    """Write the model in ``folder`` to ``target``, fp32; return its path.

    Raises:
        ModelError: an architecture, tokenizer or tensor that is not supported.
    """
    folder, target = Path(folder), Path(target)
    config = _config(folder)
    writer = gguf.GGUFWriter(target, ARCHITECTURE)
    _write_sizes(writer, config)
    _write_tokenizer(writer, folder, config)
    for name, tensor in _tensors(folder):
        if not name.startswith("mtp."):
            writer.add_tensor(_name(name), _converted(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _config(folder: Path) -> dict[str, Any]:
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {**whole, **whole.get("text_config", {})}
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"model_type: {kind!r}; needs one of {', '.join(MODEL_TYPES)}")
    return config


def _write_sizes(writer: Any, config: Mapping[str, Any]) -> None:
    rope = config["rope_parameters"]
    head = config["head_dim"]
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 0.25)))
    writer.add_rope_dimension_sections([*rope.get("mrope_section", SECTIONS), 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))


def _write_tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, kind = whole["model"], (whole.get("pre_tokenizer") or {}).get("type")
    if model["type"] != "BPE" or kind not in PRE or whole.get("normalizer"):
        raise ModelError(f"tokenizer: {model['type']}, {kind}; needs BPE with {', '.join(PRE)}")
    tokens = {index: f"[PAD{index}]" for index in range(config["vocab_size"])}
    types = dict.fromkeys(tokens, int(gguf.TokenType.UNUSED))
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, int(gguf.TokenType.NORMAL)
    for added in whole["added_tokens"]:
        special = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(special)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE[kind])
    writer.add_token_list([tokens[index] for index in sorted(tokens)])
    writer.add_token_types([types[index] for index in sorted(types)])
    writer.add_token_merges(merges)
    writer.add_add_bos_token(value=False)
    if config.get("eos_token_id") is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def _tensors(folder: Path) -> Iterator[tuple[str, Array]]:
    """Yield every tensor of the folder's safetensors files as fp32, in the files' order."""
    for path in sorted(folder.glob("*.safetensors")):
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        size = int(raw[:8].view("<u8")[0])
        header = json.loads(bytes(raw[8 : 8 + size]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            values = _fp32(np.asarray(raw[begin:end]), entry["dtype"], name)
            yield name, values.reshape(entry["shape"])


def _fp32(raw: Array, dtype: str, name: str) -> Array:
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in ("F16", "F32"):
        return raw.view(f"<f{dtype[1:].replace('16', '2').replace('32', '4')}").astype(np.float32)
    raise ModelError(f"{name}: {dtype}; needs BF16, F16 or F32")


def _name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, rest = name.partition("model.layers.")
    number, _, part = rest.partition(".")
    if part not in LAYER:
        raise ModelError(f"tensor: {name!r}; not one of a dense Qwen3.5 text model")
    return f"blk.{number}.{LAYER[part]}"


def _converted(name: str, tensor: Array, config: Mapping[str, Any]) -> Array:
    """Return a tensor in the form that llama.cpp expects.

    Norms are stored as 1 + weight, decay as -exp(A_log). Value heads are stored in the order in
    which ggml broadcasts key heads over them: one of each key head, then the next of each.
    """
    part = name.rpartition("linear_attn.")[2]
    if part == "conv1d.weight":
        tensor = tensor.squeeze(1)
    if part in (*V_ROWS, *V_ROWS_LAST):
        keys = config["linear_key_head_dim"] * config["linear_num_key_heads"]
        first = 2 * keys if part in V_ROWS_LAST else 0
        tensor = np.concatenate((tensor[:first], _tiled(tensor[first:], config)))
    elif part in V_COLUMNS:
        tensor = _tiled(tensor.T, config).T
    if part == "A_log":
        tensor = -np.exp(tensor)
    if name.endswith("norm.weight") and part != "norm.weight":
        tensor = tensor + 1
    return np.ascontiguousarray(tensor, dtype=np.float32)


def _tiled(rows: Array, config: Mapping[str, Any]) -> Array:
    groups = config["linear_num_key_heads"]
    each = config["linear_num_value_heads"] // groups
    parted = rows.reshape(groups, each, -1, *rows.shape[1:])
    return parted.swapaxes(0, 1).reshape(rows.shape)


if __name__ == "__main__":
    convert(*sys.argv[1:3])

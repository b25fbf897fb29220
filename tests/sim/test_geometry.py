"""Geometry: the shipped models add up, and sizes that do not are named."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.errors import GeometryError
from ninfer_pool.sim.geometry import Geometry, load_geometry, presets

SHIPPED: dict[str, Any] = json.loads(
    (resources.files("ninfer_pool.sim") / "geometry.json").read_text(encoding="utf-8")
)
RECORD: dict[str, Any] = SHIPPED["models"]["qwen3.8-27b"]
PLAIN: dict[str, Any] = {
    "hidden": 64,
    "layers": 2,
    "full_attention_layers": 2,
    "linear_layers": 0,
    "q_heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "image_bytes": 0,
    "kv_bytes_per_token": {"bf16": 2 * 2 * 2 * 64 * 2},
}


def saved(folder: Path, content: object) -> Path:
    path = folder / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refusal(folder: Path, content: object) -> str:
    with pytest.raises(GeometryError) as caught:
        load_geometry(saved(folder, content))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_manual_s_example_is_the_shipped_model_s(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "size-your-pool.md"
    text = page.read_text(encoding="utf-8").partition("### A model of your own")[2]
    path = saved(tmp_path, text.partition("```json\n")[2].partition("```")[0])
    shown, folder = load_geometry(path), resources.files("ninfer_pool.runner") / "tiny"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert shown.name == "ninfer-tiny"
    assert [shown.hidden, shown.layers] == [config["hidden_size"], config["num_hidden_layers"]]
    assert dataclasses.astuple(shown.sizes(kv="bf16", mtp=False)) == (65_536, 215_552, 64)
    assert shown.sizes(kv="bf16", mtp=True).page_bytes == 98_304  # as its `Runner.capacity` says


@pytest.mark.parametrize(
    ("model", "kv", "mtp", "page_bytes", "image_bytes"),
    [
        ("qwen3.8-27b", "int8-g64", False, 2_162_688, 153_954_304),
        ("qwen3.8-27b", "int8-g64", True, 2_297_856, 153_954_304),
        ("qwen3.8-27b", "bf16", True, 64 * (65_536 + 4_096), 153_954_304),
        ("qwen3.8-35b-a3b", "int8-g64", True, 64 * (10_560 + 1_056), 64_393_216),
        ("qwen3.8-35b-a3b", "nvfp4", False, 64 * 5_760, 64_393_216),
    ],
)
def test_sizes_of_the_shipped_models(
    *, model: str, kv: str, mtp: bool, page_bytes: int, image_bytes: int
) -> None:
    sizes = load_geometry(model).sizes(kv=kv, mtp=mtp)
    assert dataclasses.astuple(sizes) == (page_bytes, image_bytes, 64)


def test_every_field_of_a_record_is_kept() -> None:
    geometry = load_geometry("qwen3.8-27b")
    assert {name: getattr(geometry, name) for name in RECORD} == RECORD


def test_pages_may_have_another_length() -> None:
    sizes = load_geometry("qwen3.8-27b").sizes(kv="bf16", mtp=False, page_tokens=16)
    assert (sizes.page_bytes, sizes.page_tokens) == (16 * 65_536, 16)
    wrong: Any
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(GeometryError, match="page_tokens"):
            load_geometry("qwen3.8-27b").sizes(kv="bf16", mtp=False, page_tokens=wrong)


def test_an_unknown_kv_type_lists_the_known_ones() -> None:
    with pytest.raises(GeometryError) as caught:
        load_geometry("qwen3.8-27b").sizes(kv="int4", mtp=True)
    assert 'field kv: "int4"; must be one of bf16, fp8, int8-g64, k8v4, nvfp4' in str(caught.value)


def test_a_model_may_come_from_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, RECORD)
    assert load_geometry(path) == dataclasses.replace(presets()["qwen3.8-27b"], name="mine")
    assert load_geometry(str(path)).name == "mine"
    assert load_geometry(saved(tmp_path, {"name": "named", **PLAIN})).name == "named"
    assert load_geometry(saved(tmp_path, {"models": {"inner": PLAIN}})).name == "inner"


def test_plain_attention_has_no_image(tmp_path: Path) -> None:
    geometry = load_geometry(saved(tmp_path, PLAIN))
    assert dataclasses.astuple(geometry.sizes(kv="bf16", mtp=True)) == (64 * 1024, 0, 64)


@pytest.mark.parametrize("name", [*PLAIN])
def test_a_missing_size_is_named(name: str, tmp_path: Path) -> None:
    record = {key: value for key, value in PLAIN.items() if key != name}
    assert f"field {name}" in refusal(tmp_path, record)


@pytest.mark.parametrize(
    ("field", "changes", "wanted"),
    [
        ("layers", {"layers": 63}, "full_attention_layers + linear_layers, 64"),
        ("layers", {"layers": 64.0}, "a whole number"),
        ("hidden", {"hidden": 0}, "a whole number, 1 or more"),
        ("hidden", {"hidden": True}, "a whole number, 1 or more"),
        ("hidden", {"hidden": "5120"}, "a whole number, 1 or more"),
        ("kv_heads", {"kv_heads": -4}, "a whole number, 1 or more"),
        ("q_heads", {"q_heads": 25}, "a multiple of kv_heads, 4"),
        ("gdn_head_dim", {"gdn_head_dim": 0}, "a whole number, 1 or more"),
        ("mtp_layers", {"mtp_layers": -1}, "a whole number, 0 or more"),
        ("image_bytes", {"image_bytes": 153_954_305}, "153954304"),
        ("image_bytes", {"image_bytes": 0}, "153954304"),
        ("image_bytes", {"conv_channels": 10_241}, "hidden tail"),
        ("kv_bytes_per_token", {"kv_bytes_per_token": {}}, "at least one KV type"),
        ("kv_bytes_per_token", {"kv_bytes_per_token": 65_536}, "a JSON object"),
        ("kv_bytes_per_token.fp8", {"kv_bytes_per_token": {"fp8": 0}}, "1 or more"),
        ("kv_bytes_per_token.bf16", {"kv_bytes_per_token": {"bf16": 65_535}}, "65536"),
        ("kv_bytes_per_token.int8-g64", {"kv_bytes_per_token": {"int8-g64": 1}}, "33792"),
        ("mtp_bytes_per_token.bf16", {"mtp_bytes_per_token": {"bf16": 1}}, "4096"),
        ("mtp_bytes_per_token", {"mtp_bytes_per_token": {}}, "at least one KV type"),
    ],
)
def test_sizes_that_do_not_add_up_are_named(
    field: str, changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, {**RECORD, **changes})
    assert f"field {field}: " in message
    assert wanted in message


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", {"models": {}}, {"models": {"a": PLAIN, "b": PLAIN}}]
)
def test_a_file_that_is_no_model_is_refused(content: object, tmp_path: Path) -> None:
    assert "mine.json" in refusal(tmp_path, content)


def test_an_unknown_model_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(GeometryError, match=r"must be qwen3\.8-27b, qwen3\.8-35b-a3b or a file"):
        load_geometry("qwen4")
    for path in (tmp_path / "absent.json", tmp_path / "absent" / "x.json"):
        with pytest.raises(GeometryError, match="cannot be read"):
            load_geometry(path)


def test_a_geometry_cannot_be_changed() -> None:
    geometry: Geometry = load_geometry("qwen3.8-27b")
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.layers = 1  # type: ignore[misc]

"""Who runs an operation, and what importing the operations brings with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from ninfer_pool import kernels
from ninfer_pool.kernels import dispatch, reference

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = [
    "append_kv",
    "attention_decode",
    "attention_prefill",
    "conv_prefill",
    "conv_step",
    "copy_pages",
    "delta_prefill",
    "delta_step",
    "first_difference",
    "load_image",
    "save_image",
]


def test_importing_and_calling_on_cpu_loads_no_triton() -> None:
    code = """if True:
        import sys, torch
        from ninfer_pool import kernels
        a = torch.zeros(3, dtype=torch.int32)
        assert kernels.first_difference(a, a) == 3
        print("triton" in sys.modules)
    """
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]


def test_every_operation_of_the_api_is_the_references() -> None:
    assert set(OPERATIONS) < set(kernels.__all__)
    for name in OPERATIONS:
        api, plain = getattr(kernels, name), getattr(reference, name)
        assert api.__wrapped__ is plain
        assert api.__doc__ == plain.__doc__


def test_every_operation_has_a_file_of_its_launcher() -> None:
    for name in OPERATIONS:
        file = ROOT / f"ninfer_pool/kernels/cuda/{dispatch._FILES.get(name, name)}.py"
        assert f"\ndef {name}(" in file.read_text(encoding="utf-8")


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@pytest.mark.parametrize("installed", [False, True])
def test_a_card_without_triton_runs_the_reference(
    monkeypatch: pytest.MonkeyPatch, *, installed: bool
) -> None:
    def operation(x: torch.Tensor, *, by: int) -> str:
        return "reference"

    def launcher(name: str) -> object:
        assert name == "operation"
        return lambda x, by: "triton"

    monkeypatch.setattr(dispatch, "_runs_triton", lambda device: installed)
    monkeypatch.setattr(dispatch, "_in_triton", launcher)
    monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
    x = torch.zeros(2).as_subclass(OnCuda)
    run = dispatch.dispatched(operation)
    assert run(x, by=1) == run(by=1, x=x) == ("triton" if installed else "reference")
    assert run(torch.zeros(2), by=1) == "reference"


@pytest.mark.parametrize(("capability", "runs"), [((6, 1), False), ((7, 0), True), ((12, 0), True)])
def test_a_card_that_triton_does_not_know_is_left_to_the_reference(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, runs: bool
) -> None:
    runs_triton = dispatch._runs_triton.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: object())
    assert runs_triton(torch.device("cuda")) is runs
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert not runs_triton(torch.device("cuda"))

"""Stands in for the simulator in tests of the command line."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ninfer_pool import cli
from ninfer_pool.sim.setup import Setup
from ninfer_pool.sim.trace import Trace
from tests.sim.made_runs import made_runs

POLICIES = ("default", "lru", "fifo")
HEADER = '{"format":"ninfer-pool-trace","version":1,"name":"t","source":"s","licence":"CC0"}'
LINE = '{"id":0,"t":0,"session":"a","kind":"main","parent":null,"shared":0,"input":100,"output":10}'
NEXT = '{"id":1,"t":1,"session":"a","kind":"main","parent":0,"shared":110,"input":120,"output":10}'


@dataclasses.dataclass
class FakeReplay:
    """Stands in for the simulator: notes what it is asked, gives made-up runs."""

    asked: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    fail: BaseException | None = None

    def simulator(self, trace: Trace, setup: Setup, _: object = None) -> SimpleNamespace:
        return SimpleNamespace(
            sweep=functools.partial(self.sweep, trace, setup),
            explain=lambda plan, request: f"explained {trace.name} {request} {plan}",
        )

    def sweep(self, trace: Trace, setup: Setup, **sizes: Any) -> Iterator[Any]:
        options = {each.name: getattr(setup, each.name) for each in dataclasses.fields(setup)}
        self.asked.append({"trace": trace, "setup": options, **sizes})
        runs = made_runs(
            trace.name,
            policies=sizes["policies"],
            entries=sizes["entries"],
            budgets=sizes["budgets"],
        )
        for run in runs:
            yield SimpleNamespace(run=run, detail=[{"id": r.id} for r in trace.requests])
            if self.fail is not None:
                raise self.fail


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(capsys: pytest.CaptureFixture[str], argv: Sequence[str | Path]) -> str:
    """The one line on stderr of a command line that is refused."""
    assert cli.main([str(word) for word in argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ninfer-pool: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err

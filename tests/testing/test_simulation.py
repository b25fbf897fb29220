"""The simulation: seeds pass, replay exactly, and find what is broken on purpose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from ninfer_pool.core import eviction as room
from ninfer_pool.core import lease as lease_module
from ninfer_pool.core.entry import Checkpoint
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.ledger import PageLedger
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.core.state import PoolState
from ninfer_pool.testing import __main__ as command
from ninfer_pool.testing import simulation
from ninfer_pool.testing.simulation import ACTIONS, STEPS_OF_A_REQUEST, SimulationFailed, simulate
from ninfer_pool.testing.world import World

SEEDS, MANY_SEEDS = 40, 5_000
FOUND_WITHIN = 40
"""Seeds within which each fault below is found."""


@pytest.mark.slow
def test_seeds_pass_and_go_through_everything(long_run: bool) -> None:  # noqa: FBT001
    done: Counter[str] = Counter()
    victims = 0
    for life in simulation.lives(range(MANY_SEEDS if long_run else SEEDS)):
        done += life.actions
        victims += life.victims
    assert set(done) == {*ACTIONS, *STEPS_OF_A_REQUEST}
    assert min(done.values()) > SEEDS // 2
    assert victims > 5 * SEEDS


def test_a_seed_replays_exactly() -> None:
    assert simulate(3) == simulate(3)
    assert simulate(3).digest != simulate(4).digest


def test_each_seed_has_weights_of_its_own() -> None:
    weights = [simulation.draw_weights(World.drawn(seed).random) for seed in range(20)]
    for name in weights[0]:
        assert len({each[name] for each in weights}) > 1, name
    assert all(each["commit"] and each["ask"] for each in weights)


# -- faults of the pool: what is put in place of what is right ----------------------------------


def share_the_last_page(*_: Any) -> tuple[list[Any], bool]:
    return [], False


def keep_nothing(self: PageLedger, units: Any) -> None:
    pass


def forget_the_claim(self: PoolState, mark: Checkpoint, units: Any) -> None:
    self.ledger.ref_lease(units)


def take_the_first(state: Any, bill: Any) -> bool:
    for entry in state.catalog.entries.values():
        if not entry.tip.refs:
            room.truncate_entry(state, entry, bill)
            return True
    return False


def evict_too_much(state: Any, pages: int, bill: Any) -> None:
    room._evict_until(state, lambda: state.ledger.free > pages, bill)


def inside_nothing(self: Prompt, position: int) -> bool:
    return False


def trust_the_lie(self: Lease, why: str) -> None:
    pass


def always_fits(state: Any, fresh: Any) -> bool:
    return True


def keep_drafts(self: Lease, position: int) -> None:
    self.frontier = position


FAULTS: list[tuple[Any, str, Any]] = [
    ("ninfer_pool.core.admission", "_copies", share_the_last_page),
    (PageLedger, "ref_pin", keep_nothing),
    (PoolState, "ref_lease", forget_the_claim),
    (room, "_truncate_next", take_the_first),
    ("ninfer_pool.core.admission", "evict_for", evict_too_much),
    (Prompt, "inside_media", inside_nothing),
    (Lease, "_distrust", trust_the_lie),
    (lease_module, "fits_without_eviction", always_fits),
    (Lease, "truncate", keep_drafts),
]


def put(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Any) -> None:
    if isinstance(where, str):
        monkeypatch.setattr(f"{where}.{name}", wrong)
    else:
        monkeypatch.setattr(where, name, wrong)


@pytest.mark.parametrize(("where", "name", "wrong"), FAULTS, ids=[f[1] for f in FAULTS])
def test_a_fault_is_found_and_replays(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, wrong: Any
) -> None:
    put(monkeypatch, where, name, wrong)
    with pytest.raises(SimulationFailed) as found:
        for _ in simulation.lives(range(FOUND_WITHIN)):
            pass
    with pytest.raises(SimulationFailed) as again:
        simulate(found.value.seed)
    assert str(again.value) == str(found.value)
    assert again.value.log == found.value.log
    assert repr(again.value.__cause__) == repr(found.value.__cause__)


# -- the command ------------------------------------------------------------------------------


def test_the_command_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["simulate", "--seeds", "2", "--steps", "20"]) == 0
    assert "2 of 2 seeds: 120 steps" in capsys.readouterr().out


def test_the_command_replays_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for _ in range(2):
        assert command.main(["simulate", "--seed", "7"]) == 0
        outputs.append(capsys.readouterr().out.splitlines()[0].split(",")[0])
    assert outputs[0] == outputs[1] == f"seed 7: trace {simulate(7).digest}"


def test_the_command_stops_when_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["simulate", "--seeds", "99999", "--minutes", "0.005"]) == 0
    assert "when the time was up" in capsys.readouterr().out


def test_the_command_says_how_to_replay_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Lease, "_distrust", trust_the_lie)
    assert command.main(["simulate", "--seeds", str(FOUND_WITHIN)]) == 1
    told = capsys.readouterr()
    replay = told.out.splitlines()[-1]
    seed = replay.rpartition(" ")[2]
    assert replay == f"replay: python -m ninfer_pool.testing simulate --seed {seed}"
    assert command.revision() in told.out
    assert "AssertionError" in told.err
    assert command.main(["simulate", "--seed", seed]) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--seeds", "0"],
        ["--minutes", "0"],
        ["--minutes", "nan"],
        ["--seed", "-1"],
        ["--steps", "x"],
    ],
)
def test_the_command_refuses_what_cannot_be(words: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(["simulate", *words])
    assert refused.value.code == 2


def test_the_revision_is_a_commit_or_a_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    assert command.revision().split()[0] in ("commit", "version")
    monkeypatch.setattr("ninfer_pool.__file__", str(tmp_path / "ninfer_pool" / "__init__.py"))
    assert command.revision().startswith("version ")

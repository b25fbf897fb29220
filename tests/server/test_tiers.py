"""What has no room on the device is not lost, nor is what a restart would lose."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ninfer_pool.cli import main
from ninfer_pool.server.shutdown import unwritten
from ninfer_pool.tiers.disk.files import Files
from tests.server.shapes import DETAIL, EXPLANATION, POOL, faults
from tests.server.talks import Talk, explained, prose, system, watched
from tests.server.test_agreement import samples
from tests.server.tiered import (
    ROOMY,
    SMALL_DEVICE,
    on_disk,
    pressed,
    rotated,
    settled,
    talks,
    tier_of,
    tiers,
)
from tests.server.world import Server, cached, serve

TIERS = ("host", "disk")
STOPPED = re.compile(r"stopped: (\d+) entries on disk \(.+\), (\d+) not written")


def options_of(tier: str, folder: Path) -> dict[str, Any]:
    """Options of a server that has one tier below a small device."""
    below = {"host_budget": ROOMY} if tier == "host" else on_disk(folder)
    return {"kv_budget": SMALL_DEVICE, "lanes": 2, **below}


def last_numbers(server: Server) -> tuple[int, int]:
    """Entries that were kept and left out, as the last line says."""
    said = STOPPED.fullmatch(server.lines[-1])
    assert said is not None, server.lines[-1]
    return int(said[1]), int(said[2])


# -- a working set of three times the device ------------------------------------------------


def test_three_times_the_device_reuses_what_an_endless_one_does(
    tmp_path: Path, *, long_run: bool
) -> None:
    asked = {"chats": 9, "rounds": 4} if long_run else {"chats": 7, "rounds": 3}
    with serve(kv_budget=ROOMY, lanes=2) as server:
        endless, prompts, answers = rotated(server, **asked)
        assert server.get("/pool")["bytes"]["retained"] > 3 * (4 << 20)
    with serve(kv_budget=SMALL_DEVICE, lanes=2) as server:
        assert rotated(server, **asked)[0] < endless / 2
    both = {"host_budget": "6MiB", **on_disk(tmp_path / "both")}
    for below in ({"host_budget": ROOMY}, on_disk(tmp_path / "disk"), both):
        with serve(kv_budget=SMALL_DEVICE, lanes=2, **below) as server:
            reused, again, same = rotated(server, **asked)
            hits = server.get("/metrics")["live"]["hits_by_tier"]
        assert (again, same) == (prompts, answers)
        assert reused >= 0.97 * endless, below
        assert sum(tier["cache_hit_tokens"] for tier in hits.values()) == reused
        assert hits.keys() & set(TIERS)


# -- what is said of it ---------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_everything_names_the_tier_of_a_hit(tier: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with serve(log=log, **options_of(tier, tmp_path / "store")) as server:
        first = Talk(server, [system(prose(1, 120))])
        cold = first.turn("What is told of it?")
        server.idle()
        assert tier_of(cold) is None
        assert "cached_tier" not in cold["usage"]["prompt_tokens_details"]
        pressed(server)
        (entry,) = [e for e in server.get("/pool")["entries"] if e["key"] == cold["pool"]["key"]]
        assert entry["tier"] == tier
        detail = server.get(f"/pool/entries/{entry['key']}")
        assert f"the {tier} tier" in " ".join(detail["explanation"])
        ages = ("age_seconds", "idle_seconds")
        assert [detail["entry"][age] for age in ages] == [None, None]
        assert (
            faults({**detail, "entry": {**detail["entry"], **dict.fromkeys(ages, 0)}}, DETAIL) == []
        )
        question = [*first.messages, {"role": "user", "content": "And then?"}]
        told = explained(server, *question, enable_thinking=False)
        assert faults(told, EXPLANATION) == []
        assert told["tier"] == tier
        assert f"in the {tier} tier" in told["text"]
        warm = first.turn("And then?")
        again = explained(server, *question, enable_thinking=False)
        settled(server)
        agree_on_tiers(server, log, {tier: cached(warm)}, warm)
    assert (cached(warm), tier_of(warm)) == (told["resumable"], tier)
    assert again["tier"] == "device"


def agree_on_tiers(server: Server, log: Path, wanted: dict[str, int], last: dict[str, Any]) -> None:
    """Usage, console, log, metrics and pool say of the last request where it resumed from."""
    tier, shown = tier_of(last), server.get("/pool")
    assert faults({**shown, "entries": []}, POOL) == []
    assert last["usage"]["prompt_tokens_details"]["cached_tier"] == tier
    assert server.lines[-1].endswith(f" tier={tier}")
    assert json.loads(log.read_text().splitlines()[-1])["tier"] == tier
    assert shown["requests"][0]["tier"] == tier
    live, newest = (server.get("/metrics")[name] for name in ("live", "last"))
    assert newest["tier"] == tier
    assert live["tiers"] == shown["tiers"]
    assert {t: one["cache_hit_tokens"] for t, one in live["hits_by_tier"].items()} == wanted
    text = samples(server)
    tokens = text["ninfer_pool_tier_cached_tokens_total"]
    assert tokens == {(("tier", t),): count for t, count in wanted.items()}
    for each in shown["tiers"]:
        label = (("tier", each["tier"]),)
        for name in ("entries", "checkpoints", "bytes", "budget_bytes", "damaged"):
            assert text[f"ninfer_pool_tier_{name}"][label] == each[name]
        for name in ("stored", "stored_bytes", "images", "promoted", "dropped", "failed"):
            assert text[f"ninfer_pool_tier_{name}_total"][label] == each[name]
    totals = shown["tiers"][0]
    assert totals["stored"] > 0
    assert totals["promoted"] == 1


def test_without_tiers_there_is_the_device_alone() -> None:
    with serve() as server:
        server.chat("Good morning.")
        warm = server.chat("Good morning.")
        server.idle()
        assert tier_of(warm) == "device"
        assert server.get("/pool")["tiers"] == server.get("/metrics")["live"]["tiers"] == []
        assert {entry["tier"] for entry in server.get("/pool")["entries"]} == {"device"}
        assert not [name for name in samples(server) if name.startswith("ninfer_pool_tier_bytes")]
    assert not [line for line in server.lines if line.startswith("stopped")]


def test_under_a_salt_a_tiers_bytes_are_told_and_nothing_else(tmp_path: Path) -> None:
    with serve(**options_of("disk", tmp_path)) as server:
        pressed(server)
        (mine,) = server.get("/pool")["tiers"]
        (theirs,) = server.get("/pool", params={"cache_salt": "a"})["tiers"]
        assert server.get("/pool", params={"cache_salt": "a"})["entries"] == []
    told = {name for name, value in theirs.items() if value is not None}
    assert told == {"tier", "bytes", "budget_bytes"}
    assert theirs["bytes"] == mine["bytes"]


# -- a restart ------------------------------------------------------------------------------


def test_a_conversation_goes_on_after_a_restart(tmp_path: Path) -> None:
    """Bit for bit as if nothing had happened, with the tier that it came from named."""
    below = {"lanes": 2, **on_disk(tmp_path / "store")}
    with serve(lanes=2) as server, watched(server) as seen:
        talk = Talk(server, [system(prose(3, 120))])
        whole = [talk.turn(f"Question {number}?", max_tokens=24) for number in range(4)]
        bits = [seen.bits(body) for body in whole]
    messages = [system(prose(3, 120))]
    for number, expected in enumerate(whole):
        with serve(**below) as server, watched(server) as seen:
            talk = Talk(server, messages)
            body = talk.turn(f"Question {number}?", max_tokens=24)
            assert cached(body) == cached(expected)
            assert seen.bits(body) == bits[number]
            assert tier_of(body) == ("disk" if number else None)
        assert last_numbers(server) == (1, 0)
        messages = talk.messages


def test_a_restart_with_a_host_tier_names_the_disk(tmp_path: Path) -> None:
    below = {"lanes": 2, "host_budget": ROOMY, **on_disk(tmp_path / "store")}
    messages = [system(prose(4, 120))]
    for wanted in (None, "disk"):
        with serve(**below) as server:
            talk = Talk(server, messages)
            assert tier_of(talk.turn("What of it?")) == wanted
        messages = talk.messages


def test_what_there_was_no_time_for_is_counted(tmp_path: Path) -> None:
    with serve({"shutdown_seconds": 0}, lanes=2, **on_disk(tmp_path / "store")) as server:
        for talk in talks(server, 3):
            talk.turn("What of it?")
        server.idle()
        assert unwritten(server.runner.tiers) == 3
    assert last_numbers(server) == (0, 3)


# -- what was deleted stays deleted ---------------------------------------------------------


@pytest.mark.parametrize("every", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("tier", TIERS)
def test_what_was_deleted_comes_back_from_nowhere(
    tier: str, tmp_path: Path, *, every: bool
) -> None:
    options = options_of(tier, tmp_path / "store")
    with serve(**options) as server:
        talk = Talk(server, [system(prose(1, 120))])
        key = talk.turn("What is told of it?")["pool"]["key"]
        pressed(server)
        path = "/pool/entries" if every else f"/pool/entries/{key}"
        removed = server.http.delete(path)
        assert removed.status_code == 200
        if every:
            assert removed.json()["removed"] >= 7
            assert removed.json()["kept"] == 0
            assert server.get("/pool")["entries"] == []
        assert server.http.get(f"/pool/entries/{key}").status_code == 404
        assert nothing_left(server, talk)
        pressed(server, since=200)
        assert nothing_left(server, talk)
    with serve(**options) as server:
        talk.server = server
        assert nothing_left(server, talk)


def nothing_left(server: Server, talk: Talk) -> bool:
    question = [*talk.messages, {"role": "user", "content": "And then?"}]
    alone = {"retain_prefix": False, "enable_thinking": False}
    return cached(server.chat(*question, **alone)) == 0


def test_a_conversation_on_the_device_is_deleted_below_as_well(tmp_path: Path) -> None:
    options = {"lanes": 2, **on_disk(tmp_path / "store")}
    with serve(**options) as server:
        talk = Talk(server, [system(prose(1, 120))])
        talk.turn("What is told of it?")
    with serve(**options) as server:
        talk.server = server
        key = talk.turn("And then?")["pool"]["key"]  # on the device, and its first turn on disk
        server.idle()
        assert server.http.delete(f"/pool/entries/{key}").status_code == 200
        assert nothing_left(server, talk)
    with serve(**options) as server:
        assert server.get("/pool")["entries"] == []
        assert nothing_left(server, talk)


# -- what goes wrong on a disk --------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, code: int) -> Callable[[], None]:
    """Let every write to disk fail once the returned function was called."""
    broken: list[bool] = []

    def wrap(name: str) -> None:
        inner = getattr(Files, name)

        def call(self: Files, *args: Any, **options: Any) -> Any:
            if broken:
                raise OSError(code, os.strerror(code))
            return inner(self, *args, **options)

        monkeypatch.setattr(Files, name, call)

    for name in ("create", "write"):
        wrap(name)
    return lambda: broken.append(True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_fails_no_request(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, long_run: bool
) -> None:
    if code != errno.ENOSPC and not long_run:
        pytest.skip("a full disk tells it; needs --long")
    fail = failing(monkeypatch, code)
    options = options_of("disk", tmp_path / "store")
    with serve(**options) as server:
        talk = Talk(server, [system(prose(1, 120))])
        talk.turn("What is told of it?")
        pressed(server)
        before = tiers(server)["disk"]
        fail()
        pressed(server, since=200)
        after = tiers(server)["disk"]
        assert after["stored"] == before["stored"]
        assert after["failed"] > 0
        assert tier_of(talk.turn("And then?")) == "disk"  # what is there still is
    kept, lost = last_numbers(server)
    assert kept >= before["entries"] - 1
    assert lost > 0


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert refused(capsys, tmp_path / "file" / "store").startswith("--disk-dir: ")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    assert refused(capsys, tmp_path / "other").startswith("--disk-dir: ")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_folder_that_is_read_only_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    assert refused(capsys, tmp_path / "store").startswith("--disk-dir: ")


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(lanes=2, **on_disk(tmp_path / "store")):
        said = refused(capsys, tmp_path / "store")
    assert said.startswith("--disk-dir: ")
    assert "in use" in said


def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """What the command says of a folder."""
    options = ("--disk-dir", str(folder), "--disk-budget", "64MiB", "--port", "0")
    assert main(["serve", "--kv-budget", "16MiB", *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(folder) in said
    return said.removeprefix("ninfer-pool: error: ")


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_another_models_entries_are_ignored_and_left_alone(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serve(lanes=2, **on_disk(store)) as server:
        first = server.chat("Good morning.")
    theirs = {name: data for name, data in files_below(store).items() if "entries" in name}
    assert theirs
    with serve(lanes=2, kv_dtype="bf16", **on_disk(store)) as server:
        assert server.get("/pool")["entries"] == []
        assert cached(server.chat("Good morning.")) == 0
    after = files_below(store)
    assert {name: after[name] for name in theirs} == theirs
    with serve(lanes=2, **on_disk(store)) as server:
        warm = server.chat("Good morning.")
        assert tier_of(warm) == "disk"
        assert warm["choices"] == first["choices"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    import threading

    left = [thread.name for thread in threading.enumerate() if thread.name == "ninfer-tiers"]
    assert not left

"""What the tables of `ninfer-pool simulate` say, and that they say it where a person looks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ninfer_pool.sim.geometry import PageSizes, load_geometry
from ninfer_pool.sim.report import count, gap_closed, reason_table, report, tier_table, top
from tests.sim.made_runs import GIB, made_runs, with_tiers

SIZES = PageSizes(page_bytes=2_297_856, image_bytes=153_954_304, page_tokens=64)


def rows(text: str, name: str) -> list[list[str]]:
    """All table rows that begin with `name`, as words after it."""
    found = re.findall(rf"^  {re.escape(name)}  +(.*)$", text, flags=re.MULTILINE)
    return [line.split() for line in found]


def percents(runs: list[dict[str, Any]], policy: str, field: str) -> list[str]:
    return [
        f"{100 * run['hit_rate']:.1f}%"
        for run in runs
        if run["policy"] == policy and run[field] is not None
    ]


def test_headline_says_trace_requests_tokens_and_sizes_in_words() -> None:
    first, second, third = report(made_runs(), sizes=SIZES).splitlines()[:3]
    assert first == "made: 40 requests, 2.00 M prompt tokens, 95.0% reused by an endless pool"
    assert second.startswith("qwen3.8-27b, int8-g64 KV, with MTP: one page = 64 tokens")
    assert "one image = 147 MiB = 67 pages = 4,288 tokens" in second
    assert third.startswith("1 lane, affinity prefer")


def test_without_the_draft_layer_an_image_is_4556_tokens() -> None:
    sizes = load_geometry("qwen3.8-27b").sizes(kv="int8-g64", mtp=False)
    assert "one image = 147 MiB = 72 pages = 4,556 tokens" in report(made_runs(), sizes=sizes)


def test_a_model_of_plain_attention_has_no_image() -> None:
    sizes = PageSizes(page_bytes=65_536, image_bytes=0, page_tokens=64)
    assert "no image: every token position can be resumed" in report(made_runs(), sizes=sizes)


@pytest.mark.parametrize("policy", ["default", "lru", "clairvoyant"])
def test_each_policy_has_its_rate_at_each_value_of_both_sweeps(policy: str) -> None:
    runs = made_runs()
    found = rows(report(runs, sizes=SIZES), policy)
    assert percents(runs, policy, "entries") in found
    assert percents(runs, policy, "budget_bytes") in found


def test_a_bound_without_size_has_its_one_rate_at_every_value() -> None:
    found = rows(report(made_runs(), sizes=SIZES), "endless")
    assert ["95.0%"] * 3 in found
    assert ["95.0%"] * 2 in found


def test_a_run_has_prefilled_tokens_paths_evictions_and_peak() -> None:
    text = report(made_runs(entries=(2,), budgets=()), sizes=SIZES)
    assert rows(text, "policy")[1] == (
        ["at", "reused", "prefilled", "frontier", "reset", "turn", "evicted", "peak"]
    )
    assert rows(text, "single_lane")[1] == (
        ["any", "25.0%", "1.50", "M", "25", "5", "10", "7", "12", "GiB"]
    )


def test_refused_requests_are_shown_when_there_are_any() -> None:
    runs = made_runs(entries=(2,), budgets=())
    assert "refused" not in report(runs, sizes=SIZES)
    runs[0]["refused"] = 3
    assert rows(report(runs, sizes=SIZES), "default")[1][-1] == "3"


def test_gap_closed_is_the_share_of_clairvoyants_lead() -> None:
    runs = made_runs(entries=(2,), budgets=())
    for run in runs:
        run["hit_rate"] = {"lru": 0.5, "default": 0.6, "clairvoyant": 0.9}.get(run["policy"], 0)
    assert gap_closed(runs, "entries", 2) == pytest.approx(0.25)
    assert rows(report(runs, sizes=SIZES), "gap lru-clairvoyant closed by default") == [["25%"]]


def test_there_is_no_gap_to_close_where_lru_is_as_good_or_missing() -> None:
    runs = made_runs(entries=(2,), budgets=())
    for run in runs:
        run["hit_rate"] = 0.5
    assert gap_closed(runs, "entries", 2) is None
    assert "closed by" not in report(runs, sizes=SIZES)
    assert gap_closed(made_runs(policies=("default",)), "entries", 2) is None


def test_reasons_are_those_that_lost_tokens_worst_first() -> None:
    text = reason_table(made_runs(), "entries").text()
    assert text.index("evicted") < text.index("no_checkpoint_before")
    assert "1,234 (6)" in text
    assert "hit" not in text
    losses = [{"a": {"tokens": 5}, "b": {"tokens": 3}}, {"b": {"tokens": 3}, "c": {"tokens": 0}}]
    assert top(losses) == ["b", "a"]


def test_a_trace_that_lost_nothing_says_so() -> None:
    runs = made_runs()
    for run in runs:
        run["reasons"] = {"hit": {"requests": 40, "tokens": 0}}
    assert "no matched token was lost" in report(runs, sizes=SIZES)


def test_a_sweep_that_was_not_asked_for_has_no_table() -> None:
    text = report(made_runs(budgets=()), sizes=SIZES)
    assert "bytes retained" not in text
    assert text.count("Prompt tokens reused") == 1


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999_999, "999,999"), (8_820_000, "8.82 M"), (389_100_000, "389.1 M")],
)
def test_counts_stay_short(number: int, text: str) -> None:
    assert count(number) == text


def test_columns_line_up() -> None:
    lines = reason_table(made_runs(), "entries").text().splitlines()[1:]
    assert len({len(line) for line in lines}) == 1


def test_tiers_are_named_with_their_sizes_and_rates() -> None:
    text = report(with_tiers(made_runs()), sizes=SIZES)
    said = "tiers below the device: host 64 GiB at 25 GB/s, disk 1 TiB at 1.6 GB/s; the bounds"
    assert text.splitlines()[3].startswith(said)
    assert text.count("; below the device host 64 GiB, disk 1 TiB") == 2
    assert "below the device" not in report(made_runs(), sizes=SIZES)


def test_each_run_tells_what_each_tier_gave() -> None:
    runs = with_tiers(made_runs(policies=("lru",), entries=(), budgets=(8 * GIB,)))
    text = tier_table(runs, "budget_bytes").text()
    wanted = [f"{100 * told['reused_tokens'] / 2e6:.1f}%" for told in runs[0]["tiers"]]
    found = rows(text, "lru")
    assert [line[2] for line in found] == ["device", "host", "disk"]
    assert [line[3] for line in found] == wanted
    assert found[0][5:9] == ["-"] * 4
    assert found[1][5:9] == ["10", "GiB", "0.4", "s"]
    assert found[2][5:9] == ["3", "GiB", "2.0", "s"]
    assert text in report(runs, sizes=SIZES)


def test_a_bound_without_tiers_is_no_measure_of_a_policy_with_them() -> None:
    assert "closed by default" in report(made_runs(), sizes=SIZES)
    assert "closed by default" not in report(with_tiers(made_runs()), sizes=SIZES)

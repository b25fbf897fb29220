"""The report of a simulation: one trace's runs as plain tables.

A run is one element of the JSON contract's `runs`. The functions here only select and format:
every figure is in the JSON too. A `TextTable` prints as text and is drawn by the HTML page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ninfer_pool.core.sizes import format_bytes
from ninfer_pool.sim.geometry import PageSizes
from ninfer_pool.sim.options import BOUNDS

Run = dict[str, Any]
SWEEPS = ("entries", "budget_bytes")
RATE_TITLES = {
    "entries": "Prompt tokens reused by K retained entries, bytes unlimited",
    "budget_bytes": "Prompt tokens reused by bytes retained, K unlimited",
}
TOP_REASONS = 6
_SHORT_PATHS = {"append_frontier": "frontier", "full_reset": "reset"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """Cells as text; the first `left` columns are flush left. An empty row is a rule."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1

    def text(self) -> str:
        """Return the table for a terminal, columns two spaces apart."""
        cells = [self.columns, *(row for row in self.rows if row)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rule = "  " + "-" * (sum(widths) + 2 * len(widths) - 2)
        lines = [self.title, self._line(self.columns, widths), rule]
        lines += [self._line(row, widths) if row else rule for row in self.rows]
        return "\n".join(lines)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        pairs = zip(row, widths, strict=True)
        cells = (
            cell.ljust(width) if column < self.left else cell.rjust(width)
            for column, (cell, width) in enumerate(pairs)
        )
        return ("  " + "  ".join(cells)).rstrip()


def report(runs: Sequence[Run], *, sizes: PageSizes) -> str:
    """Return the report on one trace: headline, model in words, then each sweep's tables."""
    parts = [headline(runs), describe_model(runs[0], sizes=sizes), ""]
    for table in tables(runs):
        parts += [table.text(), ""]
    return "\n".join(parts)


def headline(runs: Sequence[Run]) -> str:
    """`trace: 1,109 requests, 82.3 M prompt tokens, at best 96.9% reused`."""
    first = runs[0]
    best = next((run["hit_rate"] for run in runs if run["policy"] == "endless"), None)
    tail = "" if best is None else f", {percent(best)} reused by an endless pool"
    served = max(run["input_tokens"] for run in runs)
    return f"{first['trace']}: {first['requests']:,} requests, {count(served)} prompt tokens{tail}"


def describe_model(run: Run, *, sizes: PageSizes) -> str:
    """Return model, page and image sizes, lanes and speeds, in words."""
    page, image = sizes.page_bytes, sizes.image_bytes
    draft = "with" if run["mtp"] else "without"
    lines = f"{run['model']}, {run['kv']} KV, {draft} MTP: "
    lines += f"one page = {sizes.page_tokens} tokens = {format_bytes(page)}; "
    if image:
        pages = -(-image // page)
        tokens = round(image * sizes.page_tokens / page)
        lines += f"one image = {format_bytes(image)} = {pages} pages = {tokens:,} tokens"
    else:
        lines += "no image: every token position can be resumed"
    lanes = "1 lane" if run["lanes"] == 1 else f"{run['lanes']} lanes"
    speed = f"prefill {run['prefill_rate']:g} and decode {run['decode_rate']:g} tokens per second"
    return f"{lines}\n{lanes}, affinity {run['affinity']}, {speed}{_describe_tiers(run)}"


def _describe_tiers(run: Run) -> str:
    """Return a line on the tiers below the device, empty where there are none."""
    below = [
        f"{name} {format_bytes(run[f'{name}_budget_bytes'])} at {run[f'{name}_rate'] / 1e9:g} GB/s"
        for name in ("host", "disk")
        if run[f"{name}_budget_bytes"] is not None
    ]
    return f"\ntiers below the device: {', '.join(below)}; the bounds have none" if below else ""


def below(run: Run) -> str:
    """Return the tiers below the device in a few words, `host 64 GiB, disk 1 TiB`; empty: none."""
    return ", ".join(
        f"{tier['tier']} {format_bytes(tier['budget_bytes'])}" for tier in run["tiers"][1:]
    )


def tables(runs: Sequence[Run]) -> list[TextTable]:
    """Return per sweep: rates by policy, details by run, reasons for lost tokens."""
    found = []
    for field in SWEEPS:
        if points(runs, field):
            found += [rate_table(runs, field), detail_table(runs, field)]
            found += [tier_table(runs, field)] if below(runs[0]) else []
            found += [reason_table(runs, field)]
    return found


def points(runs: Iterable[Run], field: str) -> list[int]:
    """Return the values swept, in the order run; empty where `field` was not swept."""
    return list(dict.fromkeys(run[field] for run in runs if run[field] is not None))


def policies(runs: Iterable[Run]) -> list[str]:
    """Return the online policies, in the order run."""
    return [name for name in dict.fromkeys(run["policy"] for run in runs) if name not in BOUNDS]


def find(runs: Iterable[Run], policy: str, field: str, value: int) -> Run | None:
    """Return the run of `policy` where `field` is `value`; bounds without size match all values."""
    for run in runs:
        endless = run["entries"] is None and run["budget_bytes"] is None
        if run["policy"] == policy and (endless or run[field] == value):
            return run
    return None


def gap_closed(runs: Sequence[Run], field: str, value: int) -> float | None:
    """(default - lru) / (clairvoyant - lru): 1.0 is as good as the future known; None: no gap."""
    found = [find(runs, policy, field, value) for policy in ("lru", "default", "clairvoyant")]
    rates = [run["hit_rate"] for run in found if run is not None]
    if len(rates) < len(found):
        return None
    lru, default, best = rates
    return (default - lru) / (best - lru) if best - lru > 1e-3 else None


def rate_table(runs: Sequence[Run], field: str) -> TextTable:
    """Return the share of prompt tokens reused: a row per policy and bound, a column per value."""
    values = points(runs, field)
    rows = [_rates(runs, policy, field) for policy in policies(runs)]
    rows.append(())
    rows += [_rates(runs, bound, field) for bound in reversed(BOUNDS)]
    tiers = below(runs[0])
    # With tiers a policy has more room than the bound, so the bound is no measure of it.
    gaps = [None if tiers else gap_closed(runs, field, value) for value in values]
    if any(gap is not None for gap in gaps):
        cells = ("-" if gap is None else f"{100 * gap:.0f}%" for gap in gaps)
        rows += [(), ("gap lru-clairvoyant closed by default", *cells)]
    title = RATE_TITLES[field] + (f"; below the device {tiers}" if tiers else "")
    return TextTable(
        title=title,
        columns=("policy", *(label(value, field) for value in values)),
        rows=tuple(rows),
    )


def _rates(runs: Sequence[Run], policy: str, field: str) -> tuple[str, ...]:
    found = (find(runs, policy, field, value) for value in points(runs, field))
    return (policy, *("-" if run is None else percent(run["hit_rate"]) for run in found))


def label(value: int | None, field: str) -> str:
    """Return a swept value as text: `K=4`, `8 GiB`; `any` for a bound without size."""
    if value is None:
        return "any"
    return f"K={value}" if field == "entries" else format_bytes(value)


def detail_table(runs: Sequence[Run], field: str) -> TextTable:
    """Return a row per run: prefilled tokens, requests by reuse path, evictions, peak bytes."""
    chosen = [run for run in runs if run[field] is not None]
    chosen += [run for run in runs if run["policy"] in ("endless", "single_lane")]
    paths = sorted({path for run in chosen for path, n in run["reuse"].items() if n})
    refused = any(run["refused"] for run in chosen)
    columns = ["policy", "at", "reused", "prefilled", *map(short_path, paths)]
    columns += ["evicted", "peak", *(["refused"] if refused else [])]
    rows = []
    for run in chosen:
        row = [run["policy"], label(run[field], field), percent(run["hit_rate"])]
        row += [count(run["prefilled_tokens"])]
        row += [f"{run['reuse'].get(path, 0):,}" for path in paths]
        row += [f"{run['evictions']:,}", format_bytes(run["peak_bytes"])]
        rows.append((*row, f"{run['refused']:,}") if refused else tuple(row))
    title = "Each run: tokens prefilled, requests by where they resumed, entries evicted, peak held"
    return TextTable(title=title, columns=tuple(columns), rows=tuple(rows), left=2)


def tier_table(runs: Sequence[Run], field: str) -> TextTable:
    """Return a row per run and tier: tokens reused from it, bytes restored and stored."""
    columns = ["policy", "at", "tier", "reused", "requests", "restored", "in", "stored"]
    columns += ["images", "held", "dropped"]
    rows: list[tuple[str, ...]] = []
    for run in (run for run in runs if run[field] is not None and below(run)):
        for tier in run["tiers"]:
            device = tier["tier"] == "device"
            moved = [format_bytes(tier["promoted_bytes"]), f"{tier['restore_seconds']:,.1f} s"]
            moved += [format_bytes(tier["stored_bytes"]), f"{tier['images']:,}"]
            share = tier["reused_tokens"] / max(1, run["input_tokens"])
            row = [run["policy"], label(run[field], field), tier["tier"], percent(share)]
            row += [f"{tier['hits']:,}", *(["-"] * 4 if device else moved)]
            row += [format_bytes(tier["bytes"]), "-" if device else f"{tier['dropped']:,}"]
            rows.append(tuple(row))
    title = "Each tier: tokens reused from it, bytes restored from it and stored in it"
    return TextTable(title=title, columns=tuple(columns), rows=tuple(rows), left=3)


def short_path(path: str) -> str:
    """Return a reuse path as one word."""
    name = _SHORT_PATHS.get(path, path)
    return name.removeprefix("restore_").removesuffix("_checkpoint")


def reason_table(runs: Sequence[Run], field: str) -> TextTable:
    """Return the matched tokens that were prefilled again, by reason, under the first policy."""
    values = points(runs, field)
    policy = (policies(runs) or ["clairvoyant"])[0]
    found = [find(runs, policy, field, value) for value in values]
    losses: list[dict[str, Any]] = [run["reasons"] if run else {} for run in found]
    rows = [(reason, *(_loss(loss.get(reason)) for loss in losses)) for reason in top(losses)]
    title = f"Why matched tokens were lost under {policy}: tokens (requests)"
    if not rows:
        return TextTable(title=title, columns=("reason",), rows=(("no matched token was lost",),))
    return TextTable(
        title=title,
        columns=("reason", *(label(value, field) for value in values)),
        rows=tuple(rows),
    )


def top(losses: Iterable[dict[str, Any]]) -> list[str]:
    """Return the reasons that lost most tokens over all `losses`, worst first."""
    total: Counter[str] = Counter()
    for loss in losses:
        total.update({reason: cell["tokens"] for reason, cell in loss.items()})
    worst = sorted(total.items(), key=lambda item: (-item[1], item[0]))
    return [reason for reason, tokens in worst if tokens][:TOP_REASONS]


def _loss(cell: dict[str, int] | None) -> str:
    return f"{count(cell['tokens'])} ({cell['requests']:,})" if cell and cell["tokens"] else "-"


def percent(rate: float) -> str:
    """Return a share as `95.5%`."""
    return f"{100 * rate:.1f}%"


def count(number: int) -> str:
    """Return a count in few characters: `999,999`, then `8.82 M`, then `389.1 M`."""
    if number < 1_000_000:
        return f"{number:,}"
    return f"{number / 1e6:,.{2 if number < 10_000_000 else 1}f} M"

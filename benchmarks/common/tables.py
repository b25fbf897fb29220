"""Tables and figures of README and docs, written between markers of a Markdown page.

A marker is ``<!-- KIND: NAME -->text<!-- end -->``. Its text follows from the records in
`docs/measurements`, from the policies or from the pages themselves:

=========================================  =====================================================
``table: NAME``                            a table of `TABLES`;
``rate: RECORD POLICY K=4``                a simulated hit rate; ``16GiB`` is a bound, too;
``measured: RECORD | OP | SHAPE | FIELD``  one field of a measured row;
``ratio: OP PROBE PEER``                   least and greatest time of the pool over that of a peer;
``demo: SCENARIO | REQUEST | SETTING``     seconds to a first token, one lane or ``K=8``;
``count: policies``                        a number of `COUNTS`
=========================================  =====================================================
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.ratios import HEAD, Ratio
from benchmarks.common.records import ROOT, record
from benchmarks.common.report import number
from benchmarks.common.timing import Microseconds
from ninfer_pool.core.policy import POLICIES
from ninfer_pool.core.sizes import format_bytes, parse_size
from ninfer_pool.sim import report as simulated
from ninfer_pool.sim.geometry import load_geometry

MARKER = re.compile(
    r"<!-- (table|rate|measured|ratio|demo|count): ([^>]+?) -->(.*?)<!-- end -->", re.S
)

FIGURE = ROOT / "docs" / "hit-rate.svg"

Rows = Sequence[Sequence[str]]


def pages() -> list[Path]:
    """The pages that may have markers."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def rendered(page: str) -> str:
    """Return a page with the text of every marker written again.

    Raises:
        ValueError: a marker whose name does not exist.
    """

    def replace(found: re.Match[str]) -> str:
        kind, name, _ = found.groups()
        try:
            text = KINDS[kind](name)
        except (KeyError, LookupError, ValueError) as error:
            raise ValueError(f"<!-- {kind}: {name} -->: {error}") from error
        text = f"\n\n{text}\n\n" if "\n" in text else text
        return f"<!-- {kind}: {name} -->{text}<!-- end -->"

    return MARKER.sub(replace, page)


def markdown(head: Sequence[str], rows: Rows) -> str:
    """Return a Markdown table; columns of numbers are aligned to the right."""
    columns = list(zip(*rows, strict=True))
    marks = ["---:" if all(map(_numeric, column)) else "---" for column in columns]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *rows))


def _numeric(cell: str) -> bool:
    return bool(re.fullmatch(r"[-≤*]*[\d,.]+( ?(%|×|µs|ms|s|\([\d.]+\)))?\**|-|", cell))


# -- simulated --------------------------------------------------------------------------------


def rate(name: str) -> str:
    """Return one hit rate, ``RECORD POLICY K=4`` or ``RECORD POLICY 16GiB``."""
    file, policy, bound = name.split()
    field, value = ("entries", int(bound[2:])) if bound[:2] == "K=" else (
        "budget_bytes", parse_size(bound)
    )  # fmt: skip
    run = simulated.find(record(file)["runs"], policy, field, value)
    if run is None:
        raise LookupError("no such run")
    return _percent(run["hit_rate"])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def hit_rates() -> str:
    """Return the README's table: two traces, bounds and the two policies most used."""
    head = ("trace", "policy", "K = 1", "2", "4", "8")
    rows = []
    for file in ("side_requests", "8_lanes"):
        runs = record(file)["runs"]
        size = f"{runs[0]['requests']:,} requests, {runs[0]['input_tokens'] / 1e6:.0f} M tokens"
        title = f"`{runs[0]['trace']}`: {size}"
        for policy in ("single_lane", "lru", "default", "clairvoyant", "endless"):
            mark = "**" if policy == "default" else ""
            rates = [f"{mark}{rate(f'{file} {policy} K={k}')}{mark}" for k in (1, 2, 4, 8)]
            rows.append((title, f"`{policy}`", *rates))
            title = ""
    return markdown(head, rows)


def policy_results() -> str:
    """Return the hit rates of every policy on 32 lanes, and the gap that `default` closes."""
    runs = record("32_lanes")["runs"]
    sizes = simulated.points(runs, "entries")
    head = [f"`{runs[0]['trace']}`, {runs[0]['requests']:,} requests", *(f"K = {k}" for k in sizes)]
    names = sorted(POLICIES, key=lambda name: -_total_rate(runs, name))
    rows = [
        [f"`{name}`", *(rate(f"32_lanes {name} K={k}") for k in sizes)]
        for name in (*names, "clairvoyant")
    ]
    gaps = [simulated.gap_closed(runs, "entries", k) or 0.0 for k in sizes]
    gap = "gap between `lru` and `clairvoyant` that `default` closes"
    return markdown(head, [*rows, [gap, *(f"{each:.0%}".replace("%", " %") for each in gaps)]])


def _total_rate(runs: Sequence[Any], policy: str) -> float:
    return float(sum(run["hit_rate"] for run in runs if run["policy"] == policy))


def policy_bytes() -> str:
    """Return the hit rates of every policy by bytes, on the trace that is shipped."""
    runs = record("side_requests")["runs"]
    sizes = simulated.points(runs, "budget_bytes")
    names = sorted(POLICIES, key=lambda name: -_total_rate(runs, name))
    rows = [
        [f"`{name}`", *(rate(f"side_requests {name} {size}") for size in sizes)]
        for name in (*names, "clairvoyant")
    ]
    return markdown((f"`{runs[0]['trace']}`", *map(format_bytes, sizes)), rows)


def simulated_sweep() -> str:
    """Return what `ninfer-pool simulate` prints of K on the trace that is shipped."""
    shown = ("default", "lru", "clairvoyant", "endless", "single_lane")
    runs = [run for run in record("side_requests")["runs"] if run["policy"] in shown]
    return f"```text\n{simulated.rate_table(runs, 'entries').text()}\n```"


def simulated_tiers() -> str:
    """Return what `ninfer-pool simulate` prints of tiers below the device."""
    return f"```text\n{simulated.tier_table(record('below')['runs'], 'budget_bytes').text()}\n```"


def figure() -> bytes:
    """Return the figure of the README: every policy on the trace that is shipped."""
    from ninfer_pool.sim.plot import plot

    runs = record("side_requests")["runs"]
    sizes = load_geometry(runs[0]["model"]).sizes(kv=runs[0]["kv"], mtp=runs[0]["mtp"])
    return plot([runs], suffix=".svg", sizes=sizes)


# -- measured ---------------------------------------------------------------------------------


def measured(name: str) -> str:
    """Return one field of a measured row: ``RECORD | OP | SHAPE | FIELD``."""
    file, op, shape, field = (each.strip() for each in name.split("|"))
    for row in ratio_rows(file):
        if (row.op, row.shape) == (op, shape):
            return dict(zip(HEAD, row.cells, strict=True))[field]
    raise LookupError("no such row")


def ratio_rows(file: str) -> Iterator[Ratio]:
    """Yield the rows of a record of ratios."""
    for row in record(file)["results"]:
        yield Ratio(**{**row, "us": Microseconds(**row["us"])})


def ratio_table(file: str) -> str:
    """Return every row of a record of ratios."""
    found = record(file)
    place = f"Device: {found['device']}. Model: {found['model']}."
    return "\n\n".join([place, markdown(HEAD, [row.cells for row in ratio_rows(file)])])


def core_table() -> str:
    """Return the pool's rows, one per operation and size: median µs, and its ratio to the floor."""
    found = record("core")
    sizes = sorted({row["tokens"] for row in found["results"]})
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for row in found["results"]:
        key = (row["op"], row["probe"], row["shape"], f"{row['entries']:,}")
        cell = f"{number(row['us']['median'])} ({row['ratio']:.2f})"
        cells.setdefault(key, {})[row["tokens"]] = cell
    rows = [(*key, *(each.get(size, "") for size in sizes)) for key, each in cells.items()]
    head = ("op", "probe", "shape", "entries", *(f"{size:,} tokens" for size in sizes))
    memory = f"Bookkeeping: {found['bytes_per_token']:.2f} bytes per retained token."
    return "\n\n".join([markdown(head, rows), memory])


def peer_medians() -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield each row of the pool that peers were measured in, and their medians by name."""
    found = record("peers")
    names = list(dict.fromkeys(row["peer"] for row in found["peers"]))
    theirs = {(*_case(row), row["peer"]): row["us"]["median"] for row in found["peers"]}
    for row in found["results"]:
        keys = {name: (*_case(row), name) for name in names}
        times = {name: theirs[key] for name, key in keys.items() if key in theirs}
        if times:
            yield row, times


def _case(row: dict[str, Any]) -> tuple[str, str, str, int, int]:
    return row["op"], row["probe"], row["shape"], row["tokens"], row["entries"]


def peer_table() -> str:
    """Return medians of the pool and its peers, one line per case."""
    pairs = list(peer_medians())
    names = list(pairs[0][1])
    rows = [
        [
            row["op"], row["probe"], row["shape"], f"{row['tokens']:,}", f"{row['entries']:,}",
            *map(number, (row["floor_us"], row["us"]["median"], *(times[name] for name in names))),
        ]
        for row, times in pairs
    ]  # fmt: skip
    head = ("op", "probe", "shape", "tokens", "entries", "floor µs", "ninfer-pool µs")
    return markdown((*head, *(f"{name} µs" for name in names)), rows)


def peer_summary() -> str:
    """Return how much faster (above 1) or slower than each peer the pool is, by size."""
    ratios: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for row, times in peer_medians():
        for name, time in times.items():
            sizes = ratios.setdefault((row["op"], row["probe"], name), {})
            sizes.setdefault(row["tokens"], []).append(time / row["us"]["median"])
    columns = sorted({size for sizes in ratios.values() for size in sizes})
    rows = [
        (f"`{op}` ({probe})", name, *(f"{_short(median(sizes[size]))} ×" for size in columns))
        for (op, probe, name), sizes in sorted(ratios.items(), key=lambda item: item[0][2])
    ]
    return markdown(("operation", "peer", *(f"{size:,} tokens" for size in columns)), rows)


def ratio(name: str) -> str:
    """Return the least and the greatest time of the pool over a peer's: ``OP PROBE PEER``."""
    op, probe, peer = name.split()
    found = [
        row["us"]["median"] / time
        for row, times in peer_medians()
        for each, time in times.items()
        if (row["op"], row["probe"], each.split()[0]) == (op, probe, peer)
    ]
    return f"{_short(min(found))} to {_short(max(found))}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def demo(name: str) -> str:
    """Return the time to one first token of the demo: ``SCENARIO | REQUEST | SETTING``."""
    title, label, setting = (each.strip() for each in name.split("|"))
    for scenario in record("demo")["scenarios"]:
        for play in scenario["plays"]:
            lane = play["entries"] is None
            if scenario["title"] == title and setting == (
                "one lane" if lane else f"K={play['entries']}"
            ):
                times = {each["label"]: each["first_token_ms"] for each in play["requests"]}
                return f"{times[label] / 1000:.2f} s"
    raise LookupError("no such request")


def demo_table() -> str:
    """Return the demo's scenarios: share of tokens reused and time to the first token."""
    found = record("demo")["scenarios"]
    rows = []
    for scenario in found:
        lane, *_, pool = scenario["plays"]
        shares = [_percent(play["hit_rate"]) for play in (lane, pool)]
        times = [f"{play['first_token_ms']:,.0f} ms" for play in (lane, pool)]
        rows.append((scenario["title"], *shares, *times))
    sides = ("one lane", f"pool, K = {found[0]['plays'][-1]['entries']}")
    head = ("scenario", *(f"reused, {side}" for side in sides))
    return markdown((*head, *(f"first token, {side}" for side in sides)), rows)


# -- from the package itself ------------------------------------------------------------------


def policy_table() -> str:
    """Return each policy's name and the first sentence of its docstring."""
    rows = []
    for name, make in POLICIES.items():
        text = inspect.getdoc(make) or ""
        rows.append((f"`{name}`", text.partition("\n\n")[0].replace("\n", " ")))
    return markdown(("name", "order of eviction"), rows)


def guarantees() -> int:
    """Count the guarantees G1 to Gn of the table that defines them."""
    page = ROOT / "docs" / "explanation" / "entries-and-images.md"
    return len(re.findall(r"^\| G\d+ \|", page.read_text(encoding="utf-8"), re.M))


TABLES: dict[str, Callable[[], str]] = {
    "hit-rates": hit_rates,
    "policies": policy_table,
    "policy-results": policy_results,
    "policy-bytes": policy_bytes,
    "simulated-sweep": simulated_sweep,
    "simulated-tiers": simulated_tiers,
    "demo": demo_table,
    "core": core_table,
    "peers": peer_table,
    "peer-summary": peer_summary,
    **{file: partial(ratio_table, file) for file in ("runner", "tiers", "server")},
}
COUNTS: dict[str, Callable[[], int]] = {
    "policies": lambda: len(POLICIES),
    "guarantees": guarantees,
    "pages": lambda: len(pages()) - 1,
}
KINDS: dict[str, Callable[[str], str]] = {
    "table": lambda name: TABLES[name](),
    "rate": rate,
    "measured": measured,
    "ratio": ratio,
    "demo": demo,
    "count": lambda name: str(COUNTS[name]()),
}

"""The printed tables: one per scenario, with a line above and one below, then the rates.

Everything here only selects and formats the plays. A `TextTable` prints as text; the HTML page
draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ninfer_pool.demo.play import Play, PlayedRequest, ScenarioResult
from ninfer_pool.demo.scenarios import SCENARIOS
from ninfer_pool.sim.report import TextTable, percent

HEADLINE = "Everyday requests with one retained lane, as engines have it today, and with the pool"
LEGEND = (
    "today: prompt tokens cached by one retained lane, which can resume only what ran last",
    "K=n: the same by the pool with n conversations retained; both start with nothing",
    "resumed at: none (full_reset), frontier (append_frontier), turn (restore_turn_checkpoint) …",
    "ms: milliseconds to the first token; on a busy machine the times vary",
    "reason: hit, or why not more was cached",
)
_SHORT = {"full_reset": "none", "append_frontier": "frontier"}

Results = Mapping[str, ScenarioResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSection:
    """A table, whose title describes the scenario, and remarks on its numbers."""

    table: TextTable
    shows: str


def request_table(result: ScenarioResult, *, number: int) -> TextTable:
    """Return the requests of a scenario: today's lane next to the pool with the largest K."""
    today, pool = result.today, result.pool
    side = ("resumed at", "ms", "reason")
    columns = ("request", "prompt", today.setting.label, *side, pool.setting.label, *side)
    rows = []
    for left, right in zip(today.served, pool.served, strict=True):
        rows.append((left.label, f"{right.prompt_tokens:,}", *_cells(left), *_cells(right)))
    title = f"{number}. {result.scenario.title}: {result.scenario.happens}"
    return TextTable(title=title, columns=columns, rows=tuple(rows))


def _cells(served: PlayedRequest) -> tuple[str, ...]:
    place = _SHORT.get(served.reuse, served.reuse)
    place = place.removeprefix("restore_").removesuffix("_checkpoint")
    cached, spent = f"{served.cached_tokens:,}", f"{served.first_token_ms:.1f}"
    return (cached, place, spent, served.reason)


def rate_table(results: Results) -> TextTable:
    """Return the share of prompt tokens reused: a row per scenario, a column per setting."""
    title = "Hit rate against K: share of prompt tokens cached; last row: 1 to 5 side by side."
    return _sweep(results, title, lambda play: percent(play.hit_rate))


def time_table(results: Results) -> TextTable:
    """Return the median time to first token: a row per scenario, a column per setting."""
    title = "Time to first token against K: the median over the requests, in milliseconds."
    return _sweep(results, title, lambda play: f"{play.first_token_ms:.1f}")


def _sweep(results: Results, title: str, cell: Callable[[Play], str]) -> TextTable:
    first = next(iter(results.values()))
    columns = ("scenario", *(play.setting.label for play in first.plays))
    rows = [(result.scenario.title, *map(cell, result.plays)) for result in results.values()]
    return TextTable(title=title, columns=columns, rows=tuple(rows))


def shows(name: str, results: Results) -> str:
    """Return remarks on the numbers of a scenario's table.

    ``titles`` is compared with ``turns``, the same conversation alone.
    """
    today, pool = results[name].today, results[name].pool
    if name == "titles":
        return _titles(today, pool, alone=turn_tokens(results["turns"].pool))
    remarks = {"repeat": _repeat, "alternate": _alternate, "compaction": _compaction}
    return remarks.get(name, _compared)(today, pool)


def _repeat(today: Play, pool: Play) -> str:
    return (
        f"The second time {_of(today.served[1])} prompt tokens are cached today, "
        f"{_of(pool.served[1])} at {pool.setting.label}."
    )


def _alternate(today: Play, pool: Play) -> str:
    cached = [", ".join(str(each.cached_tokens) for each in play.served) for play in (today, pool)]
    return f"Cached today: {cached[0]}, as B overwrites A; at {pool.setting.label}: {cached[1]}."


def _titles(today: Play, pool: Play, *, alone: int) -> str:
    found = turn_tokens(pool)
    return (
        f"The turns find {turn_tokens(today):,} tokens cached today and {found:,} at "
        f"{pool.setting.label}: {percent(found / alone)} of the {alone:,} without titles."
    )


def _compaction(today: Play, pool: Play) -> str:
    (sums, after), then = _compacted(today), _compacted(pool)
    if (sums, after) == then:
        return f"Alone it needs no pool: {sums} cached when it is summed up, {after} right after."
    return (
        f"Cached when it is summed up and right after: {sums} and {after} today, "
        f"{then[0]} and {then[1]} at {pool.setting.label}."
    )


def _compared(today: Play, pool: Play) -> str:
    return (
        f"{percent(today.hit_rate)} of {pool.prompt_tokens:,} prompt tokens are cached today, "
        f"{percent(pool.hit_rate)} at {pool.setting.label}; first token after "
        f"{today.first_token_ms:.0f} and {pool.first_token_ms:.0f} ms."
    )


def rates_show(results: Results) -> str:
    """Return remarks on the numbers of the table of rates."""
    today, pool = results["together"].today, results["together"].pool
    lane, one = results["titles_unretained"].plays[:2]
    return (
        f"All at once: {percent(today.hit_rate)} today, {percent(pool.hit_rate)} at "
        f"{pool.setting.label}. Titles with retain_prefix: false: {percent(lane.hit_rate)} today, "
        f"{percent(one.hit_rate)} at {one.setting.label}."
    )


def names(results: Results) -> list[str]:
    """Return a line on each scenario without a table of requests."""
    every = [result.scenario for result in results.values()]
    return [f"{each.title}: {each.means}" for each in every if not each.happens]


def times_show(results: Results) -> str:
    """Return remarks on the numbers of the table of times."""
    today, pool = results["together"].today, results["together"].pool
    return (
        f"All at once: {today.first_token_ms:.0f} ms today, {pool.first_token_ms:.0f} ms at "
        f"{pool.setting.label}."
    )


def turn_tokens(play: Play) -> int:
    """Return the tokens that the turns of a conversation found cached."""
    return sum(each.cached_tokens for each in play.served if each.label.startswith("turn"))


def _of(served: PlayedRequest) -> str:
    return f"{served.cached_tokens} of {served.prompt_tokens}"


def _compacted(play: Play) -> tuple[str, str]:
    at = [each.label for each in play.served].index("compaction")
    return _of(play.served[at]), _of(play.served[at + 1])


def sections(results: Sequence[ScenarioResult]) -> list[TableSection]:
    """Return the sections of these results in the order of `SCENARIOS`; sweeps need all of them.

    A scenario without ``happens`` is only compared with others.
    """
    named = {result.scenario.name: result for result in results}
    shown = [result for result in results if result.scenario.happens]
    found = []
    for number, result in enumerate(shown, 1):
        table, remarks = request_table(result, number=number), shows(result.scenario.name, named)
        found.append(TableSection(table=table, shows=remarks))
    if len(results) == len(SCENARIOS):
        rates, times = rate_table(named), time_table(named)
        found.append(TableSection(table=rates, shows="\n".join([rates_show(named), *names(named)])))
        found.append(TableSection(table=times, shows=times_show(named)))
    return found

"""The printed tables: one per scenario, with a line above and one below, then the rates.

Everything here only selects and formats the plays. A `TextTable` prints as text; the HTML page
draws it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ninfer_pool.demo.play import Play, PlayedRequest, ScenarioResult
from ninfer_pool.demo.scenarios import SCENARIOS
from ninfer_pool.sim.report import TextTable, percent, short_path

HEADLINE = "Everyday requests with one retained lane, as engines have it today, and with the pool"
LEGEND = (
    "today: prompt tokens cached by one retained lane, which can resume only what ran last",
    "K=n: the same by the pool with n conversations retained; both start with nothing",
    "resumed at: none (full_reset), frontier (append_frontier), turn (restore_turn_checkpoint) …",
    "ms: milliseconds to the first token; on a busy machine the times vary",
    "reason: hit, or why not more was cached",
)
RATES_TITLE = "Hit rate against K: share of prompt tokens cached; last row: 1 to 5 side by side."
TIMES_TITLE = "Time to first token against K: the median over the requests, in milliseconds."
REMARKS = {
    "repeat": "The second time {today.served[1]} prompt tokens are cached today, "
    "{pool.served[1]} at {pool.setting.label}.",
    "alternate": "Cached today: {cached[0]}, as B overwrites A; at {pool.setting.label}: "
    "{cached[1]}.",
    "titles": "The turns find {turns[0]:,} tokens cached today and {turns[1]:,} at "
    "{pool.setting.label}: {share:.1%} of the {alone:,} without titles.",
    "compaction": "Cached when it is summed up and right after: {compacted[0][0]} and "
    "{compacted[0][1]} today, {compacted[1][0]} and {compacted[1][1]} at {pool.setting.label}.",
    "compaction_alike": "Alone it needs no pool: {compacted[0][0]} cached when it is summed up, "
    "{compacted[0][1]} right after.",
}
COMPARED = (
    "{today.hit_rate:.1%} of {pool.prompt_tokens:,} prompt tokens are cached today, "
    "{pool.hit_rate:.1%} at {pool.setting.label}; first token after "
    "{today.first_token_ms:.0f} and {pool.first_token_ms:.0f} ms."
)
RATES_REMARK = (
    "All at once: {today.hit_rate:.1%} today, {pool.hit_rate:.1%} at {pool.setting.label}. "
    "Titles with retain_prefix: false: {lane.hit_rate:.1%} today, {one.hit_rate:.1%} at "
    "{one.setting.label}."
)
TIMES_REMARK = (
    "All at once: {today.first_token_ms:.0f} ms today, {pool.first_token_ms:.0f} ms at "
    "{pool.setting.label}."
)

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
    place = "none" if served.reuse == "full_reset" else short_path(served.reuse)
    cached, spent = f"{served.cached_tokens:,}", f"{served.first_token_ms:.1f}"
    return (cached, place, spent, served.reason)


def sweep_table(results: Results, title: str, cell: Callable[[Play], str]) -> TextTable:
    """Return a figure of each play: a row per scenario, a column per setting."""
    first = next(iter(results.values()))
    columns = ("scenario", *(play.setting.label for play in first.plays))
    rows = [(result.scenario.title, *map(cell, result.plays)) for result in results.values()]
    return TextTable(title=title, columns=columns, rows=tuple(rows))


def shows(name: str, results: Results) -> str:
    """Return remarks on the numbers of a scenario's table.

    ``titles`` is compared with ``turns``, the same conversation alone.
    """
    today, pool = results[name].today, results[name].pool
    alone = turn_tokens(results["turns"].pool) if name == "titles" else 0
    if name == "compaction" and _compacted(today) == _compacted(pool):
        name = "compaction_alike"
    return REMARKS.get(name, COMPARED).format(
        today=today,
        pool=pool,
        cached=[", ".join(str(each.cached_tokens) for each in p.served) for p in (today, pool)],
        turns=[turn_tokens(play) for play in (today, pool)],
        alone=alone,
        share=turn_tokens(pool) / alone if alone else 0.0,
        compacted=[_compacted(play) for play in (today, pool)] if "compaction" in name else [],
    )


def rates_show(results: Results) -> str:
    """Return remarks on the numbers of the table of rates."""
    lane, one = results["titles_unretained"].plays[:2]
    both = results["together"]
    return RATES_REMARK.format(today=both.today, pool=both.pool, lane=lane, one=one)


def names(results: Results) -> list[str]:
    """Return a line on each scenario without a table of requests."""
    every = [result.scenario for result in results.values()]
    return [f"{each.title}: {each.means}" for each in every if not each.happens]


def turn_tokens(play: Play) -> int:
    """Return the tokens that the turns of a conversation found cached."""
    return sum(each.cached_tokens for each in play.served if each.label.startswith("turn"))


def _compacted(play: Play) -> tuple[str, str]:
    at = [each.label for each in play.served].index("compaction")
    return str(play.served[at]), str(play.served[at + 1])


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
        rates = sweep_table(named, RATES_TITLE, lambda play: percent(play.hit_rate))
        times = sweep_table(named, TIMES_TITLE, lambda play: f"{play.first_token_ms:.1f}")
        both = named["together"]
        remark = TIMES_REMARK.format(today=both.today, pool=both.pool)
        found.append(TableSection(table=rates, shows="\n".join([rates_show(named), *names(named)])))
        found.append(TableSection(table=times, shows=remark))
    return found

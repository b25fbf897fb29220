"""Backfill is proven: what overtakes cannot delay, whatever ends when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ninfer_pool.runner.backfill import delays

PAGES = st.integers(0, 12)


@given(
    st.integers(1, 12),
    st.integers(0, 4),
    st.integers(0, 4),
    PAGES,
    PAGES,
    st.lists(PAGES, max_size=4),
    st.permutations(range(4)),
)
def test_what_may_overtake_delays_in_no_order_of_ends(
    waiting: int,
    below: int,
    above: int,
    candidate: int,
    free: int,
    running: list[int],
    order: list[int],
) -> None:
    """Brute force: it fits at the same moment with it, whatever it needs between the bounds."""
    least, most = waiting - below, waiting + above
    if candidate > free or delays(
        waiting=(least, most), candidate=candidate, free=free, running=[(p, p) for p in running]
    ):
        return

    def start(room: int) -> int | None:
        for moment, index in enumerate([None, *(i for i in order if i < len(running))]):
            room += 0 if index is None else running[index]
            if room >= waiting:
                return moment
        return None

    without, beside = start(free), start(free - candidate)
    assert without is None or beside == without


def test_a_small_one_passes_where_there_is_slack_and_not_where_it_is_needed() -> None:
    assert not delays(waiting=(10, 10), candidate=2, free=4, running=[(8, 8)])
    assert delays(waiting=(10, 10), candidate=3, free=4, running=[(8, 8)])
    assert delays(waiting=(10, 10), candidate=2, free=4, running=[(7, 9)])
    assert not delays(waiting=(10, 10), candidate=4, free=4, running=[(3, 3)])
    assert delays(waiting=(5, 10), candidate=2, free=4, running=[(8, 8)]) is False
    assert delays(waiting=(4, 10), candidate=2, free=4, running=[(8, 8)])

"""Makes up the token ids of a trace: deterministic, with a few integers kept for each request.

Every token that is new in a request gets an id of its own, so two prompts agree exactly where the
trace says so. A request that goes on where its parent's full sequence ends also gets the ids that
follow the parent's, so a whole linear conversation is one run of consecutive ids and is written by
one `numpy.arange`, however many turns it has.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.trace import Trace

Tokens = npt.NDArray[np.int32]
TOKEN_LIMIT: Final = 2**31


class TokenSource:
    """Token ids of every request of a trace; construction O(requests), no token is kept.

    Raises:
        TraceError: the trace has more new tokens than int32 has positive ids.
    """

    def __init__(self, trace: Trace) -> None:
        self._requests = trace.requests
        count = len(trace.requests)
        # Tokens of request r at positions [own_begin[r], its end) are position + shift[r];
        # below run_begin[r] they are those of request run_parent[r].
        self._shift = [0] * count
        self._run_begin = [0] * count
        self._run_parent = [-1] * count
        self._own_parent = [-1] * count
        self._link_parents()
        self._number_runs(trace.name)

    def prompt(self, id: int) -> Tokens:
        """The prompt of request `id`, int32 ``[input]``; O(input) and O(branch points)."""
        return self._between(id, 0, self._requests[id].input)

    def output(self, id: int) -> Tokens:
        """The generated tokens of request `id`, int32 ``[output]``."""
        request = self._requests[id]
        return self._between(id, request.input, request.total)

    def pieces(self, id: int) -> tuple[tuple[int, int, int], ...]:
        """Who brought each token: (owner, begin, end) over the full sequence of `id`, ascending.

        Positions ``[begin, end)`` were new in request `owner`: its first writer, and the same
        positions in every later request that shares them. O(pieces).
        """
        found: list[tuple[int, int, int]] = []
        end, owner = self._requests[id].total, id
        while end > 0:
            begin = self._requests[owner].shared
            if begin < end:
                found.append((owner, begin, end))
                end = begin
            owner = self._own_parent[owner]
        return tuple(reversed(found))

    def _link_parents(self) -> None:
        """Point each request at the ancestor that owns the token just below its own first one."""
        requests, own_parent = self._requests, self._own_parent
        for request in requests:
            ancestor = -1 if request.parent is None or not request.shared else request.parent
            while ancestor >= 0 and requests[ancestor].shared >= request.shared:
                ancestor = own_parent[ancestor]
            own_parent[request.id] = ancestor

    def _number_runs(self, name: str) -> None:
        follower = self._followers()
        following = set(follower.values())
        next_token = 1
        for request in self._requests:
            if request.id in following:
                continue
            begin, shift = request.shared, next_token - request.shared
            current, end = request.id, request.total
            while True:
                self._run_begin[current], self._shift[current] = begin, shift
                self._run_parent[current] = self._own_parent[request.id]
                end = self._requests[current].total
                if current not in follower:
                    break
                current = follower[current]
            next_token = end + shift
            if next_token > TOKEN_LIMIT:
                raise TraceError(
                    f"{name}, request {current}, field input: the trace has more than "
                    f"{TOKEN_LIMIT - 1} new tokens; must be fewer, token ids are int32"
                )

    def _followers(self) -> dict[int, int]:
        """For each request, the first later one that goes on where its full sequence ends."""
        found: dict[int, int] = {}
        for request in self._requests:
            parent = request.parent
            if parent is not None and 0 < request.shared == self._requests[parent].total:
                found.setdefault(parent, request.id)
        return found

    def _between(self, id: int, low: int, high: int) -> Tokens:
        out = np.empty(high - low, dtype=np.int32)
        end, owner = high, id
        while end > low:
            begin = max(self._run_begin[owner], low)
            if begin < end:
                shift = self._shift[owner]
                out[begin - low : end - low] = np.arange(begin + shift, end + shift, dtype=np.int32)
                end = begin
            owner = self._run_parent[owner]
        return out

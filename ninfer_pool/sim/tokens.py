"""The token ids of a trace: made up, deterministic, with a few integers per request.

Every new token of a request gets an id of its own, so two prompts agree exactly where the trace
states it. A request that continues the end of its parent's full sequence continues its ids too.
A linear conversation is thus one run of consecutive ids, written by one `numpy.arange`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from ninfer_pool.errors import TraceError
from ninfer_pool.sim.relations import owners
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
        # Tokens of request r at positions [run_begin[r], its end) are position + shift[r];
        # below run_begin[r] they are those of request run_parent[r].
        self._shift = [0] * count
        self._run_begin = [0] * count
        self._run_parent = [-1] * count
        self._number_runs(trace.name)

    def prompt(self, id: int) -> Tokens:
        """Return the prompt of request `id`, int32 ``[input]``; O(input) and O(branch points)."""
        return self._between(id, 0, self._requests[id].input)

    def output(self, id: int) -> Tokens:
        """Return the generated tokens of request `id`, int32 ``[output]``."""
        request = self._requests[id]
        return self._between(id, request.input, request.input + request.output)

    def _number_runs(self, name: str) -> None:
        owner = owners(self._requests, [request.shared for request in self._requests])
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
                self._run_parent[current] = owner[request.id]
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
        """Return per request the first later one that continues the end of its full sequence."""
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

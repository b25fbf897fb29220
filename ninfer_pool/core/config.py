"""How a pool is set up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ninfer_pool.core.policy import POLICIES, Policy
from ninfer_pool.errors import ConfigError

_POSITIVE = ("num_pages", "page_bytes", "lanes", "page_tokens", "grid")
_NOT_NEGATIVE = ("image_bytes", "min_chunk", "minimum_tokens", "ghosts", "events")
MAX_PAGES = 2**31 - 1
"""A page's id is an int32."""
MAX_NUMBER = 2**63 - 1
AFFINITIES = ("prefer", "strict")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Sizes and rules of one pool.

    Args:
        num_pages: pages in the slab. Everything is stored in them, images too.
        page_bytes: bytes of one page (``page_tokens`` positions over all layers, K and V).
        image_bytes: bytes of one continuation state; 0 for plain attention models, which can
            resume at any token.
        lanes: how many leases may run at once.
        page_tokens: token positions in one page.
        retained_bytes: bound on the pages that entries hold, each counted once; None: the slab.
        max_entries: bound on the number of entries (K); None: bytes alone decide.
        policy: a name in `POLICIES`, or a factory of policies of one's own.
        affinity: ``"prefer"``: any lane may resume, the home lane first; ``"strict"``: only the
            home lane may.
        end_logits: the image's hidden tail yields logits, so a prompt can be resumed at its
            very end; False: at most one token before it.
        grid: a prefill cut at every multiple of this; the largest chunk.
        min_chunk: a declared boundary nearer than this to the cut before it is no cut.
        minimum_tokens: hits shorter than this are not taken (reason ``below_minimum``).
        ghosts: how many removed entries are remembered to explain and to learn from.
        events: how many events are kept for readers.
        clock: seconds, for TTLs alone; None: TTLs are refused. No decision reads it otherwise.

    Raises:
        ConfigError: names the field and what would be right.
    """

    num_pages: int
    page_bytes: int
    image_bytes: int
    lanes: int = 1
    page_tokens: int = 64
    retained_bytes: int | None = None
    max_entries: int | None = None
    policy: str | Callable[[], Policy] = "default"
    affinity: Literal["prefer", "strict"] = "prefer"
    end_logits: bool = True
    grid: int = 2048
    min_chunk: int = 0
    minimum_tokens: int = 0
    ghosts: int = 1024
    events: int = 4096
    clock: Callable[[], float] | None = None
    image_pages: int = field(init=False, repr=False, compare=False)
    """Pages of one image."""
    retained_pages: int = field(init=False, repr=False, compare=False)
    """Pages that entries may hold together."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            _check_int(name, getattr(self, name), 1)
        for name in _NOT_NEGATIVE:
            _check_int(name, getattr(self, name), 0)
        for name in ("retained_bytes", "max_entries"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        if isinstance(self.policy, str) and self.policy not in POLICIES:
            raise ConfigError(f"policy: {self.policy!r}; needs one of {', '.join(POLICIES)}")
        if not isinstance(self.policy, str) and not callable(self.policy):
            raise ConfigError(f"policy: {self.policy!r}; needs a name or a factory")
        if type(self.end_logits) is not bool:
            raise ConfigError(f"end_logits: {self.end_logits!r}; needs True or False")
        if self.clock is not None and not callable(self.clock):
            raise ConfigError(f"clock: {self.clock!r}; needs a function of no argument, or None")
        if self.affinity not in AFFINITIES:
            raise ConfigError(f"affinity: {self.affinity!r}; needs one of {', '.join(AFFINITIES)}")
        self._set_pages()

    def _set_pages(self) -> None:
        image_pages = -(-self.image_bytes // self.page_bytes)
        object.__setattr__(self, "image_pages", image_pages)
        retained_pages = self.num_pages
        if self.retained_bytes is not None:
            retained_pages = min(self.num_pages, self.retained_bytes // self.page_bytes)
        object.__setattr__(self, "retained_pages", retained_pages)
        least = 1 + image_pages
        if self.num_pages < least:
            raise ConfigError(f"num_pages: {self.num_pages}; one page and one image need {least}")
        if retained_pages < least:
            raise ConfigError(
                f"retained_bytes: {self.retained_bytes}; one page and one image need "
                f"{least * self.page_bytes}"
            )

    def make_policy(self) -> Policy:
        """Return a new instance of the configured policy."""
        policy = POLICIES[self.policy]() if isinstance(self.policy, str) else self.policy()
        if not isinstance(policy, Policy):
            raise ConfigError(f"policy: makes a {type(policy).__name__}; needs to make a Policy")
        return policy

    def replace(self, **changes: object) -> PoolConfig:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _check_int(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}: {value!r}; needs an int of {least} or more")
    most = MAX_PAGES if name == "num_pages" else MAX_NUMBER
    if value > most:
        raise ConfigError(f"{name}: {value!r}; needs an int of at most {most}")

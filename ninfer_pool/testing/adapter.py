"""What an engine's adapter does for the pool, and the trial that refuses one that cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.ledger import Pages
from ninfer_pool.core.operations import CopyPage, LoadImage, Operation, ResetLane, SaveImage
from ninfer_pool.errors import ConfigError

Logits = npt.NDArray[np.floating[Any]]
"""Of shape (vocab_size,)."""
Tokens = npt.NDArray[np.int32]
"""Of shape (n,)."""
Made = TypeVar("Made")


class EngineAdapter(Protocol):
    """An engine as the pool sees it: pages, lanes, and logits to compare.

    Position ``p`` of a lane is stored in page ``table[p // page_tokens]``. All that a lane
    continues from, except its pages, is its *state*; its image is all of that state as bytes.
    Some things more are used where an adapter has them:

    - ``tail_logits(lane) -> Logits``: the next token's logits by the lane's state, without a token
      computed. Needed with ``end_logits=True``.
    - ``roll_back(lane, position)``: take the lane's state back over rejected drafts. Without it
      drafts are taken back by loading an image that was saved before them.
    - ``poison_page(page)``: fill a page with bytes that cannot be read unnoticed, such as NaN.
    - ``takes_positions = True``: `prefill` and `decode` take ``positions=``, int32 of shape
      (3, n), as well.
    - ``tolerance``: the RMS ratio up to which logits may differ from a cold run's where the pool
      states that the bits may differ (prefill cut elsewhere, decoded and not prefilled).
    """

    config: PoolConfig
    """Its true sizes: num_pages, page_bytes, image_bytes, page_tokens, lanes, end_logits, grid."""
    namespace: Namespace
    """All that must be equal for two engines to share pages."""
    vocab_size: int

    def prefill(self, tokens: Tokens, *, lane: int, begin: int, table: Pages) -> Logits:
        """Compute positions ``[begin, begin + n)``; return the logits after the last token.

        The lane's state stands at ``begin``. Writes KV to those positions' pages and to no other.
        """
        ...

    def decode(self, token: int, *, lane: int, begin: int, table: Pages) -> Logits:
        """Compute one generated token at position ``begin``; return the logits after it."""
        ...

    def save_image(self, lane: int, pages: Sequence[int]) -> None:
        """Write the lane's state to ``pages``, in that order; it must have been written when this
        returns, or before anything that is asked for later."""
        ...

    def load_image(self, lane: int, pages: Sequence[int]) -> None:
        """Replace the lane's state by the image in ``pages``; the pages stay as they are."""
        ...

    def reset(self, lane: int) -> None:
        """Set the lane's state to that of an empty sequence."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy all bytes of a page."""
        ...

    def read_page(self, page: int) -> bytes:
        """Return the ``page_bytes`` bytes of a page."""
        ...


CALLS = ("prefill", "decode", "save_image", "load_image", "reset", "copy_page", "read_page")
"""The methods that every adapter has."""


def execute(engine: EngineAdapter, operations: Iterable[Operation]) -> None:
    """Carry out what a lease asked for, in order."""
    for operation in operations:
        if isinstance(operation, CopyPage):
            engine.copy_page(operation.source, operation.target)
        elif isinstance(operation, SaveImage):
            engine.save_image(operation.lane, operation.pages)
        elif isinstance(operation, LoadImage):
            engine.load_image(operation.lane, operation.pages)
        else:
            assert isinstance(operation, ResetLane)
            engine.reset(operation.lane)


def refuse(engine: EngineAdapter) -> None:
    """Return if the adapter is complete and its sizes are true, as far as a short trial shows.

    It prefills ``page_tokens + 1`` tokens in lane 0, saves and loads one image, and reads pages.

    Raises:
        ConfigError: names the missing method or the wrong size, and the right one.
    """
    _check_surface(engine)
    for page in (0, engine.config.num_pages - 1):
        found = _tried("num_pages", partial(engine.read_page, page))
        if type(found) is not bytes or len(found) != engine.config.page_bytes:
            size = len(found) if type(found) is bytes else type(found).__name__
            raise ConfigError(
                f"page_bytes: {engine.config.page_bytes}; read_page({page}) gives {size}, "
                f"needs bytes of that length"
            )
    _check_rows(engine)
    for lane in {0, engine.config.lanes - 1}:
        _tried("lanes", partial(engine.reset, lane))
    if engine.config.image_bytes:
        _check_image(engine)


def _check_surface(engine: EngineAdapter) -> None:
    config = getattr(engine, "config", None)
    if not isinstance(config, PoolConfig):
        raise ConfigError(f"config: {type(config).__name__}; an adapter needs its PoolConfig")
    if not isinstance(getattr(engine, "namespace", None), Namespace):
        raise ConfigError("namespace: missing; an adapter needs a Namespace that names its model")
    vocab = getattr(engine, "vocab_size", None)
    if not isinstance(vocab, int) or vocab < 2:
        raise ConfigError(f"vocab_size: {vocab!r}; needs an int of 2 or more")
    wanted = [*CALLS, *(["tail_logits"] if config.end_logits and config.image_bytes else [])]
    lacks = [name for name in wanted if not callable(getattr(engine, name, None))]
    if lacks:
        raise ConfigError(f"{', '.join(lacks)}: missing; an adapter needs {', '.join(wanted)}")
    if config.end_logits and not config.image_bytes:
        raise ConfigError(
            "end_logits: True; without an image nothing yields logits at a prompt's end, "
            "needs False with image_bytes=0"
        )
    if config.num_pages < 2 + 2 * config.image_pages:
        raise ConfigError(
            f"num_pages: {config.num_pages}; two pages and two images need "
            f"{2 + 2 * config.image_pages}"
        )


def _check_rows(engine: EngineAdapter) -> None:
    """One page and one token more: two pages are written, and no other."""
    count, config = engine.config.page_tokens + 1, engine.config
    table = np.array([1, 0], dtype=np.int32)
    tokens = np.arange(count, dtype=np.int32) % engine.vocab_size
    _tried("lanes", lambda: engine.reset(0))
    logits, written = _written(
        engine,
        f"page_tokens: {config.page_tokens}; prefill of {count} tokens into 2 pages",
        lambda: _prefill(engine, tokens, table),
    )
    if not written >= {0, 1} or written - {0, 1}:
        raise ConfigError(
            f"page_tokens: {config.page_tokens}; prefill of {count} tokens by the table [1, 0] "
            f"wrote the pages {sorted(written)}, needs to write both and no other"
        )
    _check_logits("prefill", logits, engine)


def _prefill(engine: EngineAdapter, tokens: Tokens, table: Pages) -> Logits:
    options: dict[str, Any] = {}
    if getattr(engine, "takes_positions", False):
        axis = np.arange(len(tokens), dtype=np.int32)
        options["positions"] = np.tile(axis, (3, 1))
    return engine.prefill(tokens, lane=0, begin=0, table=table, **options)


def _check_logits(what: str, logits: object, engine: EngineAdapter) -> None:
    array = np.asarray(logits)
    if array.shape != (engine.vocab_size,) or array.dtype.kind != "f":
        raise ConfigError(
            f"vocab_size: {engine.vocab_size}; {what} gives {array.dtype} of shape {array.shape}, "
            f"needs floats of shape ({engine.vocab_size},)"
        )
    if not np.isfinite(array).all():
        raise ConfigError(f"{what}: gives logits that are not finite numbers")


def _check_image(engine: EngineAdapter) -> None:
    """Lane 0 stands behind some tokens: its image goes into its pages, not into other rows."""
    config = engine.config
    pages = tuple(range(config.image_pages))
    beside = np.array([len(pages), len(pages) + 1], dtype=np.int32)
    what = f"image_bytes: {config.image_bytes}; "
    into = f"into {config.image_pages} pages of {config.page_bytes} bytes"
    axis = np.arange(config.page_tokens, dtype=np.int32)
    _tried("lanes", lambda: engine.reset(0))
    _tried("prefill", lambda: _prefill(engine, axis % engine.vocab_size, beside))
    slack = config.image_bytes - config.page_bytes * config.image_pages
    before = engine.read_page(pages[-1])[slack:] if slack else b""
    _, written = _written(engine, f"{what}save_image {into}", lambda: engine.save_image(0, pages))
    if written - set(pages):
        raise ConfigError(f"{what}save_image {into} wrote the pages {sorted(written)} as well")
    after = engine.read_page(pages[-1])[slack:] if slack else b""
    if after != before and any(after):
        raise ConfigError(f"{what}save_image {into} writes more bytes than that")
    _tried(f"{what}load_image", lambda: engine.load_image(0, pages))
    if config.end_logits:
        _check_logits("tail_logits", getattr(engine, "tail_logits")(0), engine)  # noqa: B009


def _written(engine: EngineAdapter, what: str, call: Callable[[], Made]) -> tuple[Made, set[int]]:
    """Return what a call returns, and the ids of the pages that it changed."""
    seen = range(min(engine.config.num_pages, 4 + 2 * engine.config.image_pages))
    before = [engine.read_page(page) for page in seen]
    made = _tried(what, call)
    return made, {page for page in seen if engine.read_page(page) != before[page]}


def _tried(what: str, call: Callable[[], Made]) -> Made:
    try:
        return call()
    except Exception as error:
        raise ConfigError(f"{what}: raised {type(error).__name__}: {error}") from error

"""``generate`` of the library, resumed from a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease
from ninfer_pool.core.planner import Chunk
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import ConfigError
from ninfer_pool.integrations.transformers.engine import TransformersEngine
from ninfer_pool.integrations.transformers.identity import namespace_of
from ninfer_pool.integrations.transformers.probe import measure, pool_layout, refuse_training
from ninfer_pool.integrations.transformers.request import check_options, new_tokens, prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseReport:
    """The reuse of one call."""

    prompt_tokens: int
    reused_tokens: int
    """Tokens of the prompt that were resumed; the others were computed."""
    generated_tokens: int
    reuse: str
    """``full_reset``, ``append_frontier`` or ``restore_<kind>_checkpoint``."""
    exact: bool
    """True where the prompt's logits have the bits of a cold run by the pool's own cuts."""
    reason: str
    """The reason of the lookup's explanation, or of the refusal where the pool was not used."""
    retained_tokens: int
    """The deepest position at which a request can resume this sequence; 0: nothing is retained."""
    key: str | None
    """The key of the retained sequence, for ``pool.pin``, ``release`` and ``evict``."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt_tokens - self.reused_tokens


class Generated(NamedTuple):
    """The result of `PooledModel.generate`."""

    output: Any
    """The result of the library's ``generate``: ids (1, n + new), or its output object."""
    report: ReuseReport


class PooledModel:
    """A causal model of the library with a pool of its prefixes. The model is not changed.

    Args:
        model: a causal `PreTrainedModel` in eval mode.
        pool_bytes: bytes of the slab, on the model's device; or ``num_pages``.
        page_tokens: token positions in a page.
        lanes: calls that may run in the pool at once; further calls run without it.
        weights: a digest of the weights; None: it is computed once.
        adapter: the name of an adapter that is active in the model.
        options: further fields of `PoolConfig`, such as ``grid``, ``policy`` or ``clock``.

    Raises:
        ConfigError: a model that cannot be served, with the reason and the supported models.
    """

    def __init__(
        self,
        model: Any,
        *,
        pool_bytes: int | None = None,
        num_pages: int | None = None,
        page_tokens: int = 64,
        lanes: int = 1,
        weights: str | None = None,
        adapter: str | None = None,
        **options: Any,
    ) -> None:
        if (pool_bytes is None) == (num_pages is None):
            raise ConfigError("pool_bytes, num_pages: needs one of the two")
        if type(page_tokens) is not int or page_tokens < 1:
            raise ConfigError(f"page_tokens: {page_tokens!r}; needs an int of 1 or more")
        if getattr(model, "_hf_peft_config_loaded", False) and adapter is None:
            raise ConfigError("adapter: None; the model has adapters, so name the active one")
        layout = measure(model, page_tokens=page_tokens)
        if num_pages is None:
            num_pages = _pages(pool_bytes, layout.page_bytes)
        sizes: dict[str, Any] = {**options, **pool_layout(layout)}
        config = PoolConfig(num_pages=num_pages, lanes=lanes, **sizes)
        self.model = model
        self.pool = PrefixPool(config)
        self._weights, self._adapter = weights, adapter
        space = self.namespace()
        self.engine = TransformersEngine(model, config=config, layout=layout, namespace=space)

    def namespace(self, *, salt: str | None = None) -> Namespace:
        """Return the identity of the model in its present form, under a tenant's salt."""
        weights, adapter = self._weights, self._adapter
        return namespace_of(self.model, weights=weights, adapter=adapter, salt=salt)

    def prompt(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        boundaries: Iterable[tuple[int, str]] = (),
        salt: str | None = None,
    ) -> Prompt:
        """Return the prompt that `generate` would resume, for ``pool.explain`` and ``lookup``.

        Raises:
            PromptError: see `generate`.
        """
        tokens = prompt_tokens(self.model, input_ids, attention_mask)
        return Prompt(tokens, namespace=self.namespace(salt=salt), boundaries=boundaries)

    def generate(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        boundaries: Iterable[tuple[int, str]] = (),
        salt: str | None = None,
        read: bool = True,
        retain: bool = True,
        exact: bool = False,
        pin: bool = False,
        priority: int = 0,
        **options: Any,
    ) -> Generated:
        """Generate as the library's ``generate`` does, resuming the prompt from the pool.

        Args:
            input_ids: the whole prompt, integer (1, n); no padding.
            attention_mask: all ones, or None.
            boundaries: ``(position, kind)`` of the prompt's structure; see `Prompt`.
            salt: a tenant's; requests under other salts share nothing with it.
            read, retain, exact, pin, priority: see `PrefixPool.acquire`.
            options: passed on to the library: sampling, stopping criteria, streamers …

        Where the pool has no room or no lane the library runs without it: see `ReuseReport.reason`.

        Raises:
            PromptError: an argument that cannot be served.
            ConfigError: the model is in training mode, or was changed in dtype.
        """
        refuse_training(self.model)
        check_options(self.model, options)
        prompt = self.prompt(
            input_ids, attention_mask=attention_mask, boundaries=boundaries, salt=salt
        )
        # With room for all new tokens, else for the prompt alone.
        for tokens in dict.fromkeys((new_tokens(self.model, options, prompt=len(prompt)), 0)):
            lease = self.pool.acquire(
                prompt,
                reserve_tokens=tokens,
                read=read,
                retain=retain,
                exact=exact,
                pin=pin,
                priority=priority,
            )
            if isinstance(lease, Lease):
                with lease:
                    return _Call(self, lease, input_ids, options).run()
        return self._without_pool(input_ids, options)

    def _without_pool(self, input_ids: torch.Tensor, options: dict[str, Any]) -> Generated:
        refusal = self.pool.last_refusal
        output = call_library(self.model, input_ids, options)
        count = input_ids.shape[1]
        report = ReuseReport(
            prompt_tokens=count,
            reused_tokens=0,
            generated_tokens=sequences_of(output).shape[1] - count,
            reuse="full_reset",
            exact=False,
            reason=refusal.reason if refusal is not None else "no_room",
            retained_tokens=0,
            key=None,
        )
        return Generated(output, report)


def generate(
    model: Any, input_ids: torch.Tensor, *, pool: PooledModel, **options: Any
) -> Generated:
    """Generate with ``model`` through the pool made for it: see `PooledModel.generate`.

    Raises:
        ConfigError: ``pool`` is no `PooledModel`, or one of another model.
    """
    if getattr(pool, "model", None) is not model:
        raise ConfigError(f"pool: {type(pool).__name__}; needs the PooledModel of this model")
    return pool.generate(input_ids, **options)


def call_library(model: Any, input_ids: torch.Tensor, options: dict[str, Any], **extra: Any) -> Any:
    """Return the result of the library's own ``generate`` for a prompt without padding."""
    ids = input_ids.to(model.device)
    mask = torch.ones_like(ids)
    return model.generate(input_ids=ids, attention_mask=mask, **{**options, **extra})


def sequences_of(output: Any) -> torch.Tensor:
    """Return the ids (1, n + new) of either kind of the library's outputs."""
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
    return found


def _pages(pool_bytes: Any, page_bytes: int) -> int:
    if type(pool_bytes) is not int or pool_bytes < page_bytes:
        raise ConfigError(f"pool_bytes: {pool_bytes!r}; one page takes {page_bytes}")
    return pool_bytes // page_bytes


class _AfterPrompt(LogitsProcessor):
    """Calls ``reached`` once and changes no score.

    The library calls it first when exactly the whole prompt is in the cache object. The state at
    that position exists at no other time.
    """

    def __init__(self, reached: Callable[[], None]) -> None:
        self._reached: Callable[[], None] | None = reached

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self._reached is not None:
            reached, self._reached = self._reached, None
            reached()
        return scores


class _Call:
    """One call of ``generate`` on its lease."""

    def __init__(
        self, pooled: PooledModel, lease: Lease, input_ids: torch.Tensor, options: dict[str, Any]
    ) -> None:
        self._engine, self._lease = pooled.engine, lease
        self._model, self._input_ids, self._options = pooled.model, input_ids, options
        self._last: Chunk | None = None

    def run(self) -> Generated:
        """Resume, prefill, generate, retain."""
        lease, engine = self._lease, self._engine
        try:
            self._restore()
            self._prefill()
            output = self._generate()
            self._store_generated(output)
        finally:
            engine.reset(lease.lane)  # before the lease releases the lane
        lease.commit()
        return Generated(output, self._report(output))

    def _restore(self) -> None:
        try:
            self._engine.execute(self._lease.restore())
        except BaseException:
            self._lease.quarantine()
            raise

    def _prefill(self) -> None:
        """Compute all chunks except the last, which the library computes for its logits."""
        lease, tokens = self._lease, self._lease.prompt.tokens
        for chunk in lease.chunks():
            if chunk.end == len(tokens):
                self._last = chunk
                return
            part = tokens[chunk.begin : chunk.end]
            self._engine.prefill(part, lane=lease.lane, begin=chunk.begin, table=lease.pages)
            lease.advance(part)
            self._checkpoint(chunk.checkpoint)

    def _checkpoint(self, kind: str | None) -> None:
        if kind is not None:
            at = self._engine.position(self._lease.lane)
            self._engine.execute(self._lease.checkpoint(kind, position=at))

    def _generate(self) -> Any:
        lease = self._lease
        cache = self._engine.continued(lease.lane, begin=lease.frontier, table=lease.pages)
        given = self._options.get("logits_processor") or []
        watched = LogitsProcessorList([_AfterPrompt(self._prompt_done), *given])
        ids = self._input_ids
        return call_library(self._model, ids, self._options, cache=cache, logits_processor=watched)

    def _prompt_done(self) -> None:
        lease = self._lease
        self._take(lease.prompt.tokens[lease.frontier :])
        self._checkpoint(self._last.checkpoint if self._last is not None else None)

    def _store_generated(self, output: Any) -> None:
        """Retain the generated tokens up to the frontier: the last one sampled has no state yet."""
        lease = self._lease
        end = self._engine.position(lease.lane)
        made = sequences_of(output)[0, lease.frontier : end].cpu().numpy().astype(np.int32)
        short = end - lease.reserved
        if len(made) and (short <= 0 or lease.extend(short)):
            self._take(made)
            self._checkpoint("frontier")

    def _take(self, tokens: Any) -> None:
        """Write the KV of tokens that the cache object already holds into pages."""
        lease = self._lease
        self._engine.store(lease.lane, begin=lease.frontier, table=lease.pages)
        lease.advance(tokens)

    def _report(self, output: Any) -> ReuseReport:
        lease = self._lease
        count = len(lease.prompt)
        return ReuseReport(
            prompt_tokens=count,
            reused_tokens=lease.start,
            generated_tokens=sequences_of(output).shape[1] - count,
            reuse=lease.reuse,
            exact=lease.exact,
            reason=lease.reason,
            retained_tokens=lease.retained,
            key=lease.key,
        )

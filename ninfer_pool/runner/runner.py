"""The bundled runner: a hybrid model whose prompts resume from a `PrefixPool`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.identity import Namespace
from ninfer_pool.core.lease import Lease, Pending
from ninfer_pool.core.operations import ResetLane
from ninfer_pool.core.planner import Chunk
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import ConfigError, ModelError
from ninfer_pool.kernels import PAGE_TOKENS
from ninfer_pool.runner.capacity import Capacity, pages_for
from ninfer_pool.runner.defaults import context_of, dtypes_of
from ninfer_pool.runner.executor import Executor, Turn, layout_of
from ninfer_pool.runner.model import Model
from ninfer_pool.runner.payload import SlabPayload
from ninfer_pool.runner.request import Limits, Request, RequestOutput, Sequence, make_request
from ninfer_pool.runner.sampling import Sampler
from ninfer_pool.runner.slab import Slab
from ninfer_pool.runner.tokenizer import Tokenizer
from ninfer_pool.tiers import open_tiers

TIER_OPTIONS = ("host_budget", "disk_dir", "disk_budget", "rates", "background")
RATED_TOKENS = 128
"""Smaller chunks are no measure of the cost of prefilling."""


class Runner:
    """A model, its slab and its pool; one request per lane.

    >>> from ninfer_pool.runner import Runner, TINY
    >>> runner = Runner.from_pretrained(TINY, dtype="fp32", kv_budget="64MiB")
    >>> prompt = runner.prompt("In the beginning God created")
    >>> cold = runner.generate(prompt, max_tokens=8)
    >>> warm = runner.generate(prompt, max_tokens=8)
    >>> (cold.reused, warm.reused == len(prompt), warm.tokens == cold.tokens)
    (0, True, True)

    Drive it request by request (`generate`, `stream`), or several at once: `start` each, then
    `prefill` until `Sequence.ready`, then `decode` rounds, then `finish`.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_pages: int,
        tokenizer: Tokenizer | None = None,
        lanes: int = 1,
        kv_dtype: str = "bf16",
        draft_tokens: int = 0,
        max_context: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        """See `from_pretrained`; ``num_pages`` is the slab's.

        ``options``: those of `open_tiers` for the tiers below the device, such as
        ``host_budget``, ``disk_dir`` and ``disk_budget``; the rest are `PoolConfig` fields.

        Raises:
            ConfigError, ModelError: what cannot work, by field.
        """
        self.model = model
        self.max_context = context_of(model, max_context)
        layout = layout_of(model, kv_dtype=kv_dtype, draft_tokens=draft_tokens)
        tiers = {name: options.pop(name) for name in TIER_OPTIONS if name in options}
        config = PoolConfig(
            num_pages=num_pages,
            page_bytes=layout.page_bytes,
            image_bytes=layout.image_bytes,
            lanes=lanes,
            **options,
        )
        if config.page_tokens != PAGE_TOKENS:
            raise ConfigError(f"page_tokens: {config.page_tokens}; needs {PAGE_TOKENS}")
        self._tokenizer = tokenizer
        self.slab = Slab(layout, num_pages=num_pages, lanes=lanes, device=model.device)
        self.pool = PrefixPool(config)
        self.executor = Executor(model, self.slab, draft_tokens=draft_tokens)
        self.namespace = Namespace(
            weights=f"sha256:{model.digest}",
            kv_dtype=f"{kv_dtype},{str(model.dtype).removeprefix('torch.')}",
            rope=f"{model.config.rope},max={self.max_context}",
            draft=f"mtp{draft_tokens}" if draft_tokens else "none",
            rank=rank,
            world_size=world_size,
        )
        payload = SlabPayload(self.slab)
        self.tiers = open_tiers(self.pool, payload, namespace=self.namespace, **tiers)
        self.limits = Limits(
            namespace=self.namespace,
            context=self.max_context,
            vocabulary=model.config.vocab_size,
            pages=num_pages,
            page_tokens=config.page_tokens,
            image_pages=config.image_pages,
            draft_tokens=draft_tokens,
            hidden=model.config.hidden_size,
            dtype=model.dtype,
            stop_tokens=model.config.eos_token_ids,
            tokenizer=tokenizer,
        )
        self.running: list[Sequence] = []

    def close(self) -> None:
        """Release the tiers' folder, if there is one; entries on the device alone are lost.

        `Tiers.flush` keeps them. A second call is a no-op.
        """
        self.tiers.close()

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str | None = None,
        kv_dtype: str | None = None,
        draft_tokens: int = 0,
        lanes: int = 1,
        kv_budget: int | str | None = None,
        **options: Any,
    ) -> Runner:
        """Load a Hugging Face folder and size the slab.

        Args:
            device: ``"cpu"`` or a CUDA device.
            dtype: ``"bf16"``, ``"fp16"`` or ``"fp32"``; None: bf16 where the device has it, else
                fp16, and fp32 on a CPU, where it is faster.
            kv_dtype: ``"bf16"``, ``"fp16"``, ``"fp32"`` or ``"int8-g64"``; None: bf16, or fp16
                where the device has no bf16.
            draft_tokens: tokens that the draft head proposes a round, 0 to 5.
            kv_budget: bytes of the slab, such as ``"4GiB"``; None: the
                device's default, see `pages_for`.
            options: as `Runner` takes them.

        Raises:
            ModelError: the folder, an architecture, a tensor, a dtype, the draft window.
            ConfigError: a budget too small for one lane and one image, or another option.
        """
        device = torch.device(device)
        dtype, kv_dtype = dtypes_of(device, dtype=dtype, kv_dtype=kv_dtype)
        model = Model.load(path, device=device, dtype=dtype)
        layout = layout_of(model, kv_dtype=kv_dtype, draft_tokens=draft_tokens)
        return cls(
            model,
            num_pages=pages_for(layout, kv_budget, device=device),
            tokenizer=Tokenizer.load(path),
            lanes=lanes,
            kv_dtype=kv_dtype,
            draft_tokens=draft_tokens,
            **options,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer and chat template.

        Raises:
            ModelError: the runner was made without one.
        """
        if self._tokenizer is None:
            raise ModelError("tokenizer: none; needs a folder with tokenizer.json")
        return self._tokenizer

    @property
    def capacity(self) -> Capacity:
        """What fits into the slab, as a person reads it."""
        return Capacity.of(self.slab.layout, self.pool.config.num_pages)

    def prompt(self, text: str | Iterable[int], *, salt: str | None = None, **parts: Any) -> Prompt:
        """Return a `Prompt` of this runner's namespace; ``parts`` as `Prompt` takes them."""
        space = self.namespace if salt is None else dataclasses.replace(self.namespace, salt=salt)
        tokens = self.tokenizer.encode(text) if isinstance(text, str) else text
        return Prompt(tokens, namespace=space, **parts)

    # -- one request -----------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> RequestOutput:
        """Run one request to its end; ``options`` as `request` takes them.

        Raises:
            ConfigError: there is no lane or no room for it now.
        """
        sequence = self._started(prompt, options)
        for _ in self._steps(sequence):
            pass
        return sequence.output()

    def stream(self, prompt: Prompt, **options: Any) -> Generator[int]:
        """Yield one request's tokens as they are made; closing the iterator cancels it."""
        sequence = self._started(prompt, options)
        given = 0
        steps = self._steps(sequence)
        try:
            for _ in steps:
                yield from sequence.tokens[given:]
                given = len(sequence.tokens)
        finally:
            steps.close()

    def _started(self, prompt: Prompt, options: dict[str, Any]) -> Sequence:
        sequence = self.start(prompt, **options)
        if sequence is None:
            raise ConfigError(f"no room or no lane for the request: {self.pool.last_refusal}")
        return sequence

    def _steps(self, sequence: Sequence) -> Generator[None]:
        """Run a sequence alone, yielding whenever there are new tokens; cancelled if closed."""
        try:
            while not sequence.ready:
                self.prefill(sequence)
            yield
            while sequence.finish is None:
                self.decode([sequence])
                yield
            self.finish(sequence)
        finally:
            self.cancel(sequence)

    # -- several at once -------------------------------------------------------------------

    def request(self, prompt: Prompt, **options: Any) -> Request:
        """Check a request; ``options`` as `make_request` takes them.

        Raises:
            PromptError: it could never fit, or a token is outside the vocabulary.
        """
        return make_request(self.limits, prompt, **options)

    def start(self, prompt: Prompt, **options: Any) -> Sequence | None:
        """Check and admit a request; None where there is no room or lane, or it must wait."""
        found = self.admit(self.request(prompt, **options))
        return found if isinstance(found, Sequence) else None

    def admit(self, request: Request, **pool_options: Any) -> Sequence | Pending | None:
        """Admit a request and restore its prefix; None where there is no room or lane.

        `Pending` only with ``wait_for_shared``, see `PrefixPool.acquire`, which takes
        ``pool_options``, too. A checkpoint that cannot be restored is quarantined, and the next
        best is resumed.
        """
        options = {**request.pool_options, **pool_options}
        reserve = request.max_tokens + self.executor.draft_tokens
        while True:
            lease: Lease | Pending | None = self.pool.acquire(
                request.prompt, reserve_tokens=reserve, **options
            )
            if not isinstance(lease, Lease):
                return lease
            if self._restored(lease):
                break
        try:
            sequence = Sequence(
                request=request,
                lease=lease,
                sampler=Sampler(request.sampling, prompt=request.prompt.tokens),
                table=self.slab.ids(lease.pages.tolist()),
                chunks=lease.chunks(),
                axes=request.media.rotary_offset(request.prompt),
            )
        except BaseException:
            lease.release()
            raise
        self.running.append(sequence)
        return sequence

    def _restored(self, lease: Lease) -> bool:
        """Restore a lease's lane; False where that failed and its source is quarantined."""
        try:
            self.slab.execute(lease.restore())
        except BaseException as error:
            if not lease.start or not isinstance(error, (RuntimeError, IndexError)):
                lease.release()
                raise
            lease.quarantine()
            self.slab.execute([ResetLane(lease.lane)])
            return False
        return True

    def prefill(
        self, sequence: Sequence, *, look: Callable[[Chunk, torch.Tensor], None] | None = None
    ) -> None:
        """Run the next chunk of a prompt, or sample the first token after the last.

        ``look`` gets each chunk and the model's output of it (T, hidden).
        """
        request, lease, chunk = sequence.request, sequence.lease, next(sequence.chunks, None)
        began = time.perf_counter()
        if chunk is None:
            logits = self.executor.tail_logits(sequence.lane)
            sequence.emit(sequence.sampler.accept(logits[None], []))
            sequence.ready = True
            return
        tokens, device = request.prompt.tokens[chunk.begin : chunk.end], self.slab.device
        hidden = self.executor.prefill(
            sequence.lane,
            torch.from_numpy(tokens.astype(np.int64)).to(device),
            begin=chunk.begin,
            table=sequence.table,
            positions=request.media.rotary_positions(chunk.begin, chunk.end).to(device),
            spans=request.media.span_rows(request.prompt, chunk),
        )
        self._note_rate(chunk, began)
        lease.advance(tokens)
        if look is not None:
            look(chunk, hidden)
        if chunk.checkpoint:
            self._save(lease, chunk.checkpoint)

    def _note_rate(self, chunk: Chunk, began: float) -> None:
        """Record in the tiers what prefilling costs, from the first large chunks on CUDA."""
        tokens, rates = chunk.end - chunk.begin, self.tiers.rates
        if not self.tiers.shelves or tokens < RATED_TOKENS:
            return
        if self.slab.device.type == "cuda":
            if rates.prefill_tokens_s is not None:
                return
            torch.cuda.synchronize(self.slab.device)
        rates.note_prefill(tokens, time.perf_counter() - began)

    def decode(self, sequences: Iterable[Sequence]) -> None:
        """Run one round for each of the sequences that is ready and not finished."""
        going = [each for each in sequences if each.ready and each.finish is None]
        turns = [self._turn(each) for each in going]
        if not turns:
            return
        for each, turn, new in zip(going, turns, self.executor.round(turns), strict=True):
            each.drafted += len(turn.drafts)
            each.accepted += len(new) - 1
            each.lease.advance([turn.pending, *new[:-1]])
            each.emit(new)

    def _turn(self, sequence: Sequence) -> Turn:
        left = sequence.request.max_tokens - len(sequence.tokens) - 1
        return Turn(
            lane=sequence.lane,
            pending=sequence.tokens[-1],
            position=sequence.lease.frontier,
            table=sequence.table,
            sampler=sequence.sampler,
            most=min(self.executor.draft_tokens, left),
            axes=sequence.axes,
            stop=sequence.upto,
        )

    def finish(self, sequence: Sequence) -> str | None:
        """Retain a sequence and end it; return the key of its entry."""
        self._save(sequence.lease, "frontier")
        return self._end(sequence)

    def _save(self, lease: Lease, kind: str) -> None:
        """Take a checkpoint; where its image cannot be written, nothing is retained (G11)."""
        operations = lease.checkpoint(kind, position=lease.frontier)
        try:
            self.slab.execute(operations)
        except BaseException:
            lease.release()
            raise

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence at any step; checkpoints that it has crossed are retained."""
        if sequence in self.running:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> str | None:
        self.running.remove(sequence)
        sequence.ended = time.perf_counter()
        lease = sequence.lease
        return None if lease.ended else lease.commit(position=lease.frontier)

"""A `llama_cpp.Llama` whose requests resume from a pool of retained conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Generator, Iterable, Sequence
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np

from ninfer_pool.core.lease import Lease
from ninfer_pool.core.operations import CopyPage, LoadImage, Operation, SaveImage
from ninfer_pool.core.pool import PrefixPool
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import ConfigError, PromptError
from ninfer_pool.integrations.llama_cpp.completion import Completion, EndConditions
from ninfer_pool.integrations.llama_cpp.engine import LlamaEngine
from ninfer_pool.integrations.llama_cpp.sampler import LlamaSampler, LlamaSampling
from ninfer_pool.integrations.llama_cpp.sequences import Logits, RestoreError

GREEDY = LlamaSampling()
MAX_TOKENS = 16
"""The default of `llama_cpp.Llama.create_completion`."""


class PooledLlama:
    """Serves a `llama_cpp.Llama`'s model from several retained conversations.

    Each prompt resumes at its deepest retained prefix. The library alone holds one conversation
    and computes a hybrid model's whole prompt again where its tail differs.

        llama = Llama("qwen3.5.gguf", n_ctx=512)         # a small context: its own is not used
        with PooledLlama(llama, n_ctx=16384, pool_bytes=4 << 30, lanes=2) as pooled:
            first = pooled.create_completion("Once upon a time", max_tokens=64)
            first["pool"]["reused"]

    Args:
        llama: provides model, tokenizer and settings.
        pool_bytes: host memory for retained pages and images.
        lanes: sequences that may run at once; each has ``n_ctx`` cells in the library's memory.
        options: as `LlamaEngine` takes them.

    Raises:
        ConfigError: a model whose state cannot be copied, with the supported models.
    """

    def __init__(
        self, llama: llama_cpp.Llama, *, pool_bytes: int, lanes: int = 1, **options: Any
    ) -> None:
        self.llama = llama
        self.engine = LlamaEngine(llama, pool_bytes=pool_bytes, lanes=lanes, **options)
        self.pool = PrefixPool(self.engine.config)
        self._vocab = llama_cpp.llama_model_get_vocab(llama.model)

    def close(self) -> None:
        """Free the library's context; the retained sequences cannot be resumed afterwards."""
        self.engine.close()

    def __enter__(self) -> PooledLlama:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------

    def prompt(
        self,
        text: str | Iterable[int],
        *,
        boundaries: Iterable[tuple[int, str]] = (),
        salt: str | None = None,
    ) -> Prompt:
        """Return a `Prompt` of this model; text is tokenized as `create_completion` does."""
        if isinstance(text, str):
            text = self.llama.tokenize(text.encode("utf-8"), add_bos=True, special=True)
        space = dataclasses.replace(self.engine.namespace, salt=salt)
        return Prompt(list(text), namespace=space, boundaries=boundaries)

    def generate(self, prompt: Prompt | str | Iterable[int], **options: Any) -> Completion:
        """Run one request to its end; ``options`` as `stream` takes them."""
        running = self.stream(prompt, **options)
        while True:
            try:
                next(running)
            except StopIteration as end:
                found: Completion = end.value
                return found

    def stream(
        self,
        prompt: Prompt | str | Iterable[int],
        *,
        max_tokens: int = MAX_TOKENS,
        sampling: LlamaSampling = GREEDY,
        stop_tokens: Collection[int] | None = None,
        stop: Sequence[str] = (),
        **pool_options: Any,
    ) -> Generator[int, None, Completion]:
        """Yield one request's tokens and return its `Completion`; closing it cancels the request.

        Streams may be interleaved, as many as there are lanes.

        Args:
            stop_tokens: ids that end it and are not part of it; None: the model's own.
            stop: texts that end it once its newest tokens have one.
            pool_options: as `PrefixPool.acquire` takes them.

        Raises:
            ConfigError: no lane or no room is free, or it is closed.
            PromptError: it could never fit, or a stop text is empty.
            LibraryError: the library failed; nothing of the request is retained.
        """
        if not isinstance(prompt, Prompt):
            prompt = self.prompt(prompt)
        self._check(prompt, max_tokens, stop)
        ends = self._ends if stop_tokens is None else set(stop_tokens).__contains__
        end = EndConditions(most=max_tokens, ends=ends, stops=tuple(stop), text=self.text)
        sampler = LlamaSampler(sampling)
        try:
            lease, done, logits = self._begin(prompt, reserve_tokens=max_tokens, **pool_options)
            with lease:
                yield from self._decode(lease, done, logits, sampler, end)
        finally:
            sampler.close()
        return done

    def _check(self, prompt: Prompt, max_tokens: int, stop: Sequence[str]) -> None:
        engine = self.engine
        if engine.sequences.closed:
            raise ConfigError("closed: its context is freed; make another PooledLlama")
        if not all(type(each) is str and each for each in stop):
            raise PromptError(f"stop: {stop!r}; needs texts that are not empty")
        if type(max_tokens) is not int or max_tokens < 1:
            raise PromptError(f"max_tokens: {max_tokens!r}; needs an int of 1 or more")
        if dataclasses.replace(prompt.namespace, salt=None) != engine.namespace:
            raise PromptError("namespace: another model's; needs a prompt made by prompt()")
        if prompt.media or prompt.attributes:
            raise PromptError("media: this adapter serves text alone")
        if int(prompt.tokens.max()) >= engine.vocab_size:
            raise PromptError(f"tokens: needs ids below {engine.vocab_size}")
        most = engine.sequences.n_ctx
        if len(prompt) + max_tokens > most:
            raise PromptError(f"tokens: {len(prompt)} and {max_tokens} more; n_ctx is {most}")

    def _begin(self, prompt: Prompt, **options: Any) -> tuple[Lease, Completion, Logits]:
        """Acquire, restore and prefill; a source that cannot be restored is quarantined."""
        while True:
            lease = self.pool.acquire(prompt, **options)
            if not isinstance(lease, Lease):
                reason = self.pool.last_refusal if lease is None else lease
                raise ConfigError(f"no room or no lane for the request: {reason}")
            done = Completion.begun(lease)
            try:
                return lease, done, self._prefill(lease, done)
            except RestoreError:
                if not lease.start:
                    lease.release()
                    raise
                lease.quarantine()
            except BaseException:
                lease.release()
                raise

    def _prefill(self, lease: Lease, done: Completion) -> Logits:
        engine, lane, tokens = self.engine, lease.lane, lease.prompt.tokens
        self._execute(lease.restore())
        logits: Logits | None = None
        for chunk in lease.chunks():
            part = tokens[chunk.begin : chunk.end]
            logits = engine.compute(part, lane=lane, begin=chunk.begin, table=lease.pages)
            lease.advance(part)
            done.computed += len(part)
            if chunk.begin == lease.start:
                done.restored = engine.restored(lane)
            if chunk.checkpoint:
                self._checkpoint(lease, chunk.checkpoint)
        if logits is None:  # a full hit: the logits are in the image
            engine.ready(lane, begin=lease.start, table=lease.pages)
            done.restored = engine.restored(lane)
            logits = engine.tail_logits(lane)
        return logits

    def _decode(
        self,
        lease: Lease,
        done: Completion,
        logits: Logits,
        sampler: LlamaSampler,
        end: EndConditions,
    ) -> Generator[int, None, None]:
        try:
            while True:
                token = sampler.choose(logits)
                if end.ends(token):
                    done.finish = "stop"
                    break
                done.tokens.append(token)
                yield token
                if end.has_stop(done.tokens):
                    done.finish = "stop"
                    break
                if len(done.tokens) == end.most:
                    done.finish = "length"
                    break
                logits = self._step(lease, token)
            self._checkpoint(lease, "frontier")
            done.key = lease.commit(position=self.engine.position(lease.lane))
        except GeneratorExit:  # cancelled: checkpoints already taken are retained
            done.key = lease.commit(position=self.engine.position(lease.lane))
            raise

    def _step(self, lease: Lease, token: int) -> Logits:
        part = np.array([token], dtype=np.int32)
        begin = lease.frontier
        logits = self.engine.compute(part, lane=lease.lane, begin=begin, table=lease.pages)
        lease.advance(part)
        return logits

    def _ends(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._vocab, token))

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens."""
        return str(self.llama.detokenize(tokens).decode("utf-8", "replace"))

    def _checkpoint(self, lease: Lease, kind: str) -> None:
        """Take a checkpoint: write the pages first, then carry out its operations (G11)."""
        self.engine.write_pages(lease.lane, lease.pages)
        self._execute(lease.checkpoint(kind, position=self.engine.position(lease.lane)))

    def _execute(self, operations: Sequence[Operation]) -> None:
        for each in operations:
            if isinstance(each, CopyPage):
                self.engine.copy_page(each.source, each.target)
            elif isinstance(each, SaveImage):
                self.engine.save_image(each.lane, each.pages)
            elif isinstance(each, LoadImage):
                self.engine.load_image(each.lane, each.pages)
            else:
                self.engine.reset(each.lane)

    # -- llama-cpp-python's interface ----------------------------------------------------------

    def create_completion(
        self,
        prompt: str | Iterable[int],
        *,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 0.0,
        top_p: float = 0.95,
        min_p: float = 0.05,
        top_k: int = 40,
        seed: int = 0,
        stop: str | Sequence[str] | None = (),
        **options: Any,
    ) -> dict[str, Any]:
        """Answer as `llama_cpp.Llama.create_completion` does, with the reuse in ``pool``.

        ``stop`` are texts that end it and are removed; ``options`` as `stream` takes them.
        """
        sampling = LlamaSampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        )
        stops = (stop,) if stop and isinstance(stop, str) else tuple(stop or ())
        parts = {name: options.pop(name) for name in ("boundaries", "salt") if name in options}
        done = self.generate(
            self.prompt(prompt, **parts),
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stops,
            **options,
        )
        text = self.text(done.tokens)
        for each in stops:
            text = text.partition(each)[0]
        return {
            "object": "text_completion",
            "model": self.llama.model_path,
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": done.finish}],
            "usage": {
                "prompt_tokens": done.prompt_tokens,
                "completion_tokens": len(done.tokens),
                "total_tokens": done.prompt_tokens + len(done.tokens),
            },
            "pool": done.report(),
        }

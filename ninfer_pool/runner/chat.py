"""A chat request as a prompt: its tokens, and the boundaries that later prompts share with it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ninfer_pool.errors import ModelError, PromptError
from ninfer_pool.runner.control_tokens import ControlTokenGuard, RenderedText, any_of, unmarked
from ninfer_pool.runner.encoder import Encoded, Encoder
from ninfer_pool.runner.headers import THINK, UNTHINK, Headers, Message, lead_of
from ninfer_pool.runner.outline import Outline
from ninfer_pool.runner.tokenizer import Tokenizer

SYSTEM_ROLES = ("system", "developer")
RESERVED = ("self", "messages", "tools", "documents", "add_generation_prompt")
"""Names that a template's further arguments may not have."""
LEADS = 1024
"""Ends of system parts that a `Chat` remembers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """A prompt made of a chat request.

    ``tokens`` are int32 of shape (n,), read-only. ``boundaries`` are (position, kind), ascending,
    each a function of the text before it: a later prompt that begins with the same text declares
    them again. ``thinking``: the answer begins inside ``<think>``.
    """

    tokens: npt.NDArray[np.int32]
    boundaries: tuple[tuple[int, str], ...]
    thinking: bool = False
    _encoded: Encoded | None = field(default=None, repr=False)
    _outline: Outline | None = field(default=None, repr=False)

    @classmethod
    def raw(cls, tokens: Sequence[int]) -> Ask:
        """Return a prompt of no chat: tokens as they are, the end of them a boundary."""
        end = ((len(tokens), "turn"),) if len(tokens) else ()
        return cls(tokens=np.asarray(tokens, dtype=np.int32), boundaries=end)

    def part_at(self, position: int) -> str:
        """Say in which part of the request the token at a position lies.

        ``system``, ``messages[3]`` or ``generation_prompt``; ``prompt`` where it is no chat. It
        may render the messages again.
        """
        if self._outline is None or self._encoded is None:
            return "prompt"
        return self._outline.part_at(self._encoded.character(position))


class Chat:
    """Turns chat requests into prompts; one for each model, safe to use from several threads.

    >>> from ninfer_pool.runner import TINY, Tokenizer
    >>> chat = Chat(Tokenizer.load(TINY))
    >>> ask = chat.ask([{"role": "user", "content": "Well?"}])
    >>> len(ask.tokens), ask.boundaries, ask.part_at(3)
    (15, ((8, 'history'), (13, 'turn'), (15, 'response')), 'messages[0]')

    Raises:
        ModelError: the model's folder has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise ModelError("chat_template: none; needs a folder with chat_template.jinja")
        self.tokenizer = tokenizer
        self._encoder = Encoder(tokenizer.inner)
        self._controls = any_of(self._encoder.controls)
        self._headers = headers = Headers.of(tokenizer, self._controls)
        bare = [headers.answer] if not self._controls.search(headers.answer) else []
        self.guard = ControlTokenGuard(self._encoder.controls, headers=filter(None, bare))
        self._openers = any_of(filter(None, map(self._opener, (headers.answer, headers.question))))
        self._leads: dict[bytes, tuple[int, bytes]] = {}

    def ask(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        breakpoints: Sequence[tuple[int, int]] = (),
        **switches: Any,
    ) -> Ask:
        """Render a request up to where its answer begins, and encode it.

        A control token's string in what the request holds stays text. Boundaries are ``system``
        (the end of tools and system text), for each answer's header ``history`` (before it),
        ``turn`` (after it) and ``response`` (after the fixed beginning of an answer), and
        ``junction`` for each breakpoint. One that lies inside a token is left out, a breakpoint
        moved before the token.

        Args:
            messages: ``{"role": …, "content": …}``, as a chat template reads them. Text parts of
                one message are joined as they are.
            tools: JSON schemas of the tools that the model may call.
            breakpoints: (where, part): the end of a content part of ``messages[where]``, or, where
                it is -1, of the tools. At the end of a message it is the end of all its text.
            switches: further variables of the template, such as ``enable_thinking``.

        Raises:
            PromptError: the template says no, a value is no plain JSON, text that is no UTF-8.
        """
        for name in set(switches) & set(RESERVED):
            raise PromptError(f"chat template arguments: {name!r}; needs another name")
        try:
            request = _Request(self, messages, tools=tools, switches=switches)
            return self._asked(request, breakpoints)
        except RecursionError:
            raise PromptError("messages: nested too deep; needs fewer levels") from None

    def _asked(self, request: _Request, breakpoints: Sequence[tuple[int, int]]) -> Ask:
        rendered = request.prompt(request.messages)
        headers = self._places(rendered)
        system = self._system_end(request, rendered.text)
        outline = self._outline(request, rendered, headers=headers, system=system)
        kinds = dict(self._around(rendered.text, headers))
        kinds |= {system: "system"} if system else {}
        for where, part in breakpoints:
            end = _breakpoint(outline, request, where, part, system=system)
            if end and kinds.get(end) != "system":
                kinds[end] = "junction"
        encoded = self._encoder.encode(rendered)
        answer = rendered.text[headers[-1] + len(self._headers.answer) :] if headers else ""
        return Ask(
            tokens=encoded.tokens,
            boundaries=_in_tokens(kinds, encoded),
            thinking=THINK in answer and UNTHINK not in answer,
            _encoded=encoded,
            _outline=outline,
        )

    def _opener(self, header: str) -> str:
        """What tells that a message begins: the control token that its header begins with."""
        found = self._controls.search(header)
        return found[0] if found is not None else header

    def _places(self, rendered: RenderedText, pattern: re.Pattern[str] | None = None) -> list[int]:
        """Where the template itself wrote the answer's header, or any match of a pattern."""
        if pattern is None:
            pattern = any_of(filter(None, [self._headers.answer]))
        found = pattern.finditer(rendered.text)
        return [match.start() for match in found if not rendered.is_own(*match.span())]

    def _around(self, text: str, headers: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Boundaries around each answer's header.

        Every beginning of an answer that the text has so far is one, not the longest alone: the
        text after a boundary must not decide about it.
        """
        for begin in headers:
            turn = begin + len(self._headers.answer)
            if self._headers.apart:
                yield begin, "history"
            yield turn, "turn"
            for prologue in self._headers.prologues:
                if text.startswith(prologue, turn):
                    yield turn + len(prologue), "response"

    def _system_end(self, request: _Request, text: str) -> int:
        """How many characters the tools and the system text take; 0 where there are none."""
        known = self._leads.get(request.lead_key)
        if known is not None and _digest(text[: known[0]]) == known[1]:
            return known[0]
        lead = request.lead() or ""  # also where a template told another time
        question = self._headers.question
        lead = lead[: len(lead) - len(question)] if lead.endswith(question) else lead
        if not text.startswith(lead) or not self._controls.sub("", lead).strip():
            lead = ""  # no more than a token that begins all texts
        for old in list(self._leads)[: max(0, len(self._leads) - LEADS + 1)]:
            self._leads.pop(old, None)
        self._leads[request.lead_key] = (len(lead), _digest(lead))
        return len(lead)

    def _outline(
        self, request: _Request, rendered: RenderedText, *, headers: Sequence[int], system: int
    ) -> Outline:
        return Outline(
            rendered.text,
            request.messages,
            part_ends=request.part_ends,
            render=lambda messages: request.prompt(messages).text,
            controls=self._places(rendered, self._controls),
            openers=self._places(rendered, self._openers),
            system=(len(request.system) if system else 0, system),
            end=headers[-1] if headers else len(rendered.text),
        )


class _Request:
    """A request's values, and how to render them."""

    def __init__(
        self,
        chat: Chat,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]],
        switches: Mapping[str, Any],
    ) -> None:
        self._guard = guard = chat.guard
        self._tokenizer = chat.tokenizer
        self._mark = mark = guard.free_mark(messages, tools, switches)
        joined = [_joined(message) for message in messages]
        self.messages: list[Any] = [message for message, _ in joined]
        self.part_ends = {n: ends for n, (_, ends) in enumerate(joined) if ends}
        self._tools = guard.marked(tools, mark)
        self._switches = {
            name: guard.marked(value, mark, key="type") for name, value in switches.items()
        }
        roles = [isinstance(m, Mapping) and m.get("role") in SYSTEM_ROLES for m in self.messages]
        self.system = self.messages[: [*roles, False].index(False)]

    @cached_property
    def lead_key(self) -> bytes:
        """A digest of what the text before the first question depends on."""
        system = self._guard.marked(self.system, self._mark)
        return _digest(json.dumps([system, self._tools, self._switches]))

    def lead(self) -> str | None:
        """Return the text before the first question's content."""
        return lead_of(lambda messages: self._render(messages).text, self.system)

    def prompt(self, messages: Sequence[Message]) -> RenderedText:
        """Render messages up to where an answer to them begins.

        Raises:
            PromptError: the template says no.
        """
        return self._render(messages, add_generation_prompt=True)

    def bare(self) -> str:
        """Return the prompt's text without tools; "" where the template says no to that."""
        try:
            return self._render(self.messages, add_generation_prompt=True, tools=None).text
        except PromptError:
            return ""

    def _render(self, messages: Sequence[Message], **options: Any) -> RenderedText:
        options = {"tools": self._tools, **self._switches, **options}
        try:
            text = self._tokenizer.render(self._guard.marked(messages, self._mark), **options)
            text.encode("utf-8")
        except PromptError as error:
            raise PromptError(str(error).replace(self._mark, "")) from None
        except UnicodeEncodeError as error:
            raise PromptError(f"messages: {error.reason}; needs UTF-8") from None
        return unmarked(text, self._mark)


def _joined(message: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a message whose text parts are one string, as all templates read it, and their ends.

    So it is rendered alike whether or not a client told its text in parts.
    """
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list | tuple):
        return message, ()
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) < len(texts):
        return message, ()
    ends = tuple(itertools.accumulate(map(len, strings)))
    return {**message, "content": "".join(strings)}, ends


def _digest(text: str) -> bytes:
    return xxhash.xxh3_128_digest(text.encode())


def _breakpoint(
    outline: Outline, request: _Request, where: int, part: int, *, system: int
) -> int | None:
    if where == -1:  # the tools may be told before the system text, or after it
        first = outline.begin_of(0) if request.system else None
        return first if first and not request.bare().startswith(outline.text[:first]) else system
    if not 0 <= where < len(request.messages):
        count = len(request.messages)
        raise PromptError(f"breakpoints: messages[{where}]; there are {count} messages")
    return outline.end_of_part(where, part)


def _in_tokens(kinds: Mapping[int, str], encoded: Encoded) -> tuple[tuple[int, str], ...]:
    """Boundaries in tokens, ascending; at 0 there is none."""
    found: dict[int, str] = {}
    for character in sorted(kinds):
        if kinds[character] == "junction":  # asked for: as near as a whole token comes
            position: int | None = encoded.whole_before(character)
        else:
            position = encoded.position(character)
        if position:
            found.setdefault(position, kinds[character])
    return tuple(found.items())

"""A chat as a prompt: its tokens, and the boundaries that later prompts share with it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ninfer_pool.errors import ModelError, PromptError
from ninfer_pool.runner.chat_template import ControlTokenGuard, unmarked
from ninfer_pool.runner.encoder import Encoded, Encoder, RenderedText, any_of
from ninfer_pool.runner.headers import THINK, UNTHINK, Headers, Message, lead_of
from ninfer_pool.runner.outline import Outline
from ninfer_pool.runner.tokenizer import Tokenizer

SYSTEM_ROLES = ("system", "developer")
RESERVED = ("self", "messages", "tools", "documents", "add_generation_prompt")
"""Names that a template's further arguments must not have."""
LEADS = 1024
"""Ends of system parts that a `Chat` remembers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendered:
    """A chat as a prompt.

    ``tokens`` are int32 of shape (n,), read-only. ``boundaries`` are (position, kind), ascending,
    each a function of the text before it: a later prompt that begins with the same text declares
    them again. ``thinking``: the answer begins inside ``<think>``.
    """

    tokens: npt.NDArray[np.int32]
    boundaries: tuple[tuple[int, str], ...]
    thinking: bool = False
    _encoded: Encoded | None = field(default=None, repr=False)
    _outline: Callable[[], Outline] | None = field(default=None, repr=False)

    @classmethod
    def raw(cls, tokens: Sequence[int]) -> Rendered:
        """Return a prompt without a chat: tokens as they are, with a boundary at the end."""
        end = ((len(tokens), "turn"),) if len(tokens) else ()
        return cls(tokens=np.asarray(tokens, dtype=np.int32), boundaries=end)

    def part_at(self, position: int) -> str:
        """Return the part of the chat that contains the token at a position.

        ``system``, ``messages[3]`` or ``generation_prompt``; ``prompt`` where there is no chat.
        It may render the messages again.
        """
        if self._outline is None or self._encoded is None:
            return "prompt"
        return self._outline().part_at(self._encoded.character(position))


class Chat:
    """Renders chats as prompts; one per model, safe to use from several threads.

    >>> from ninfer_pool.runner import TINY, Tokenizer
    >>> chat = Chat(Tokenizer.load(TINY))
    >>> rendered = chat.render([{"role": "user", "content": "Well?"}])
    >>> len(rendered.tokens), rendered.boundaries, rendered.part_at(3)
    (15, ((8, 'history'), (13, 'turn'), (15, 'response')), 'messages[0]')

    Raises:
        ModelError: the model's folder has no chat template.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise ModelError("chat_template: none; needs a folder with chat_template.jinja")
        self.template = tokenizer.chat_template
        self._encoder = Encoder(tokenizer.inner)
        self._controls = any_of(self._encoder.controls)
        self._headers = headers = Headers.of(tokenizer, self._controls)
        bare = [headers.answer] if not self._controls.search(headers.answer) else []
        self.guard = ControlTokenGuard(self._encoder.controls, headers=filter(None, bare))
        self._answers = any_of(filter(None, [headers.answer]))
        self._openers = any_of(filter(None, map(self._opener, (headers.answer, headers.question))))
        self._leads: dict[bytes, tuple[int, bytes]] = {}

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        breakpoints: Sequence[tuple[int, int]] = (),
        **switches: Any,
    ) -> Rendered:
        """Render a chat up to where its answer begins, and encode it.

        A control token's string in a message stays text. The boundary ``system`` is the end of
        tools and system text. Each answer's header has three: ``history`` before it, ``turn``
        after it, and ``response`` after the fixed beginning of the answer. Each breakpoint is a
        ``junction``. A boundary inside a token is left out; a breakpoint moves before the token.

        Args:
            messages: ``{"role": …, "content": …}``, as a chat template reads them. Text parts of
                one message are joined as they are.
            tools: JSON schemas of the tools that the model may call.
            breakpoints: (where, part): the end of a content part of ``messages[where]``, or, where
                it is -1, of the tools. At the end of a message it is the end of all its text.
            switches: further variables of the template, such as ``enable_thinking``.

        Raises:
            PromptError: the template rejects it, a value is no plain JSON, text is not UTF-8.
        """
        for name in set(switches) & set(RESERVED):
            raise PromptError(f"chat template arguments: {name!r}; needs another name")
        try:
            conversation = _Conversation(self, messages, tools=tools, switches=switches)
            return self._rendered(conversation, breakpoints)
        except RecursionError:
            raise PromptError("messages: nested too deep; needs fewer levels") from None

    def _rendered(
        self, conversation: _Conversation, breakpoints: Sequence[tuple[int, int]]
    ) -> Rendered:
        rendered = conversation.rendered()
        headers = rendered.foreign(self._answers)
        system = self._system_end(conversation, rendered.text)
        outline = cache(lambda: self._outline(conversation, rendered, headers, system))
        kinds = dict(self._around(rendered.text, headers))
        kinds |= {system: "system"} if system else {}
        for where, part in breakpoints:
            end = _breakpoint(outline(), conversation, where, part, system=system)
            if end and kinds.get(end) != "system":
                kinds[end] = "junction"
        encoded = self._encoder.encode(rendered)
        answer = rendered.text[headers[-1] + len(self._headers.answer) :] if headers else ""
        return Rendered(
            tokens=encoded.tokens,
            boundaries=encoded.boundaries(kinds),
            thinking=THINK in answer and UNTHINK not in answer,
            _encoded=encoded,
            _outline=outline,
        )

    def _opener(self, header: str) -> str:
        """Return what shows that a message begins: its header's control token, if it has one."""
        found = self._controls.search(header)
        return found[0] if found is not None else header

    def _around(self, text: str, headers: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the boundaries around each answer's header.

        Every beginning of an answer in the text so far is one, not the longest alone: the text
        after a boundary must not decide about it.
        """
        for begin in headers:
            turn = begin + len(self._headers.answer)
            if self._headers.apart:
                yield begin, "history"
            yield turn, "turn"
            for prologue in self._headers.prologues:
                if text.startswith(prologue, turn):
                    yield turn + len(prologue), "response"

    def _system_end(self, conversation: _Conversation, text: str) -> int:
        """Return the characters of the tools and the system text; 0 where there are none."""
        key = conversation.lead_key()
        known = self._leads.get(key)
        if known is not None and _digest(text[: known[0]]) == known[1]:
            return known[0]
        lead = conversation.lead() or ""  # also where a template shows another time
        question = self._headers.question
        lead = lead[: len(lead) - len(question)] if lead.endswith(question) else lead
        if not text.startswith(lead) or not self._controls.sub("", lead).strip():
            lead = ""  # no more than a token that begins all texts
        for old in list(self._leads)[: max(0, len(self._leads) - LEADS + 1)]:
            self._leads.pop(old, None)
        self._leads[key] = (len(lead), _digest(lead))
        return len(lead)

    def _outline(
        self,
        conversation: _Conversation,
        rendered: RenderedText,
        headers: Sequence[int],
        system: int,
    ) -> Outline:
        return Outline(
            rendered.text,
            conversation.messages,
            part_ends=conversation.part_ends,
            render=lambda messages: conversation.prompt(messages).text,
            controls=rendered.foreign(self._controls),
            openers=rendered.foreign(self._openers),
            system=(conversation.system if system else 0, system),
            end=headers[-1] if headers else len(rendered.text),
        )


class _Conversation:
    """A chat's messages, tools and switches, and how to render them."""

    def __init__(
        self,
        chat: Chat,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]],
        switches: Mapping[str, Any],
    ) -> None:
        self._guard = chat.guard
        self._template = chat.template
        joined = [_joined(message) for message in messages]
        self.messages: list[Any] = [message for message, _ in joined]
        self.part_ends = {n: ends for n, (_, ends) in enumerate(joined) if ends}
        roles = [isinstance(m, Mapping) and m.get("role") in SYSTEM_ROLES for m in self.messages]
        self.system = [*roles, False].index(False)
        """Messages of the system part."""
        self._mark, marked = self._guard.mark_all(self.messages, tools, switches)
        self._marked, self._tools, self._switches = marked

    def rendered(self) -> RenderedText:
        """Render the messages up to where an answer to them begins.

        Raises:
            PromptError: the template rejects them.
        """
        return self._render(self._marked, add_generation_prompt=True)

    def lead_key(self) -> bytes:
        """Return a digest of everything that the text before the first question depends on."""
        values = [self._marked[: self.system], self._tools, self._switches]
        return _digest(json.dumps(values))

    def lead(self) -> str | None:
        """Return the text before the first question's content."""
        system = self.messages[: self.system]
        return lead_of(lambda messages: self._render(self._remark(messages)).text, system)

    def prompt(self, messages: Sequence[Message], **options: Any) -> RenderedText:
        """Render other messages up to where an answer to them begins.

        Raises:
            PromptError: the template rejects them.
        """
        return self._render(self._remark(messages), add_generation_prompt=True, **options)

    def bare(self) -> str:
        """Return the prompt's text without tools; "" where the template rejects that."""
        try:
            return self.prompt(self.messages, tools=None).text
        except PromptError:
            return ""

    def _remark(self, messages: Sequence[Message]) -> Any:
        return self._guard.marked(messages, self._mark)

    def _render(self, marked: Any, **options: Any) -> RenderedText:
        options = {"tools": self._tools, **self._switches, **options}
        try:
            text = self._template.render(marked, **options)
            text.encode("utf-8")
        except PromptError as error:
            raise PromptError(str(error).replace(self._mark, "")) from None
        except UnicodeEncodeError as error:
            raise PromptError(f"messages: {error.reason}; needs UTF-8") from None
        return unmarked(text, self._mark)


def _joined(message: Any) -> tuple[Any, tuple[int, ...]]:
    """Return a message whose text parts are one string, as all templates read it, and their ends.

    So it renders the same whether or not a client sent its text in parts.
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
    outline: Outline, conversation: _Conversation, where: int, part: int, *, system: int
) -> int | None:
    if where == -1:  # a template may write the tools before the system text, or after it
        first = outline.begin_of(0) if conversation.system else None
        before = bool(first) and not conversation.bare().startswith(outline.text[:first])
        return first if before else system
    if not 0 <= where < len(conversation.messages):
        count = len(conversation.messages)
        raise PromptError(f"breakpoints: messages[{where}]; there are {count} messages")
    return outline.end_of_part(where, part)

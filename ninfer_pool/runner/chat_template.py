"""A model's chat template: Jinja from its folder, rendered in a sandbox as transformers does.

Text of a request stays text. A *mark* is a character that the request does not contain. It goes
before a character of the request that could be part of a control token, and is removed again
after rendering. A control token's string that contains a marked character is text, whether the
request wrote all of it or the template completed it.
"""

from __future__ import annotations

import datetime
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ninfer_pool.errors import ModelError, PromptError
from ninfer_pool.runner.config import read_optional_json
from ninfer_pool.runner.encoder import NOTHING, RenderedText, any_of

FILE, FILE_JSON, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first."""
NONCHARACTERS = tuple(map(chr, itertools.chain(range(0xFDD0, 0xFDF0), (0xFFFE, 0xFFFF))))
"""Characters that no text should contain, so that the first is free in most requests."""
FIXED = ("role", "type")
"""Keys whose values a template compares with its own words, or turns into control tokens."""


class ChatTemplate:
    """Turns messages into the text that a model continues.

    ``variables``, the special tokens, are visible to the template next to `render`'s arguments.

    Raises:
        ModelError: a template that Jinja cannot parse.
    """

    def __init__(self, source: str, *, variables: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        self.variables = dict(variables or {})
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"chat_template: {error}; needs a Jinja template") from None

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate | None:
        """Read the template of a Hugging Face folder, or return None where it has none."""
        folder = Path(folder)
        config = read_optional_json(folder, CONFIG)
        variables = {name: _text(config[name]) for name in TOKENS if config.get(name)}
        if (folder / FILE).is_file():
            source: object = (folder / FILE).read_text(encoding="utf-8")
        else:
            own = read_optional_json(folder, FILE_JSON)
            source = own.get("chat_template", config.get("chat_template"))
        if isinstance(source, list):  # several by name
            source = {each["name"]: each["template"] for each in source}.get("default")
        return cls(source, variables=variables) if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **arguments: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: ``{"role": …, "content": …}`` and further keys that the template reads;
                keys whose value is None are left out.
            tools: JSON schemas of the tools that the model may call.
            add_generation_prompt: end with the beginning of the model's answer.
            arguments: further variables of the template, such as ``enable_thinking``.

        Raises:
            PromptError: the template rejects the messages, or a value is no plain JSON.
        """
        seen = {
            **self.variables,
            **_plain(arguments, "template arguments"),
            "messages": [_message(message) for message in messages],
            "tools": _plain(tools, "tools") or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(seen)
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"messages: {error}; needs what the chat template reads") from None


class _Generation(Extension):
    """``{% generation %}`` marks the model's own text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise PromptError(f"messages: {type(message).__name__}; needs mappings with a role")
    plain = {k: v for k, v in _plain(message, "messages").items() if v is not None}
    for name in REASONING[1:]:
        if name in plain:
            plain.setdefault(REASONING[0], plain[name])
    return plain


def _plain(value: Any, name: str) -> Any:
    """Copy plain JSON, so that a template can neither change nor call the caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, name) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, name) for item in value]
    raise PromptError(f"{name}: {type(value).__name__}; needs plain JSON values")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Return JSON in the given order; Jinja's own filter escapes HTML and sorts."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> str:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


class ControlTokenGuard:
    """Marks the strings of a request.

    ``controls`` are the strings of control tokens. ``headers`` are further strings that only a
    template may write; of these only whole ones are marked.
    """

    def __init__(self, controls: Iterable[str], *, headers: Iterable[str] = ()) -> None:
        self._controls = [token for token in controls if token.strip()]
        whole = sorted({*self._controls, *headers}, key=len, reverse=True)
        self._whole = any_of(whole)
        self._heads = {token[:n] for token in self._controls for n in range(1, len(token))}
        self._tails = {token[n:] for token in self._controls for n in range(1, len(token))}
        self._first = _one_of({token[0] for token in self._controls})
        self._last = _one_of({token[-1] for token in self._controls})
        self._longest = max(map(len, self._controls), default=0)
        self._joined = "\0".join(self._controls)

    def mark_all(
        self, messages: Any, tools: Any, switches: Mapping[str, Any]
    ) -> tuple[str, tuple[Any, Any, dict[str, Any]]]:
        """Return a mark that a chat does not contain, and its three parts, marked.

        Raises:
            PromptError: as `free_mark`.
        """
        mark = self.free_mark(messages, tools, switches)
        named = {name: self.marked(value, mark, key="type") for name, value in switches.items()}
        return mark, (self.marked(messages, mark), self.marked(tools, mark), named)

    def free_mark(self, *values: Any) -> str:
        """Return a character that plain JSON does not contain.

        Raises:
            PromptError: it contains every noncharacter of the basic plane.
        """
        joined = "".join(itertools.chain.from_iterable(map(_strings, values)))
        for mark in NONCHARACTERS:
            if mark not in joined:
                return mark
        raise PromptError("messages: every noncharacter from U+FDD0 on; needs text without them")

    def marked(self, value: Any, mark: str, *, key: str = "") -> Any:
        """Return a copy of plain JSON with its strings and keys marked."""
        if isinstance(value, str):
            return self._mark(value, mark, free=key not in FIXED)
        if isinstance(value, Mapping):
            return {
                self._mark(str(name), mark, free=False): self.marked(item, mark, key=str(name))
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(item, mark, key=key) for item in value]
        return value

    def _mark(self, text: str, mark: str, *, free: bool) -> str:
        if not text:
            return text
        own = sorted({*self._wholes(text), *self._edges(text, free=free)})
        if not own:
            return text
        parts = (text[begin:end] for begin, end in itertools.pairwise([*own, len(text)]))
        return mark.join([text[: own[0]], *parts])

    def _wholes(self, text: str) -> Iterator[int]:
        """Yield the beginnings of control tokens' strings, overlapping ones too."""
        found = self._whole.search(text)
        while found is not None:
            yield found.start() + _spaces(found[0])
            found = self._whole.search(text, found.start() + 1)

    def _edges(self, text: str, *, free: bool) -> Iterator[int]:
        """Yield the beginnings of partial control tokens at either end, which text may complete.

        The ends are those that remain after a template strips white space.
        """
        size = self._longest
        if self._first.search(text if text[-1].isspace() else text[-size:]):
            stripped = text.rstrip()
            for n in range(1, min(len(stripped), size) + 1):
                if stripped[-n:] in self._heads:
                    yield len(stripped) - n + _spaces(stripped[-n:])
        if self._last.search(text if text[0].isspace() else text[:size]):
            begin = _spaces(text)
            for n in range(1, size):
                if text[begin : begin + n] in self._tails:
                    yield begin + _spaces(text[begin : begin + n])
        if free and len(text) < size and text.strip() and text.strip() in self._joined:
            yield _spaces(text)


def unmarked(text: str, mark: str) -> RenderedText:
    """Remove the marks from a rendered prompt."""
    parts = text.split(mark)
    ends = itertools.accumulate(map(len, parts[:-1]))
    return RenderedText(text="".join(parts), own=tuple(ends))


def _one_of(characters: set[str]) -> re.Pattern[str]:
    return re.compile("[" + "".join(map(re.escape, characters)) + "]") if characters else NOTHING


def _spaces(text: str) -> int:
    """Return the length of a text's leading white space; 0 where there is no other text."""
    return len(text) - len(text.lstrip()) if text.strip() else 0


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)

"""A model's chat template: Jinja from its folder, rendered in a sandbox as transformers does."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ninfer_pool.errors import ModelError, PromptError
from ninfer_pool.runner.config import read_optional_json

FILE, FILE_JSON, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning; templates read the first."""


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

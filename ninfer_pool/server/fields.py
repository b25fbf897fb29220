"""Fields that every dialect shares, and what they say to the pool and the template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ninfer_pool.core.namespace import MAX_SALT
from ninfer_pool.runner import Sampling
from ninfer_pool.server.calls import Control
from ninfer_pool.server.checks import Dialect, Fields, check, needs
from ninfer_pool.server.errors import invalid

MAX_STOP_CHARACTERS, MAX_HINT_CHARACTERS = 500, 500


def _no_nul(value: str) -> str:
    if "\0" in value:
        raise needs("a salt without NUL")
    return value


Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT), AfterValidator(_no_nul)]
Hint = Annotated[str, Field(max_length=MAX_HINT_CHARACTERS)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
Whole = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Switches(Fields):
    """Arguments of the template that are checked wherever they stand."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )


class Controls(Switches):
    """What a request may say in its body or in a header, in every dialect."""

    retain_prefix: bool | None = None
    allow_prefix_reuse: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Salt | None = None
    prompt_cache_key: Hint | None = None
    session_id: Hint | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    ttl_seconds: Annotated[float, Field(gt=0)] | None = None


class Body(Controls):
    """What the bodies of all dialects have beside their own fields."""

    model: str | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Fraction | None = None


def sampling(body: Body, *, temperature: float | None, **more: Any) -> Sampling:
    """Return how a request wants its tokens chosen; by default drawn as the model says.

    ``more`` are further fields of `Sampling`; None: its own default.
    """
    given = {"top_k": max(body.top_k or 0, 0), "top_p": body.top_p or None, **more}
    # Nothing but the likeliest token is within the first 0 of the probability.
    heat = 0.0 if body.top_p == 0 else 1.0 if temperature is None else temperature
    known = {name: value for name, value in given.items() if value is not None}
    return Sampling(temperature=heat, **known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What body and headers together say to the pool and to the template."""

    control: Control
    template: Mapping[str, Any]


def wishes(
    body: Body,
    headers: Mapping[str, str],
    *,
    dialect: Dialect,
    implied: Mapping[str, Any] | None = None,
) -> Wishes:
    """Join a body's fields with their twins among the headers.

    A field of the body wins over the template's arguments, these over what other fields of the
    dialect have ``implied``, and that over a header.

    Raises:
        ApiError: 400, names the header or the template's argument.
    """
    arguments = _template_arguments(body, dialect=dialect)
    fields = {name: getattr(body, name) for name in Controls.model_fields}
    said: dict[str, Any] = {}
    for source in (_from_headers(headers), implied or {}, arguments, fields):
        said.update((name, value) for name, value in source.items() if value is not None)
    others = {k: v for k, v in arguments.items() if k not in Switches.model_fields}
    return Wishes(control=_control(said), template={**others, **_switches(said)})


def _control(said: Mapping[str, Any]) -> Control:
    at_all = said.get("cache_prompt", True)
    return Control(
        read=at_all and said.get("allow_prefix_reuse", True),
        retain=at_all and said.get("retain_prefix", True),
        salt=said.get("cache_salt"),
        hint=said.get("session_id") or said.get("prompt_cache_key") or None,
        priority=said.get("priority", 0),
        ttl_seconds=said.get("ttl_seconds"),
    )


def _switches(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's switches; an effort of none means not to think."""
    found = {name: said[name] for name in Switches.model_fields if name in said}
    if found.get("reasoning_effort") == "none":
        del found["reasoning_effort"]
        found.setdefault("enable_thinking", False)
    return found


# What is no argument of a template: the server's own, and what must stand beside them.
_OURS = {"messages", "tools", "documents", "add_generation_prompt", "breakpoints", "self"}
_OURS |= Controls.model_fields.keys() - Switches.model_fields.keys()


def _template_arguments(body: Body, *, dialect: Dialect) -> dict[str, Any]:
    given, path = body.chat_template_kwargs or {}, "chat_template_kwargs"
    for name in given:
        if name in _OURS or not name.isidentifier():
            where = dialect.path((path, name[:100]))
            raise invalid(f"{where}: no argument of a template; needs another name", param=where)
    known = {name: given[name] for name in Switches.model_fields if name in given}
    check(Switches, known, dialect=dialect, within=(path,))
    return given


_HEADERS = {name: f"x-{name.replace('_', '-')}" for name in Controls.model_fields}
_BOOLS = frozenset(n for n, f in Controls.model_fields.items() if f.annotation == bool | None)
_WORDS = {"true": True, "1": True, "false": False, "0": False}


def _from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the controls that headers name, typed and checked."""
    texts = {name: headers[twin] for name, twin in _HEADERS.items() if twin in headers}
    given = {name: _typed(name, text.strip()) for name, text in texts.items()}
    check(Controls, given, dialect=Dialect(path=_header_path, unknown="{}"))
    return given


def _header_path(path: Sequence[str | int]) -> str:
    return _HEADERS[str(path[0])].title().replace("-Ttl-", "-TTL-")


def _typed(name: str, text: str) -> Any:
    """Read a header's value as JSON would write it; what cannot be read stays text."""
    if name in _BOOLS:
        return _WORDS.get(text.lower(), text)
    if name == "priority" and re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        return int(text)
    if name == "ttl_seconds" and re.fullmatch(r"[0-9]{1,20}(\.[0-9]{1,20})?", text):
        return float(text)
    return text

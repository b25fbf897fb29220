"""The parts that all dialects share: checked fields, controls of the pool, parts of messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from ninfer_pool.core.identity import MAX_SALT
from ninfer_pool.runner import Sampling
from ninfer_pool.server.chat_request import Control
from ninfer_pool.server.errors import ApiError, invalid
from ninfer_pool.server.strict_json import shown

NEEDS = "needs"
"""The type of our own errors: their message names valid values."""
MAX_STOP_CHARACTERS, MAX_HINT_CHARACTERS, MAX_BREAKPOINTS = 500, 500, 4


class StrictModel(BaseModel):
    """Named fields of one JSON object: no others, and each of its very type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=StrictModel)

# -- kinds of fields ------------------------------------------------------------------------


def needs(what: str) -> PydanticCustomError:
    """Return the error of a field that needs another value."""
    return PydanticCustomError(NEEDS, "{what}", {"what": what})


def only(allowed: Sequence[Any], *, why: str) -> AfterValidator:
    """Allow a known field these values alone, and null; others cannot be honoured."""

    def validate(value: Any) -> Any:
        if value is None or any(type(value) is type(a) and value == a for a in allowed):
            return value
        raise needs(why)

    return AfterValidator(validate)


def one_of(*kinds: str, by: str, why: str) -> Discriminator:
    """Choose among models tagged ``<kind>`` by the object's field ``by``.

    The brackets distinguish a tag from a field in an error's path.
    """

    def kind(value: Any) -> str | None:
        found = value.get(by) if isinstance(value, dict) else None
        return f"<{found}>" if isinstance(found, str) and found in kinds else None

    return Discriminator(kind, custom_error_type=NEEDS, custom_error_message=why)


Item = TypeVar("Item")
TextOrList = Annotated[str, Tag("<text>")] | Annotated[list[Item], Tag("<list>")]


def text_or_list(*, why: str) -> Discriminator:
    """Choose between the two kinds of a `TextOrList`."""
    tags: dict[type, str] = {str: "<text>", list: "<list>"}
    return Discriminator(
        lambda value: tags.get(type(value)), custom_error_type=NEEDS, custom_error_message=why
    )


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
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# -- fields of every body -------------------------------------------------------------------


class CacheControl(StrictModel):
    """A mark after which a client wants a checkpoint."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None


class Switches(StrictModel):
    """Arguments of the template that are checked in every place."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: Effort | None = None


class Controls(Switches):
    """Fields of a body or a header, in every dialect."""

    retain_prefix: bool | None = None
    allow_prefix_reuse: bool | None = None
    cache_prompt: bool | None = None
    cache_salt: Salt | None = None
    prompt_cache_key: Hint | None = None
    session_id: Hint | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    ttl_seconds: Annotated[float, Field(gt=0)] | None = None


class Body(Controls):
    """Fields of all dialects' bodies."""

    model: str | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Fraction | None = None


# -- checking -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How errors spell the path of a field, and their text for an unknown one."""

    path: Callable[[Sequence[str | int]], str]
    unknown: str

    def check(
        self, model: type[Model], data: Mapping[str, Any], *, within: Sequence[str | int] = ()
    ) -> Model:
        """Return the checked fields of ``data``, the object at the path ``within`` of a body.

        Raises:
            ApiError: 400, names the first invalid field and valid values.
        """
        try:
            return model.model_validate(data)
        except ValidationError as errors:
            first = errors.errors(include_url=False)[0]
        raise self._refusal(first, within=within)

    def _refusal(self, error: ErrorDetails, *, within: Sequence[str | int]) -> ApiError:
        unknown = error["type"] == "extra_forbidden"
        *parents, last = error["loc"]
        # A tag at the end is the branch of a value that is wrong as a whole; else an unknown field.
        steps = [each for each in parents if not _is_tag(each)]
        steps += [last] if unknown or not _is_tag(last) else []
        path = self.path([*within, *steps])
        if unknown:
            return invalid(self.unknown.format(path[:200]), param=path[:200])
        if error["type"] == "missing":
            return invalid(f"{path}: Field required", param=path)
        message = error["msg"].replace(" after validation", "")
        if error["type"] == NEEDS:
            message = f"needs {message}"
        return invalid(f"{path}: {shown(error['input'])}; {message}", param=path)

    def controls(
        self, body: Body, headers: Mapping[str, str], *, implied: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the ``control`` and ``template`` of a `ChatRequest`.

        A field of the body precedes the template's arguments, these precede the values ``implied``
        by other fields of the dialect, and those precede a header.

        Raises:
            ApiError: 400, names the header or the template's argument.
        """
        arguments = self._template_arguments(body.chat_template_kwargs or {})
        own = {name: getattr(body, name) for name in Controls.model_fields}
        given: dict[str, Any] = {}
        for source in (_from_headers(headers), implied or {}, arguments, own):
            given.update((name, value) for name, value in source.items() if value is not None)
        others = {k: v for k, v in arguments.items() if k not in Switches.model_fields}
        switches = {name: given[name] for name in Switches.model_fields if name in given}
        if switches.get("reasoning_effort") == "none":  # without effort is without thinking
            del switches["reasoning_effort"]
            switches.setdefault("enable_thinking", False)
        cached = given.get("cache_prompt", True)
        control = Control(
            read=cached and given.get("allow_prefix_reuse", True),
            retain=cached and given.get("retain_prefix", True),
            salt=given.get("cache_salt"),
            hint=given.get("session_id") or given.get("prompt_cache_key") or None,
            priority=given.get("priority", 0),
            ttl_seconds=given.get("ttl_seconds"),
        )
        return {"control": control, "template": {**others, **switches}}

    def _template_arguments(self, given: dict[str, Any]) -> dict[str, Any]:
        path = "chat_template_kwargs"
        for name in given:
            if name in _OURS or not name.isidentifier():
                where = self.path((path, name[:100]))
                text = f"{where}: no argument of a template; needs another name"
                raise invalid(text, param=where)
        known = {name: given[name] for name in Switches.model_fields if name in given}
        if known:
            self.check(Switches, known, within=(path,))
        return given


def brackets(path: Sequence[str | int]) -> str:
    """Spell a path as OpenAI does.

    >>> brackets(("messages", 0, "content"))
    'messages[0].content'
    """
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def dots(path: Sequence[str | int]) -> str:
    """Spell a path as Anthropic does.

    >>> dots(("messages", 0, "content"))
    'messages.0.content'
    """
    return ".".join(map(str, path))


OPENAI = Dialect(path=brackets, unknown="Unrecognized request argument supplied: {}")
ANTHROPIC = Dialect(path=dots, unknown="{}: Extra inputs are not permitted")


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Raises:
        ApiError: 400; no JSON as `strict_json` reads it, an empty body or another value.
    """
    if not body.strip():
        raise invalid("body: empty; needs a JSON object")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"body: {error}; needs a JSON object") from None
    if not isinstance(value, dict):
        raise invalid(f"body: {shown(value)}; needs a JSON object")
    return value


def _is_tag(step: str | int) -> bool:
    return isinstance(step, str) and step.startswith("<") and step.endswith(">")


# -- values ---------------------------------------------------------------------------------

_SAMPLED = [each.name for each in fields(Sampling)]
_checked_sampling = lru_cache(maxsize=256)(Sampling)
"""One checked value per settings: a client sends the same with each request."""


def sampling(body: Body) -> Sampling:
    """Return how a request's tokens are chosen; by default drawn from the model's distribution."""
    given = {name: getattr(body, name, None) for name in _SAMPLED}
    given |= {"top_k": max(body.top_k or 0, 0), "top_p": body.top_p or None}
    known = {name: value for name, value in given.items() if value is not None}
    # Only the likeliest token is within the first 0 of the probability.
    heat = 0.0 if body.top_p == 0 else known.get("temperature", 1.0)
    return _checked_sampling(**{**known, "temperature": heat})


# Names that are no arguments of a template: the server's own, and fields of a body.
_OURS = {"messages", "tools", "documents", "add_generation_prompt", "breakpoints", "self"}
_OURS |= Controls.model_fields.keys() - Switches.model_fields.keys()


_HEADERS = {name: f"x-{name.replace('_', '-')}" for name in Controls.model_fields}
_BOOLS = frozenset(n for n, f in Controls.model_fields.items() if f.annotation == bool | None)
_WORDS = {"true": True, "1": True, "false": False, "0": False}


def _from_headers(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the controls that headers name, typed and checked."""
    texts = {name: headers[twin] for name, twin in _HEADERS.items() if twin in headers}
    given = {name: _typed(name, text.strip()) for name, text in texts.items()}
    if given:
        Dialect(path=_header_path, unknown="{}").check(Controls, given)
    return given


def _header_path(path: Sequence[str | int]) -> str:
    return _HEADERS[str(path[0])].title().replace("-Ttl-", "-TTL-")


def _typed(name: str, text: str) -> Any:
    """Return a header's value as JSON would write it; other text stays text."""
    if name in _BOOLS:
        return _WORDS.get(text.lower(), text)
    if name == "priority" and re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        return int(text)
    if name == "ttl_seconds" and re.fullmatch(r"[0-9]{1,20}(\.[0-9]{1,20})?", text):
        return float(text)
    return text


# -- messages -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a message's text, and whether a breakpoint is at its end."""

    text: str
    marked: bool = False


@dataclass(slots=True, kw_only=True)
class MessageParts:
    """A message in parts; ``end_marks`` more breakpoints are at its end."""

    role: str
    parts: Sequence[Part]
    more: dict[str, Any] = field(default_factory=dict)
    end_marks: int = 0
    origin: int = 0
    """The index of the client's message that it is from; -1: the system text."""


def conversation(
    messages: Sequence[MessageParts], *, marked_tools: Iterable[int]
) -> dict[str, Any]:
    """Return the ``messages`` and ``breakpoints`` of a `ChatRequest`, those of tools first.

    A message's parts become one string unless a breakpoint is between them.

    Raises:
        ApiError: 400; too many breakpoints.
    """
    points, plain = [(-1, index) for index in marked_tools], list[dict[str, Any]]()
    count = len(points)
    for number, message in enumerate(messages):
        parts = message.parts
        marked = [index for index, part in enumerate(parts) if part.marked]
        count += len(marked) + message.end_marks
        content: str | list[dict[str, str]] = "".join(part.text for part in parts)
        last = 0
        if any(index < len(parts) - 1 for index in marked):
            content = [{"type": "text", "text": part.text} for part in parts]
            last = len(parts) - 1
        elif marked:
            marked = [0]
        points += [(number, index) for index in marked]
        points += [(number, last)] if message.end_marks else []
        plain.append({"role": message.role, "content": content, **message.more})
    if count > MAX_BREAKPOINTS:
        raise invalid(
            f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided. "
            f"Found {count}.",
            param="cache_control",
        )
    return {"messages": tuple(plain), "breakpoints": tuple(sorted(set(points)))}

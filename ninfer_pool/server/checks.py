"""How a body's fields are checked, and what a refusal says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ninfer_pool.server.errors import ApiError, invalid
from ninfer_pool.server.strict_json import shown

NEEDS = "needs"
"""The type of our own errors: their message says what would be right."""


class Fields(BaseModel):
    """Named fields of one JSON object: no others, and each of its very type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Fields)


def needs(what: str) -> PydanticCustomError:
    """Make the error of a field's check."""
    return PydanticCustomError(NEEDS, "{what}", {"what": what})


def only(allowed: Sequence[Any], *, why: str) -> AfterValidator:
    """Allow a known field these values alone, and null; others cannot be honoured."""

    def validate(value: Any) -> Any:
        if value is None or any(type(value) is type(a) and value == a for a in allowed):
            return value
        raise needs(why)

    return AfterValidator(validate)


def one_of(*kinds: str, by: str, why: str) -> Discriminator:
    """Choose among models tagged ``<kind>`` by what the object's field ``by`` says.

    The brackets tell a tag from a field in an error's path.
    """

    def kind(value: Any) -> str | None:
        said = value.get(by) if isinstance(value, dict) else None
        return f"<{said}>" if isinstance(said, str) and said in kinds else None

    return Discriminator(kind, custom_error_type=NEEDS, custom_error_message=why)


def text_or_list(*, why: str) -> Discriminator:
    """Choose between what is tagged ``<text>``, a string, and ``<list>``."""
    return Discriminator(_text_or_list, custom_error_type=NEEDS, custom_error_message=why)


def _text_or_list(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How errors spell the path of a field, and what they say of one that is not known."""

    path: Callable[[Sequence[str | int]], str]
    unknown: str


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


def check(
    model: type[Model],
    data: Mapping[str, Any],
    *,
    dialect: Dialect,
    within: Sequence[str | int] = (),
) -> Model:
    """Return the checked fields of ``data``, which lies at the path ``within`` of a body.

    Raises:
        ApiError: 400, names the first field at fault and what would be right.
    """
    try:
        return model.model_validate(data)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
    raise _refusal(first, dialect=dialect, within=within)


def _refusal(error: ErrorDetails, *, dialect: Dialect, within: Sequence[str | int]) -> ApiError:
    unknown = error["type"] == "extra_forbidden"
    *parents, last = error["loc"]
    # A tag at the end names the branch of what is wrong as a whole, an unknown field itself.
    steps = [each for each in parents if not _is_tag(each)]
    steps += [last] if unknown or not _is_tag(last) else []
    path = dialect.path([*within, *steps])
    if unknown:
        return invalid(dialect.unknown.format(path[:200]), param=path[:200])
    if error["type"] == "missing":
        return invalid(f"{path}: Field required", param=path)
    message = error["msg"].replace(" after validation", "")
    if error["type"] == NEEDS:
        message = f"needs {message}"
    return invalid(f"{path}: {shown(error['input'])}; {message}", param=path)


def _is_tag(step: str | int) -> bool:
    return isinstance(step, str) and step.startswith("<") and step.endswith(">")

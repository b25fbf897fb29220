"""JSON read strictly: what is doubtful, and what a prompt could not hold, is refused."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ninfer_pool.server.errors import invalid

MAX_DEPTH = 100
"""Lists and objects within each other; a template and a tool's schema need far fewer."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def loads(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: no JSON, or a key twice, a number that is not finite, text that is no valid
            Unicode, or more than `MAX_DEPTH` levels.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(value)
    # Only an escape can spell half a character.
    if "\\u" in text:
        _check_text(value)
    return value


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that is a request's body.

    Raises:
        ApiError: 400; as `loads`, or a body that is empty, not UTF-8, or another value.
    """
    if not body.strip():
        raise invalid("body: empty; needs a JSON object")
    try:
        value = loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid(f"body: byte {error.start} is not UTF-8; needs a JSON object") from None
    except ValueError as error:
        raise invalid(f"body: {error}; needs a JSON object") from None
    if not isinstance(value, dict):
        raise invalid(f"body: {shown(value)}; needs a JSON object")
    return value


def read_text_object(text: str) -> dict[str, Any] | None:
    """Return the object that a JSON text inside another holds, or None where it holds none."""
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def shown(value: object) -> str:
    """Show a value in a message, however large it is."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "[]"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else repr(value[:57]) + "..."
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an int of more than 64 bits"
    return json.dumps(value)


_TOO_DEEP = f"more than {MAX_DEPTH} levels deep"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(twice)} is there twice")
    return value


def _constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {shown(text)} is too large")
    return value


def _int(text: str) -> int:
    if len(text) > 1000:
        raise ValueError(f"number {shown(text)} is too large")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_constant, parse_float=_float, parse_int=_int
)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_depth(value: Any) -> None:
    """Go down level by level, since a value this deep could overflow whoever recurses into it."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for each in level for item in _items(each) if isinstance(item, dict | list)]
        if not level:
            return
    raise ValueError(_TOO_DEEP)


def _check_text(value: Any, path: str = "") -> None:
    if isinstance(value, str) and _SURROGATE.search(value):
        raise ValueError(f"{path or 'text'}: half of a surrogate pair, which is no character")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_text(key, path=f"a key of {path}" if path else "a key")
            _check_text(item, path=f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_text(item, path=f"{path}[{index}]")

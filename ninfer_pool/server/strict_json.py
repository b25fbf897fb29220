"""JSON of requests and of a model's calls of tools: read by pydantic, strictly.

Rejected are numbers that are no JSON, text that is no valid Unicode, and more than about 200
levels. Of a key that is written twice the last value counts.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: not JSON as strict as this module reads it.
    """
    return from_json(text, allow_inf_nan=False)


def read_text_object(text: str) -> dict[str, Any] | None:
    """Return the object that a JSON text inside another contains, or None."""
    try:
        value = loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def shown(value: object) -> str:
    """Return a short text for a value of any size, for a message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}" if value else "[]"
    if isinstance(value, str):
        return repr(value) if len(value) <= 60 else repr(value[:57]) + "..."
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an int of more than 64 bits"
    return json.dumps(value)

"""Calls of tools in a model's text: in Qwen's form with tags, and in Hermes' with JSON."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ninfer_pool.server.chat_request import ToolCall
from ninfer_pool.server.strict_json import loads, read_text_object

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END = re.compile(r"<function=([^<>\n]+)>"), "</function>"
# A value may contain its closing tag: it ends where another parameter or nothing follows.
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL
)


class ToolCalls:
    """Parses calls of a request's tools, as OpenAI describes them."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        functions = [tool["function"] for tool in tools]
        self._schemas = {each["name"]: _properties(each.get("parameters")) for each in functions}

    def read(self, inner: str) -> ToolCall | None:
        """Return the call between the two markers, or None where there is no valid call."""
        inner = inner.strip()
        found = _hermes(inner) if inner.startswith("{") else self._qwen(inner)
        if found is None:
            return None
        name, arguments = found
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:  # a number too large for JSON
            return None
        return ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=text)

    def _qwen(self, inner: str) -> tuple[str, dict[str, Any]] | None:
        function = _FUNCTION.match(inner)
        if function is None or not inner.endswith(_END):
            return None
        name, rest = function[1], inner[function.end() : -len(_END)].strip()
        schema = self._schemas.get(name, {})
        arguments: dict[str, Any] = {}
        position = 0
        while position < len(rest):
            parameter = _PARAMETER.match(rest, position)
            if parameter is None or parameter[1] in arguments:
                return None
            arguments[parameter[1]] = _typed(parameter[2], schema.get(parameter[1]))
            position = parameter.end()
        return name, arguments


def unfinished(inner: str) -> bool:
    """Return whether an invalid call may continue after a closing marker in one of its values.

    >>> unfinished('{"name": "write", "arguments": {"text": "ends with ')
    True
    """
    inner = inner.strip()
    if inner.startswith("<function="):
        return not inner.endswith(_END)
    try:
        json.loads(inner)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except (ValueError, RecursionError):
        return False
    return False


def _hermes(inner: str) -> tuple[str, dict[str, Any]] | None:
    call = read_text_object(inner)
    if call is None or not call.keys() <= {"name", "arguments"}:
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if isinstance(arguments, str):  # JSON in JSON
        arguments = read_text_object(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, arguments


def _properties(parameters: Any) -> Mapping[str, Any]:
    found = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _typed(text: str, schema: Any) -> Any:
    """Return a parameter's value: a string unchanged, any other as JSON where it is valid JSON."""
    types = _types(schema)
    if "string" in types and not (text == "null" and "null" in types):
        return text
    try:
        return loads(text)
    except ValueError:
        return text


def _types(schema: Any) -> set[str]:
    """Return the types that a schema names as allowed."""
    if not isinstance(schema, Mapping):
        return set()
    named, choices = schema.get("type"), schema.get("enum")
    types = {each for each in _listed(named) if isinstance(each, str)}
    if named is None:
        types |= {"string" for each in _listed(choices) if isinstance(each, str)}
    for option in (*_listed(schema.get("anyOf")), *_listed(schema.get("oneOf"))):
        types |= _types(option)
    return types


def _listed(value: Any) -> list[Any]:
    """Return a list as it is, a string as a list of one, and no items for other values."""
    if isinstance(value, list):
        return value
    return [value] if isinstance(value, str) else []

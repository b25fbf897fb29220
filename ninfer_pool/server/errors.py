"""Errors of a request, and their bodies in each dialect of HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from ninfer_pool.errors import ModelError, PoolError

CONTEXT_EXCEEDED = "context_length_exceeded"

# Anthropic's type, OpenAI's type and OpenAI's code of each status.
_TYPES: dict[int, tuple[str, str, str | None]] = {
    400: ("invalid_request_error", "invalid_request_error", None),
    401: ("authentication_error", "authentication_error", "invalid_api_key"),
    403: ("permission_error", "permission_error", None),
    404: ("not_found_error", "invalid_request_error", "not_found"),
    409: ("conflict_error", "invalid_request_error", "conflict"),
    413: ("request_too_large", "invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
    503: ("overloaded_error", "server_error", "overloaded"),
}
_REQUEST_FAULT, _SERVER_FAULT = _TYPES[400], ("api_error", "server_error", None)
_BUSY, _BUSY_TO_ANTHROPIC = 503, 529
# The path of a field at the start of a message, as this package's errors have it.
_FIELD = re.compile(r"[A-Za-z_][\w.\[\]]*(?=: )")


class ApiError(PoolError):
    """A request that is refused or failed, for any dialect.

    Args:
        status: of HTTP, 400 to 599.
        message: names the field, its value and what would be right.
        kind: the type in OpenAI's body; None: the status's. Anthropic's body has the status's.
        param: the path of the invalid field, in OpenAI's body.
        code: a word for programs, in OpenAI's body; None: the status's.
        details: fields that Anthropic's clients read to recover.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        fallback = _REQUEST_FAULT if status < 500 else _SERVER_FAULT
        self._anthropic_kind, openai_kind, openai_code = _TYPES.get(status, fallback)
        self.status = status
        self.message = message
        self.kind = kind or openai_kind
        self.param = param
        self.code = code or openai_code
        self.details = details

    @classmethod
    def of(cls, error: PoolError) -> ApiError:
        """Turn an error of the package into an answer: the request's fault, or the model's."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, ModelError):
            return cls(500, str(error))
        field = _FIELD.match(str(error))
        return cls(400, str(error), param=field.group() if field else None)

    def openai(self) -> dict[str, Any]:
        """Return the body as OpenAI's clients read it."""
        fields = {"type": self.kind, "param": self.param, "code": self.code}
        return {"error": {"message": self.message, **fields}}

    def anthropic(self) -> dict[str, Any]:
        """Return the body as Anthropic's clients read it."""
        details = {} if self.details is None else {"details": self.details}
        error = {"type": self._anthropic_kind, "message": self.message, **details}
        return {"type": "error", "error": error}


def error_response(
    error: ApiError, path: str, *, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the answer for an error, in the dialect of the path."""
    if not path.startswith("/v1/messages"):
        return JSONResponse(error.openai(), error.status, headers)
    status = _BUSY_TO_ANTHROPIC if error.status == _BUSY else error.status
    return JSONResponse(error.anthropic(), status, headers)


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the error for a request that is wrong in itself."""
    return ApiError(400, message, param=param, code=code)


def context_exceeded(
    *, prompt_tokens: int, max_tokens: int, context: int, param: str = "messages"
) -> ApiError:
    """Make the error for a request that its model's context cannot hold.

    Agents look for "prompt is too long: N tokens > M maximum" before they compact a
    conversation.
    """
    message = (
        f"prompt is too long: {prompt_tokens + max_tokens} tokens > {context} maximum: "
        f"{prompt_tokens} of the prompt and {max_tokens} to generate; this model's maximum "
        f"context length is {context} tokens"
    )
    return invalid(message, param=param, code=CONTEXT_EXCEEDED)

"""What is refused looks as each dialect's clients expect."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ninfer_pool.errors import ConfigError, ModelError, NamespaceError, PromptError
from ninfer_pool.server.errors import ApiError, context_exceeded, error_response, invalid
from tests.server.clients import client_of


@pytest.mark.parametrize(
    ("status", "kind", "anthropic_kind", "code"),
    [
        (400, "invalid_request_error", "invalid_request_error", None),
        (401, "authentication_error", "authentication_error", "invalid_api_key"),
        (403, "permission_error", "permission_error", None),
        (404, "invalid_request_error", "not_found_error", "not_found"),
        (405, "invalid_request_error", "invalid_request_error", None),
        (409, "invalid_request_error", "conflict_error", "conflict"),
        (413, "invalid_request_error", "request_too_large", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error", "rate_limit_exceeded"),
        (500, "server_error", "api_error", None),
        (501, "server_error", "api_error", None),
        (503, "server_error", "overloaded_error", "overloaded"),
    ],
)
def test_a_status_has_a_type_in_each_dialect(
    status: int, kind: str, anthropic_kind: str, code: str | None
) -> None:
    error = ApiError(status, "no")
    told = {"message": "no", "type": kind, "param": None, "code": code}
    assert error.openai() == {"error": told}
    told_there = {"type": anthropic_kind, "message": "no"}
    assert error.anthropic() == {"type": "error", "error": told_there}
    assert error_response(error, "/v1/models").status_code == status


def test_only_anthropic_has_a_status_of_its_own_for_a_busy_server() -> None:
    busy = ApiError(503, "full")
    assert error_response(busy, "/v1/messages").status_code == 529
    assert error_response(ApiError(500, "broken"), "/v1/messages").status_code == 500


def test_what_is_said_of_an_error_wins_over_what_its_status_says() -> None:
    error = ApiError(404, "no such", kind="nothing", param="model", code="model_not_found")
    told = {"message": "no such", "type": "nothing", "param": "model", "code": "model_not_found"}
    assert error.openai()["error"] == told
    assert error.anthropic()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (PromptError("max_tokens: 0; needs an int of 1 or more"), 400, "max_tokens"),
        (PromptError("stop_strings[2]: ''; needs text"), 400, "stop_strings[2]"),
        (NamespaceError("salt: 200 characters; needs 1 to 128"), 400, "salt"),
        (ConfigError("no field is named here"), 400, None),
        (ModelError("logits: the highest is nan"), 500, None),
    ],
)
def test_what_the_package_raises_becomes_an_answer(
    error: Any, status: int, param: str | None
) -> None:
    found = ApiError.of(error)
    assert (found.status, found.param, found.message) == (status, param, str(error))


def test_an_answer_stays_as_it_is() -> None:
    error = invalid("no")
    assert ApiError.of(error) is error


def test_a_prompt_too_long_says_so_in_words_that_agents_know() -> None:
    error = context_exceeded(prompt_tokens=4000, max_tokens=200, context=4096)
    assert error.openai()["error"]["code"] == "context_length_exceeded"
    assert error.status == 400
    found = re.search(r"prompt is too long.*?(\d+) tokens > (\d+)", error.message)
    assert found is not None
    assert found.groups() == ("4200", "4096")
    assert "maximum context length is 4096 tokens" in error.message


@pytest.mark.parametrize("status", [400, 401, 403, 404, 429, 500])
def test_the_official_clients_read_the_errors(status: int) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    error = ApiError(status, "told so", param="p")
    refused = pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="told so")
    with client_of(openai.OpenAI, status=status, json=error.openai()) as client, refused:
        client.chat.completions.create(model="m", messages=[])
    with client_of(anthropic.Anthropic, status=status, json=error.anthropic()) as client, refused:
        client.messages.create(model="m", messages=[], max_tokens=1)

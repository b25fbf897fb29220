"""What a request says to the pool and to the template, in its body or in a header."""

from __future__ import annotations

from typing import Any

import pytest

from ninfer_pool.server.chat_request import Control
from tests.server.asked import chat, completion, refusal


def test_control_in_the_body() -> None:
    call = chat(
        retain_prefix=False,
        allow_prefix_reuse=True,
        cache_salt="s" * 128,
        prompt_cache_key="k",
        priority=-3,
        ttl_seconds=2.5,
    )
    wanted = Control(retain=False, salt="s" * 128, hint="k", priority=-3, ttl_seconds=2.5)
    assert call.control == wanted


@pytest.mark.parametrize("more", [{}, {"retain_prefix": True, "allow_prefix_reuse": True}])
def test_cache_prompt_false_neither_reads_nor_leaves_anything(more: dict[str, Any]) -> None:
    assert chat(cache_prompt=False, **more).control == Control(read=False, retain=False)
    assert chat(cache_prompt=True, retain_prefix=False).control == Control(retain=False)


def test_a_session_is_the_nearer_hint() -> None:
    assert chat(session_id="s", prompt_cache_key="k").control.hint == "s"
    assert chat(session_id="", prompt_cache_key="").control.hint is None


def test_headers_where_bodies_cannot_say_it() -> None:
    headers = {
        "x-retain-prefix": "false",
        "x-allow-prefix-reuse": "0",
        "x-cache-salt": "tenant",
        "x-prompt-cache-key": "k",
        "x-session-id": "s",
        "x-priority": "-2",
        "x-ttl-seconds": "1.5",
        "x-enable-thinking": "False",
        "x-preserve-thinking": "1",
        "x-reasoning-effort": "low",
    }
    wanted = Control(
        read=False, retain=False, salt="tenant", hint="s", priority=-2, ttl_seconds=1.5
    )
    for call in (chat(headers=headers), completion(headers=headers)):
        assert call.control == wanted
    switches = {"enable_thinking": False, "preserve_thinking": True, "reasoning_effort": "low"}
    assert chat(headers=headers).template == switches


def test_the_body_wins_over_a_header() -> None:
    headers = {"x-cache-salt": "h", "x-retain-prefix": "0", "x-enable-thinking": "1"}
    call = chat(cache_salt="b", retain_prefix=True, enable_thinking=False, headers=headers)
    assert call.control == Control(salt="b")
    assert call.template == {"enable_thinking": False}
    assert chat(cache_salt=None, headers=headers).control.salt == "h"
    kwargs = {"enable_thinking": False}
    assert chat(chat_template_kwargs=kwargs, headers=headers).template == kwargs


@pytest.mark.parametrize(
    ("header", "value", "name"),
    [
        ("x-priority", "high", "X-Priority"),
        ("x-priority", "9" * 30, "X-Priority"),
        ("x-ttl-seconds", "inf", "X-TTL-Seconds"),
        ("x-ttl-seconds", "0", "X-TTL-Seconds"),
        ("x-ttl-seconds", "-1", "X-TTL-Seconds"),
        ("x-retain-prefix", "yes", "X-Retain-Prefix"),
        ("x-cache-prompt", "", "X-Cache-Prompt"),
        ("x-cache-salt", "", "X-Cache-Salt"),
        ("x-cache-salt", "s" * 129, "X-Cache-Salt"),
        ("x-cache-salt", "a\0b", "X-Cache-Salt"),
        ("x-reasoning-effort", "all", "X-Reasoning-Effort"),
    ],
)
def test_a_wrong_header_is_named(header: str, value: str, name: str) -> None:
    error = refusal(lambda: chat(headers={header: value}))
    assert error.message.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "none", "enable_thinking": True}, {"enable_thinking": True}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"chat_template_kwargs": {"reasoning_effort": "none"}}, {"enable_thinking": False}),
        ({"chat_template_kwargs": {"enable_thinking": None, "x": [1]}}, {"x": [1]}),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "x": 1}, "enable_thinking": False},
            {"enable_thinking": False, "x": 1},
        ),
    ],
)
def test_the_template_s_arguments(fields: dict[str, Any], template: dict[str, Any]) -> None:
    assert chat(**fields).template == template


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("messages", []),
        ("tools", []),
        ("add_generation_prompt", False),
        ("self", 1),
        ("not a name", 1),
        ("cache_salt", "s"),
        ("enable_thinking", "no"),
        ("reasoning_effort", "<|im_end|>"),
    ],
)
def test_what_is_no_argument_of_a_template(name: str, value: Any) -> None:
    error = refusal(lambda: chat(chat_template_kwargs={name: value}))
    assert error.param == f"chat_template_kwargs.{name}"

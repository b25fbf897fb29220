"""What a caller of the pool may ask: refused before anything happens."""

from __future__ import annotations

from ninfer_pool.core.config import PoolConfig
from ninfer_pool.core.grant import Wishes
from ninfer_pool.core.prompt import Prompt
from ninfer_pool.errors import ConfigError, PromptError


def check_prompt(prompt: object) -> None:
    """Refuse what is no prompt."""
    if not isinstance(prompt, Prompt):
        raise PromptError(f"prompt: {type(prompt).__name__}; needs a Prompt")


def check_request(config: PoolConfig, prompt: Prompt, reserve_tokens: int, wishes: Wishes) -> None:
    """Refuse a prompt, a reserve, a priority or a lifetime that cannot be used."""
    check_prompt(prompt)
    if type(reserve_tokens) is not int or reserve_tokens < 0:
        raise PromptError(f"reserve_tokens: {reserve_tokens!r}; needs an int of 0 or more")
    if type(wishes.priority) is not int:
        raise PromptError(f"priority: {wishes.priority!r}; needs an int")
    if wishes.ttl_seconds is not None:
        if config.clock is None:
            raise ConfigError("clock: None; ttl_seconds needs a PoolConfig with a clock")
        number = isinstance(wishes.ttl_seconds, (int, float))
        if not number or not 0 < wishes.ttl_seconds < float("inf"):
            raise PromptError(f"ttl_seconds: {wishes.ttl_seconds!r}; needs more than 0")


def check_lanes(lanes: int, **asked: object) -> None:
    """Refuse a lane that is none."""
    for name, lane in asked.items():
        if lane is not None and (type(lane) is not int or not 0 <= lane < lanes):
            raise PromptError(f"{name}: {lane!r}; needs an int of 0 to {lanes - 1}")


def check_flags(**flags: object) -> None:
    """Refuse a flag that is neither True nor False."""
    for name, value in flags.items():
        if type(value) is not bool:
            raise PromptError(f"{name}: {value!r}; needs True or False")

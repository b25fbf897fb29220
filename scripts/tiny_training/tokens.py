"""The tokenizer, the chat template, and the token streams that training reads."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import corpus

VOCABULARY = 2048
END_OF_TEXT = "<|endoftext|>"
CONTROL = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)


def train_tokenizer(text: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `VOCABULARY` tokens; the special ones come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[
            *(AddedToken(name, special=True, normalized=False) for name in CONTROL),
            *(AddedToken(name, special=False, normalized=False) for name in MARKERS),
        ],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\f"), trainer)
    # Decoding a chat with special tokens left out must still show where thought ends.
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return Tokenizer.from_str(json.dumps(state))


class ChatTemplate:
    """Renders messages as transformers' `apply_chat_template` does."""

    def __init__(self, path: Path) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _raise
        self._template = environment.from_string(path.read_text("utf-8"))

    def __call__(self, messages: list[dict[str, object]], **switches: Any) -> str:
        return self._template.render(messages=messages, **switches)


def _raise(message: str) -> None:
    raise ValueError(message)


def prose_stream(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """Return the text as one array of tokens, chapters parted by the end-of-text token."""
    end: Any = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(text.split("\f")):
        ids += [*encoding.ids, end]
    return np.array(ids, dtype=np.int64)


def chat_rows(
    tokenizer: Tokenizer, template: ChatTemplate, text: str, *, seed: int, count: int
) -> list[np.ndarray]:
    """Return `count` conversations made from the text, each as tokens, an end of text behind."""
    rng = random.Random(seed)
    rendered = []
    for _ in range(count):
        messages = corpus.chat(text, rng)
        tools = [corpus.FIND_TEXT] if any("tool_calls" in m for m in messages) else None
        keep = rng.random() < 0.3
        chat = template(messages, tools=tools, preserve_thinking=keep).rstrip("\n")
        rendered.append(chat + END_OF_TEXT)
    encodings = tokenizer.encode_batch(rendered)
    return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

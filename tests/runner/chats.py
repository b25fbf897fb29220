"""Chat templates of several kinds, each with a small tokenizer of its own, to ask prompts of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import strategies as st
from tokenizers import AddedToken

from ninfer_pool.runner import TINY, Chat, Rendered, Tokenizer
from ninfer_pool.runner.chat_template import ChatTemplate

DATA = Path(__file__).resolve().parents[1] / "data"
THINKING = ["<think>", "</think>", "<tool_response>", "</tool_response>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HEADERS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
INSTRUCTIONS = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}
    {%- else %}{{ ' ' ~ message.content ~ '</s>' }}{% endif %}
{%- endfor %}"""
WORDS = """{%- for message in messages %}
    {{- message.role | capitalize ~ ': ' ~ message.content ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"""
WHOLE = ("stripping", "prefixing")
"""Tokenizers whose prompts are encoded as a whole."""
KINDS = ("shipped", "chatml", "headers", "instructions", "words")
"""Those that every rule about boundaries and text is tried on."""


FRAGMENTS = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|eot_id|>",
        "[INST]",
        "[/INST]",
        "<",
        "|>",
        "<tool_response>",
    ),
    *("assistant\n", "Assistant: ", "<think>", "</think>", "\n", " ", "a", "é", "e\u0301"),
)
FRAGMENTED = st.lists(st.sampled_from(FRAGMENTS), max_size=6).map("".join)
PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | FRAGMENTED
"""Texts that look like a template's, and any others."""


def byte_tokenizer(special: Sequence[Any], plain: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """One token a byte and a few merges, one of them of two line feeds."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("Ċ", "Ċ"), ("<", "|"), ("Ġ", "Ġ")]
    vocabulary |= {a + b: len(letters) + i for i, (a, b) in enumerate(merges)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(list(special))
    inner.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return inner


def by_lines() -> tokenizers.Tokenizer:
    """A tokenizer that keeps line feeds together whatever follows, as Llama's and Qwen's do."""
    inner = byte_tokenizer(HEADERS)
    lines = tokenizers.Regex(r" ?\p{L}+|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s| ?[^\s\p{L}\p{N}]+")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(lines, behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return inner


def composing() -> tokenizers.Tokenizer:
    """A tokenizer that composes characters first, as Qwen's does."""
    inner = byte_tokenizer(CHATML, THINKING)
    inner.normalizer = tokenizers.normalizers.NFC()
    return inner


def stripping() -> tokenizers.Tokenizer:
    """A tokenizer whose control tokens take white space beside them: no hard edges."""
    return byte_tokenizer(
        [AddedToken(text, special=True, rstrip=True) for text in CHATML], THINKING
    )


def prefixing() -> tokenizers.Tokenizer:
    """A tokenizer that puts a space before the first word alone."""
    inner = byte_tokenizer(CHATML, THINKING)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Metaspace(replacement="_", prepend_scheme="first"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return inner


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Return a tokenizer and its chat template."""
    if kind == "shipped":
        found = Tokenizer.load(TINY)
        assert found is not None
        return found
    sources = {
        "headers": ((DATA / "role_headers.jinja").read_text("utf-8"), by_lines()),
        "instructions": (INSTRUCTIONS, byte_tokenizer(["<s>", "</s>", "[INST]", "[/INST]"])),
        "words": (WORDS, byte_tokenizer(["<s>", "</s>"])),
    }
    chatml = (DATA / "chatml_thinking.jinja").read_text("utf-8")
    makers = {"chatml": composing, "stripping": stripping, "prefixing": prefixing}
    source, inner = (chatml, makers[kind]()) if kind in makers else sources[kind]
    begin = {"headers": "<|begin_of_text|>", "instructions": "<s>"}.get(kind, "")
    return Tokenizer(inner, chat_template=ChatTemplate(source, variables={"bos_token": begin}))


@cache
def chat(kind: str) -> Chat:
    """Return a chat that keeps what it has seen."""
    return Chat(tokenizer(kind))


def heads(kind: str, ask: Rendered) -> list[tuple[str, str]]:
    """The kind of each boundary and all text before it."""
    tokens = ask.tokens
    return [(name, told(kind, tokens[:position])) for position, name in ask.boundaries]


def told(kind: str, tokens: Any) -> str:
    """The text of tokens, control tokens written out."""
    return tokenizer(kind).decode(map(int, tokens), skip_special=False)


def rendered(kind: str, messages: Sequence[Any], **options: Any) -> str:
    """The text of a prompt as the template alone writes it."""
    return tokenizer(kind).render(messages, add_generation_prompt=True, **options)


def user(text: Any) -> dict[str, Any]:
    """A user's message."""
    return {"role": "user", "content": text}


def says(text: Any, **more: Any) -> dict[str, Any]:
    """An assistant's message."""
    return {"role": "assistant", "content": text, **more}


def calls(name: str, arguments: Any, **more: Any) -> dict[str, Any]:
    """An assistant's message that calls a tool."""
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    return says(None, tool_calls=[call], **more)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool's schema."""
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}

"""Text to token ids and back: a model's ``tokenizer.json`` and its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from ninfer_pool.errors import ModelError
from ninfer_pool.runner.chat_template import ChatTemplate
from ninfer_pool.runner.encoder import encode

FILE = "tokenizer.json"


class Tokenizer:
    """A thin wrapper over a `tokenizers.Tokenizer`.

    Special tokens written in a text (``<|im_end|>``) become their ids; none is added.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, *, chat_template: ChatTemplate | None = None
    ) -> None:
        self._inner = inner
        self.chat_template = chat_template
        added = inner.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        """The ids that `decode` leaves out."""

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """Read a Hugging Face folder's tokenizer, or return None where it has none.

        Raises:
            ModelError: a ``tokenizer.json`` or a chat template that cannot be read.
        """
        path = Path(folder, FILE)
        if not path.is_file():
            return None
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ModelError(f"{FILE}: {error}; needs a tokenizer's JSON") from None
        return cls(inner, chat_template=ChatTemplate.load(folder))

    @property
    def inner(self) -> tokenizers.Tokenizer:
        """The tokenizer that this one wraps; leave it unchanged."""
        return self._inner

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, the special ones included."""
        return int(self._inner.get_vocab_size())

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that the folder names as the end, or None."""
        template = self.chat_template
        name = template.variables.get("eos_token") if template is not None else None
        return None if name is None else self.token_id(name)

    def token_id(self, token: str) -> int | None:
        """Return the id of one token as the vocabulary spells it, or None."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; O(length)."""
        ids: list[int] = encode(self._inner, text).ids
        return ids

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._inner.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """Return a `TextStream`, which decodes one token at a time."""
        return TextStream(self, self._inner, skip_special=skip_special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **arguments: Any,
    ) -> str:
        """Return the text of a conversation; see `ChatTemplate.render`.

        Raises:
            ModelError: the folder has no chat template.
            PromptError: the template rejects the messages.
        """
        if self.chat_template is None:
            raise ModelError("chat_template: none; needs a folder with chat_template.jinja")
        return self.chat_template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **arguments
        )


class TextStream:
    """Decodes tokens one after the other and never splits a character.

    The results of `push` and `finish`, joined, equal `Tokenizer.decode` of all tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, inner: tokenizers.Tokenizer, *, skip_special: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._inner = inner
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._tokens: list[int] = []
        self._sent = 0

    def push(self, token: int) -> str:
        """Add one token and return the text that no later token can change, often empty."""
        self._tokens.append(token)
        text = self._stream.step(self._inner, token) or ""
        self._sent += len(text)
        return text

    def finish(self) -> str:
        """Return the held-back text: the bytes of a character that never became whole."""
        whole = self._tokenizer.decode(self._tokens, skip_special=self._skip_special)
        rest = whole[self._sent :]
        self._sent = len(whole)
        return rest

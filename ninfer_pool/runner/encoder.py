"""A rendered prompt to tokens, where text that was encoded before costs next to nothing.

Added tokens (``<|im_end|>``, ``<think>``) are hard edges: `tokenizers` splits a text at them first
and treats each stretch between two of them alone. So the stretches are encoded one by one and
remembered, and the parts joined are what the whole text encodes to.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import tokenizers

MEMORY_BYTES = 16 << 20
"""Bytes of remembered stretches, text and ids, that an `Encoder` holds at most."""
PROBES = ("a", " a", "a ", "é", "e\u0301", "\n", " ", "▁", "A b")
"""Texts next to an added token: encoded alone they must give the same ids."""


NOTHING = re.compile(r"(?!)")


def encode(inner: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """Encode a text, no token added, while other threads run: `encode` alone would block them."""
    return inner.encode_batch([text], add_special_tokens=False)[0]


def any_of(strings: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of any of the strings, the longest where several begin at one place."""
    ordered = sorted(set(strings), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedText:
    """A template's output, and the positions of characters known to be the request's own."""

    text: str
    own: tuple[int, ...] = ()

    def is_own(self, begin: int, end: int) -> bool:
        """Return whether the request wrote a character in there that could be a control token's."""
        at = bisect_left(self.own, begin)
        return at < len(self.own) and self.own[at] < end

    def foreign(self, pattern: re.Pattern[str]) -> list[int]:
        """Return where the template itself wrote matches of a pattern."""
        found = pattern.finditer(self.text)
        return [match.start() for match in found if not self.is_own(*match.span())]


class Piece(NamedTuple):
    """A stretch of a prompt: where it begins, in characters and tokens, and its int32 ids."""

    begin: int
    first: int
    text: str
    ids: bytes
    literal: bool
    """No control token is in it, whatever it spells."""


class Encoded:
    """A prompt's tokens, and the way between positions in its text and in its tokens."""

    def __init__(self, encoder: Encoder, pieces: list[Piece]) -> None:
        self._encoder = encoder
        self._pieces = pieces
        self._begins = [piece.begin for piece in pieces]
        self._offsets: dict[int, list[tuple[int, int]]] = {}
        joined = b"".join([piece.ids for piece in pieces])
        self.tokens: npt.NDArray[np.int32] = np.frombuffer(joined, dtype=np.int32)
        """The ids, read-only, of shape (n,)."""

    def position(self, character: int) -> int | None:
        """Return how many tokens the text before a character takes; None inside a token."""
        index = bisect_right(self._begins, character) - 1
        if index < 0:
            return 0
        piece = self._pieces[index]
        within = self._tokens_before(index, character - piece.begin)
        return None if within is None else piece.first + within

    def whole_before(self, character: int) -> int:
        """Return how many tokens are wholly before a character: `position`, or the next less."""
        exact = self.position(character)
        if exact is not None:
            return exact
        index = bisect_right(self._begins, character) - 1
        piece = self._pieces[index]
        within = character - piece.begin
        return piece.first + bisect_right(self._spans(index), within, key=lambda span: span[1])

    def character(self, position: int) -> int:
        """Return where in the text the token at a position begins; past the last, its end."""
        index = bisect_right(self._pieces, position, key=lambda piece: piece.first) - 1
        if index < 0:
            return 0
        piece = self._pieces[index]
        offsets, within = self._spans(index), position - piece.first
        return piece.begin + (offsets[within][0] if within < len(offsets) else len(piece.text))

    def boundaries(self, kinds: Mapping[int, str]) -> tuple[tuple[int, str], ...]:
        """Return boundaries by token, ascending, for kinds by character; none at 0."""
        found: dict[int, str] = {}
        for character, kind in sorted(kinds.items()):
            # A junction was requested: as near as a whole token allows.
            junction = kind == "junction"
            position = self.whole_before(character) if junction else self.position(character)
            if position:
                found.setdefault(position, kind)
        return tuple(found.items())

    def _tokens_before(self, index: int, within: int) -> int | None:
        piece = self._pieces[index]
        if within <= 0:
            return 0
        if within >= len(piece.text):
            return len(piece.ids) // 4
        if self._encoder.splits:
            return self._encoder.head(piece, within)
        spans = self._spans(index)
        count = bisect_right(spans, within - 1, key=lambda span: span[0])
        end = spans[count - 1][1] if count else 0
        begin = spans[count][0] if count < len(spans) else len(piece.text)
        if end == within == begin:
            return count
        # White space may belong to a token whose span leaves it out: then only encoding shows it.
        return self._encoder.head(piece, within) if end <= within <= begin else None

    def _spans(self, index: int) -> list[tuple[int, int]]:
        if index not in self._offsets:
            self._offsets[index] = self._encoder.offsets(self._pieces[index])
        return self._offsets[index]


class Encoder:
    """Encodes rendered prompts; safe to use from several threads.

    Some tokenizers' added tokens take in text next to them: then a prompt is encoded as a whole,
    and nothing is remembered.
    """

    def __init__(self, inner: tokenizers.Tokenizer, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self._inner = inner
        added = inner.get_added_tokens_decoder()
        self._ids = {token.content: id for id, token in added.items()}
        self.controls = frozenset(t.content for t in added.values() if t.special and t.content)
        """The strings of control tokens."""
        # Tokens that are looked for in normalized text are left to the stretches between.
        self._edges = any_of(t.content for t in added.values() if t.content and not t.normalized)
        self._memory: OrderedDict[tuple[str, bool], bytes] = OrderedDict()
        self._guard = threading.Lock()
        self._budget, self.held_bytes = memory_bytes, 0
        self.splits = self._can_split(list(added.values()))
        """Whether prompts are encoded by stretches."""

    def encode(self, rendered: RenderedText) -> Encoded:
        """Return a prompt's tokens; O(length), but only text not seen before is encoded."""
        return Encoded(self, self._split(rendered) if self.splits else self._whole(rendered))

    def head(self, piece: Piece, within: int) -> int | None:
        """Return how many of a piece's tokens its first characters are; None inside a token."""
        head = self._ids_of(piece.text[:within], literal=piece.literal)
        return len(head) // 4 if piece.ids.startswith(head) else None

    def offsets(self, piece: Piece) -> list[tuple[int, int]]:
        """Return the characters, [begin, end) in the piece, of each of its tokens; O(length)."""
        if piece.text in self._ids and not piece.literal:
            return [(0, len(piece.text))]
        found: list[tuple[int, int]] = self._model(literal=piece.literal)(piece.text).offsets
        return found

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """The same tokenizer, but control tokens' strings are text to it."""
        copy = tokenizers.Tokenizer.from_str(self._inner.to_str())
        copy.encode_special_tokens = True
        return copy

    def _model(self, *, literal: bool) -> Callable[[str], tokenizers.Encoding]:
        inner = self._literal if literal else self._inner
        return partial(encode, inner)

    def _can_split(self, added: list[tokenizers.AddedToken]) -> bool:
        """Return whether every added token is a hard edge, tried where possible."""
        if any(
            t.lstrip or t.rstrip or t.single_word or (t.special and t.normalized) for t in added
        ):
            return False
        edge = next(iter(self._ids), "")
        alone = {probe: self._encode(probe) for probe in PROBES}
        between = self._encode(edge) if edge else b""
        return all(
            self._encode(f"{a}{edge}{b}") == alone[a] + between + alone[b]
            for a in (PROBES if edge else ())
            for b in PROBES
        )

    def _split(self, rendered: RenderedText) -> list[Piece]:
        text, pieces = rendered.text, list[Piece]()
        begin, first, literal = 0, 0, False

        def add(end: int, ids: bytes, *, literal: bool) -> None:
            nonlocal begin, first
            pieces.append(Piece(begin, first, text[begin:end], ids, literal))
            begin, first = end, first + len(ids) // 4

        for found in self._edges.finditer(text):
            token, start, end = found[0], found.start(), found.end()
            if token in self.controls and rendered.is_own(start, end):
                literal = True
                continue
            if start > begin:
                add(start, self._ids_of(text[begin:start], literal=literal), literal=literal)
            add(end, self._ids[token].to_bytes(4, "little"), literal=False)
            literal = False
        if begin < len(text):
            add(len(text), self._ids_of(text[begin:], literal=literal), literal=literal)
        return pieces

    def _whole(self, rendered: RenderedText) -> list[Piece]:
        """The text as few pieces as can be: cut where it spells a control token and is none."""
        text, pieces, first, begin = rendered.text, list[Piece](), 0, 0
        cuts = [(len(text), len(text))]
        for found in any_of(self.controls).finditer(text):
            if rendered.is_own(*found.span()):
                cuts.insert(-1, found.span())
        for start, end in cuts:
            for stretch, literal in ((text[begin:start], False), (text[start:end], True)):
                if stretch:
                    ids = self._encode(stretch, literal=literal)
                    pieces.append(Piece(begin, first, stretch, ids, literal))
                    begin, first = begin + len(stretch), first + len(ids) // 4
        return pieces

    def _encode(self, text: str, *, literal: bool = False) -> bytes:
        return np.array(self._model(literal=literal)(text).ids, dtype="<i4").tobytes()

    def _ids_of(self, text: str, *, literal: bool) -> bytes:
        """Encode a stretch, or remember what it gave."""
        key = (text, literal)
        with self._guard:
            ids = self._memory.get(key)
            if ids is not None:
                self._memory.move_to_end(key)
                return ids
        ids = self._encode(text, literal=literal)
        with self._guard:
            if key not in self._memory:
                self._memory[key] = ids
                self.held_bytes += _bytes_of(text, ids)
            while self.held_bytes > self._budget:
                (old, _), gone = self._memory.popitem(last=False)
                self.held_bytes -= _bytes_of(old, gone)
        return ids


def _bytes_of(text: str, ids: bytes) -> int:
    """About what remembering a stretch takes, the bookkeeping included."""
    return 4 * len(text) + len(ids) + 300

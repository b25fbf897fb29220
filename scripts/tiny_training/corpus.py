"""The text: six novels by Jane Austen, cleaned, split by chapters, and retold as chats."""

from __future__ import annotations

import lzma
import random
import re
from pathlib import Path

HELD_OUT_EVERY = 23
"""Of each novel's chapters, one in this many is held out (never the first)."""

_HEADING = re.compile(r"^(chapter|volume|advertisement)\b.*", re.IGNORECASE)
_ENDING = re.compile(r"^(finis|the end)\W*$", re.IGNORECASE)


def clean(raw: str) -> list[str]:
    """Return the chapters of one novel: paragraphs unwrapped to a line, a blank line between."""
    raw = raw.split("A NOTE ON THE TEXT")[0].replace("_", "").replace("\r", "")
    raw = raw.encode("ascii", "ignore").decode()
    chapters: list[list[str]] = [[]]
    for block in re.split(r"\n\s*\n", raw):
        line = re.sub(r"\s+", " ", block.replace("--", " -- ")).strip()
        if not line or _ENDING.match(line):
            continue
        if line.lower().startswith("chapter") and len(line) < 40:
            chapters.append(["Chapter " + line[8:].upper()])
        elif not (_HEADING.match(line) and len(line) < 30):
            chapters[-1].append(line)
    return ["\n\n".join(chapter) for chapter in chapters[1:]]


def split(novels: list[str]) -> tuple[str, str]:
    """Return (training text, held-out text), chapters parted by a form feed."""
    train: list[str] = []
    held_out: list[str] = []
    for novel in novels:
        for number, chapter in enumerate(clean(novel)):
            part = held_out if number % HELD_OUT_EVERY == HELD_OUT_EVERY // 2 else train
            part.append(chapter)
    return "\f".join(train), "\f".join(held_out)


def write(source: Path, target: Path) -> None:
    """Read the novels `*.txt` of `source`, write train.txt.xz and heldout.txt.xz to `target`."""
    novels = [path.read_text("utf-8", "ignore") for path in sorted(source.glob("*.txt"))]
    for name, text in zip(("train", "heldout"), split(novels), strict=True):
        packed = lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)
        (target / f"{name}.txt.xz").write_bytes(packed)


def read(path: Path) -> str:
    """Return the text of one `*.txt.xz`."""
    return lzma.decompress(path.read_bytes()).decode()


_ASKS = (
    'Go on: "{}"',
    'Continue this: "{}"',
    'What comes after this? "{}"',
    '"{}" And then?',
    'Please go on from here. "{}"',
    "{}",
)
_THOUGHTS = (
    "I am asked to go on. I continue in the same manner.",
    "The next lines follow from these.",
    "I go on with the story from here.",
    "This is a novel. I write what comes next.",
)
_SYSTEMS = ("You tell stories.", "You go on with the story.", "You are a helpful writer.")


def chat(text: str, rng: random.Random) -> list[dict[str, object]]:
    """Return one conversation over consecutive paragraphs of `text`: 1 to 3 turns, some tools."""
    paragraphs = _pieces(rng.choice(text.split("\f")), rng)
    turns = min(rng.choice((1, 1, 1, 2, 3)), len(paragraphs) // 2)
    messages: list[dict[str, object]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    for turn in range(turns):
        asked, answer = paragraphs[2 * turn], paragraphs[2 * turn + 1]
        content = rng.choice(_ASKS).format(asked) if turn == 0 or rng.random() < 0.3 else "Go on."
        if content == "Go on.":
            answer = asked
        messages.append({"role": "user", "content": content})
        messages += _answer(answer, rng)
    return messages


def _pieces(chapter: str, rng: random.Random) -> list[str]:
    """Return eight short runs of whole sentences from a random place of the chapter."""
    sentences = re.split(r"(?<!Mr\.)(?<!Mrs\.)(?<!Dr\.)(?<=[.!?]) +|\n\n", chapter)
    start = rng.randrange(max(1, len(sentences) - 20))
    pieces: list[str] = []
    while start < len(sentences) and len(pieces) < 8:
        taken = rng.choice((1, 1, 2)) if len(pieces) % 2 == 0 else rng.choice((1, 2, 3))
        pieces.append(" ".join(sentences[start : start + taken])[:600])
        start += taken
    return pieces if len(pieces) > 1 else ["Go on.", *pieces]


def _answer(answer: str, rng: random.Random) -> list[dict[str, object]]:
    kind = rng.random()
    if kind < 0.12:
        return [{"role": "assistant", "content": answer, "reasoning_content": ""}]
    thought = rng.choice(_THOUGHTS)
    if kind < 0.9:
        return [{"role": "assistant", "content": answer, "reasoning_content": thought}]
    words = " ".join(answer.split()[:4])
    call = {"function": {"name": "find_text", "arguments": {"words": words}}}
    return [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I look the text up.",
            "tool_calls": [call],
        },
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": answer, "reasoning_content": thought},
    ]


FIND_TEXT = {
    "type": "function",
    "function": {
        "name": "find_text",
        "description": "Find a place in the novels.",
        "parameters": {"type": "object", "properties": {"words": {"type": "string"}}},
    },
}
"""The one tool that training conversations call."""

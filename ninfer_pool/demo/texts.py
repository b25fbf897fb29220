"""The texts of the demo's people, clients and tools, read from `texts.json`.

The passages are Jane Austen's.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Final

_TEXTS: Final = json.loads(
    (resources.files("ninfer_pool.demo") / "texts.json").read_text(encoding="utf-8")
)

COMPANION: Final[str] = _TEXTS["companion"]
TITLE: Final[str] = _TEXTS["title"]
COMPACT: Final[str] = _TEXTS["compact"]
GREETING: Final[str] = _TEXTS["greeting"]
QUESTION: Final[str] = _TEXTS["question"]
EDITOR: Final[str] = _TEXTS["editor"]
READER: Final[str] = _TEXTS["reader"]
TASK: Final[str] = _TEXTS["task"]
CHAPTERS: Final[tuple[str, ...]] = tuple(_TEXTS["chapters"])
EDITOR_TOOLS: Final[tuple[dict[str, Any], ...]] = tuple(_TEXTS["editor_tools"])
READER_TOOLS: Final[tuple[dict[str, Any], ...]] = tuple(_TEXTS["reader_tools"])
PASSAGES: Final[tuple[str, ...]] = tuple(_TEXTS["passages"])

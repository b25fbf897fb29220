"""Records in `docs/measurements`: the JSON that a command wrote, and the command of each.

A simulated record is the same on every machine, so a test runs its command again. A measured one
holds the times of one machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "measurements"
Record: TypeAlias = dict[str, Any]
SIMULATE = ("-m", "ninfer_pool", "simulate")
EIGHT, THIRTY_TWO = (f"tests/data/claude_code_{lanes}_lanes.jsonl.gz" for lanes in (8, 32))
COMMANDS: dict[str, tuple[str, ...]] = {
    "side_requests": ("benchmarks/hit_rate_vs_k.py",),
    "8_lanes": (
        *SIMULATE, EIGHT, "--entries", "1,2,4,8", "--budget", "16GiB,64GiB",
        "--policy", "default,lru",
    ),
    "32_lanes": ("benchmarks/hit_rate_vs_k.py", THIRTY_TWO, "--entries", "2,4,8,16"),
    "below": (
        *SIMULATE, "--budget", "8GiB", "--policy", "default",
        "--host-budget", "32GiB", "--disk-budget", "512GiB",
    ),
    "demo": ("-m", "ninfer_pool", "demo"),
    **{name: (f"benchmarks/{name}.py",) for name in ("core", "peers", "runner", "tiers", "server")},
}  # fmt: skip
SIMULATED = ("side_requests", "8_lanes", "32_lanes", "below")
MEASURED = tuple(name for name in COMMANDS if name not in SIMULATED)
REQUEST_FIELDS = ("label", "prompt_tokens", "cached_tokens", "first_token_ms")


def path(name: str) -> Path:
    """The file of a record."""
    return FOLDER / f"{name}.json"


def record(name: str) -> Record:
    """Read a record."""
    return parsed(path(name).read_text(encoding="utf-8"))


def parsed(text: str) -> Record:
    """Parse the text of a record."""
    found: Record = json.loads(text)
    return found


def made(name: str) -> str:
    """Run the command of a record; return the record's text."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "record.json"
        plot = ["--plot", str(Path(folder) / "demo.html")] if name == "demo" else []
        command = [sys.executable, *COMMANDS[name], *plot, "--json", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return compact(json.loads(out.read_text(encoding="utf-8")))


def compact(written: Record) -> str:
    """Return a record with one line per element of its lists, and without what no table shows."""
    for run in written.get("runs", ()):
        run.pop("lookup_us", None)  # the one measured field of a simulation
    for scenario in written.get("scenarios", ()):
        for play in scenario["plays"]:
            play["requests"] = [
                {field: request[field] for field in REQUEST_FIELDS} for request in play["requests"]
            ]
    written.pop("sections", None)
    fields = []
    for field, value in written.items():
        if isinstance(value, list) and value:
            lines = ",\n  ".join(json.dumps(each, allow_nan=False) for each in value)
            fields.append(f' "{field}": [\n  {lines}\n ]')
        else:
            fields.append(f' "{field}": {json.dumps(value, allow_nan=False)}')
    return "{\n" + ",\n".join(fields) + "\n}\n"

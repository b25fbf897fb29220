"""`ninfer-pool demo`: plays the scenarios, prints their tables, writes picture and figures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ninfer_pool.demo.play import TODAY, Play, ScenarioResult, Setting, Stage
from ninfer_pool.demo.scenarios import FULL, QUICK, SCENARIOS, Size
from ninfer_pool.demo.table import HEADLINE, LEGEND, sections
from ninfer_pool.errors import UsageError
from ninfer_pool.sim import options
from ninfer_pool.sim.progress import Progress

SCENARIO_FIELDS = ("name", "title", "happens", "means")
PLAY_FIELDS = ("prompt_tokens", "cached_tokens", "hit_rate", "first_token_ms")


def demo(args: argparse.Namespace) -> None:
    """Run the command: print each table when it is complete, then write the files.

    Raises:
        UsageError: an output that cannot be written; no scenario was played.
    """
    options.check_outputs({"--plot": args.plot, "--json": args.json})
    plot = _drawable(args.plot)
    settings = [TODAY, *(Setting(entries=count) for count in args.entries)]
    with ExitStack() as files:
        # Drafts become the named files when the block ends well, and vanish when it does not.
        drafts = {
            path: files.enter_context(options.replacing(path))
            for path in (args.json, plot)
            if path is not None
        }
        torch.set_num_threads(1)  # a second one is no gain for so small a model
        stage = Stage()
        print("\n".join([f"{HEADLINE}:", f"{stage.model}.", "", *LEGEND]), flush=True)
        results = _play(stage, settings, size=QUICK if args.quick else FULL)
        if args.json is not None:
            drafts[args.json].write_text(_json(results, model=stage.model), encoding="utf-8")
        if plot is not None:
            from ninfer_pool.demo.plot import picture

            drafts[plot].write_bytes(picture(results, suffix=plot.suffix.lower()))
    for path in drafts:
        print(f"wrote {path}")


def _drawable(plot: Path) -> Path | None:
    """Return the picture's path; without matplotlib print one line and return None."""
    try:
        options.check_plot_library()
    except UsageError as error:
        print(f"{error}; going on without {plot}", file=sys.stderr)
        return None
    return plot


def _play(stage: Stage, settings: Sequence[Setting], *, size: Size) -> list[ScenarioResult]:
    """Play all scenarios in all settings; print each section when it is complete."""
    results: list[ScenarioResult] = []
    printed = 0
    for scenario in SCENARIOS:
        plays = []
        with Progress(sys.stderr) as progress:
            for number, setting in enumerate(settings):
                progress.show(scenario.title, number, len(settings))
                plays.append(stage.play(scenario.script(size), setting))
        results.append(ScenarioResult(scenario=scenario, plays=tuple(plays)))
        for section in sections(results)[printed:]:
            print(f"\n{section.table.text()}\n{section.shows}", flush=True)
            printed += 1
    return results


def _json(results: Sequence[ScenarioResult], *, model: str) -> str:
    found = {
        "version": 1,
        "model": model,
        "scenarios": [
            {
                **{name: getattr(each.scenario, name) for name in SCENARIO_FIELDS},
                "plays": [_play_json(play) for play in each.plays],
            }
            for each in results
        ],
        "sections": [{**asdict(each.table), "shows": each.shows} for each in sections(results)],
    }
    return json.dumps(found, indent=2, allow_nan=False) + "\n"


def _play_json(play: Play) -> dict[str, Any]:
    return {
        "setting": "single_lane" if play.setting.entries is None else "pool",
        "entries": play.setting.entries,
        **{name: getattr(play, name) for name in PLAY_FIELDS},
        "requests": [asdict(each) for each in play.served],
    }

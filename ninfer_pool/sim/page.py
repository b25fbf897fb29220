"""The `.html` plot: one file with panels, tables and reasons, for light, dark and a phone.

It loads nothing from another host: drawings are inline SVG, fonts are the reader's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from ninfer_pool.sim.geometry import PageSizes
from ninfer_pool.sim.report import (
    SWEEPS,
    Run,
    TextTable,
    below,
    describe_model,
    headline,
    points,
    tables,
)

# Each colour of a drawing, and its counterpart on a dark page.
DARK = {
    "#16181d": "#f1f1ef", "#5b5f66": "#a9adb5", "#e3e4e6": "#33363c", "#ffffff": "#17181b",
    "#2a78d6": "#5b9df0", "#eb6834": "#f07f4f", "#1baf7a": "#2fc48f", "#4a3aa7": "#9c8ff0",
    "#e05d92": "#ee7fab", "#c98a00": "#dba336", "#2f7d32": "#5fb562", "#8a6d5a": "#b99a86",
}  # fmt: skip
STYLE = """
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--surface);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.25rem; } h2 { font-size: 1.1rem; margin: 2rem 0 0; overflow-wrap: anywhere; }
p { margin: .25rem 0; color: var(--muted); }
.panels { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { flex: 1 1 20rem; min-width: 0; max-width: 32rem; margin: .75rem 0; }
svg { width: 100%; height: auto; display: block; stroke-linejoin: round; }
svg text { font-family: system-ui, sans-serif !important; }
.table { overflow-x: auto; margin: 1.25rem 0; container-type: inline-size; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .25rem; }
caption span { display: inline-block; position: sticky; left: 0; max-width: 100cqw; }
th, td { padding: .15rem .75rem .15rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { color: var(--muted); font-weight: 500; } .left { text-align: left; }
"""
NAMED = {"--ink": "#16181d", "--muted": "#5b5f66", "--grid": "#e3e4e6", "--surface": "#ffffff"}


def page(
    groups: Sequence[Sequence[Run]], *, sizes: PageSizes, draw: Callable[[Sequence[Run], str], str]
) -> str:
    """Return the whole page; `draw` returns the SVG of one sweep of one trace's runs."""
    sections = "\n".join(_section(runs, sizes=sizes, draw=draw) for runs in groups)
    names = ", ".join(dict.fromkeys(runs[0]["trace"] for runs in groups))
    heading = "Prompt tokens reused"
    return document(sections, heading=heading, title=f"{heading}: {names}")


def document(body: str, *, heading: str, title: str) -> str:
    """Return a whole page around `body`, HTML whose drawings come from `inline`."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(title)}</title>\n<style>{_colours()}{STYLE}</style>\n"
        f"</head>\n<body>\n<h1>{escape(heading)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _colours() -> str:
    light = {f"--c{colour[1:]}": colour for colour in DARK} | NAMED
    dark = {f"--c{colour[1:]}": DARK[colour] for colour in DARK}
    dark |= {name: DARK[colour] for name, colour in NAMED.items()}
    return (
        f":root {{ color-scheme: light dark; {_rules(light)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_rules(dark)} }} }}\n"
    )


def _rules(values: dict[str, str]) -> str:
    return " ".join(f"{name}: {value};" for name, value in values.items())


def _section(
    runs: Sequence[Run], *, sizes: PageSizes, draw: Callable[[Sequence[Run], str], str]
) -> str:
    figures = [
        f"<figure>{inline(draw(runs, field), title=_title(runs[0], field))}</figure>"
        for field in SWEEPS
        if points(runs, field)
    ]
    about = escape(describe_model(runs[0], sizes=sizes)).replace("\n", "<br>")
    parts = [f"<section>\n<h2>{escape(headline(runs))}</h2>\n<p>{about}</p>"]
    parts += [f'<div class="panels">{"".join(figures)}</div>']
    parts += [table_html(table) for table in tables(runs)]
    return "\n".join([*parts, "</section>"])


def _title(run: Run, field: str) -> str:
    swept = "entries" if field == "entries" else "bytes"
    tiers = f", with {below(run)} below the device" if below(run) else ""
    return (
        f"{run['trace']}: prompt tokens reused against {swept}{tiers}; figures in the table below"
    )


def inline(svg: str, *, title: str) -> str:
    """Return an SVG file as an element of a page: no prolog or namespaces, colours as variables."""
    element = svg[svg.index("<svg") :]
    element = re.sub(r'\s+(xmlns(:\w+)?|width|height)="[^"]*"', "", element, count=4)
    element = element.replace("xlink:href", "href")
    # The drawing's own style would apply to the whole page, and unused ids would clash.
    element = re.sub(r"<style.*?</style>", "", element, flags=re.DOTALL)
    named = set(re.findall(r"#([\w-]+)", element))
    element = re.sub(
        r'\s+id="([^"]*)"', lambda found: found[0] if found[1] in named else "", element
    )
    element = re.sub("|".join(DARK), lambda found: f"var(--c{found[0][1:]})", element)
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)


def table_html(table: TextTable) -> str:
    """Return a `TextTable` as HTML; its rules become the lines that all rows have."""
    head = "".join(_cell("th", table, place) for place in enumerate(table.columns))
    rows = "\n".join(
        "<tr>" + "".join(_cell("td", table, place) for place in enumerate(row)) + "</tr>"
        for row in table.rows
        if row
    )
    caption = f"<caption><span>{escape(table.title)}</span></caption>"
    return f'<div class="table"><table>{caption}\n<tr>{head}</tr>\n{rows}\n</table></div>'


def _cell(tag: str, table: TextTable, place: tuple[int, str]) -> str:
    column, text = place
    kind = ' class="left"' if column < table.left else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"

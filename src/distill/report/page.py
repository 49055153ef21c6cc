"""One self-contained HTML page: headings, tables and plots, readable without a network.

What is put into a page may have been written by anybody (prompts, what a model wrote): text is escaped
wherever it is not `Markup`, and the page's own policy allows no request and no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

# name -> (light, dark). Series are Okabe and Ito's, which differ for the colour-blind too.
COLOURS = {
    "paper": ("#f6f7f9", "#101318"),
    "card": ("#ffffff", "#181c23"),
    "ink": ("#1b2129", "#e4e8ee"),
    "soft": ("#5b6673", "#9aa5b3"),
    "line": ("#dfe3e8", "#2c333d"),
    "grid": ("#e9ecf0", "#262c35"),
    "blue": ("#0072b2", "#5fb2e8"),
    "orange": ("#c75a00", "#f0a24a"),
    "green": ("#00805c", "#3cc79c"),
    "purple": ("#a8588a", "#d995bf"),
    "sky": ("#3f9fd6", "#8ccdf2"),
    "grey": ("#8a94a0", "#77828f"),
    "band": ("rgba(0,114,178,.14)", "rgba(95,178,232,.18)"),
    "took": ("#d3e7f5", "#1d4260"),
    "fixed": ("#fbe0c4", "#63390c"),
    "good": ("#00704f", "#4fd0a6"),
    "bad": ("#b3261e", "#ff8a80"),
}
SERIES = ("blue", "orange", "green", "purple", "sky", "grey")
Cell = str | int | float | None


def paint(name: str) -> str:
    """A colour of the page for a figure; it follows the reader's choice of light or dark."""
    if name not in COLOURS:
        raise KeyError(name)
    return f"var(--{name})"


def label(text: str) -> str:
    """Text of others for a figure, whose strings are read as HTML's smaller brother."""
    return str(escape(text))


def page(title: str, parts: Iterable[Markup], subtitle: str = "") -> str:
    """The whole document.

    Args:
        title: heading and name of the tab.
        parts: from the functions below, in reading order.
        subtitle: one line under the heading.
    """
    body = Markup("\n").join(_paired(parts))
    scripts = [_plotly()] if 'class="plot"' in body else []
    scripts.append(_resource("page.js"))
    allowed = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    return str(
        _FRAME.format(
            policy=policy,
            title=title,
            icon=_ICON,
            subtitle=Markup('<p class="sub">{}</p>').format(subtitle) if subtitle else "",
            style=Markup(_variables() + _resource("page.css")),
            body=body,
            scripts=Markup("").join(Markup("<script>{}</script>\n").format(Markup(s)) for s in scripts),
        )
    )


_ICON = Markup(
    '<svg viewBox="0 0 20 20" width="18" height="18" aria-hidden="true"><circle cx="10" cy="10" r="7.2" '
    'fill="none" stroke="currentColor" stroke-width="1.6"/><path d="M10 2.8a7.2 7.2 0 0 1 0 14.4z" '
    'fill="currentColor"/></svg>'
)
_FRAME = Markup("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><div><h1>{title}</h1>{subtitle}</div>
<button id="theme" type="button" aria-label="Switch between light and dark">{icon}</button></header>
<main>
{body}
</main>
<noscript><p class="sub">Plots need JavaScript; everything else is here without it.</p></noscript>
{scripts}</body>
</html>
""")


_HALF, _WHOLE = '<section class="card">', '<section class="card wide">'


def _paired(parts: Iterable[Markup]) -> list[Markup]:
    """Cards stand two in a row; one that is left over has the row to itself."""
    result, open_row = [], False
    for part in [*parts, Markup()]:
        half = part.startswith(_HALF)
        if open_row and not half:
            result[-1] = Markup(_WHOLE) + result[-1][len(_HALF) :]
        open_row = half and not open_row
        result.append(part)
    return result


def section(title: str, *parts: Markup | str, says: str = "", wide: bool = False) -> Markup:
    """A card with a heading, and a line that says what to look for."""
    return Markup("{}<h2>{}</h2>{}{}</section>").format(
        Markup(_WHOLE if wide else _HALF),
        title,
        Markup('<p class="says">{}</p>').format(says) if says else "",
        Markup("\n").join(parts),
    )


def heading(text: str) -> Markup:
    """Between cards."""
    return Markup('<h2 class="between">{}</h2>').format(text)


def prose(text: str) -> Markup:
    """A paragraph."""
    return Markup("<p>{}</p>").format(text)


def tiles(items: Iterable[tuple[str, Markup | str, Markup | str]]) -> Markup:
    """(name, value, what is said of it) in big letters, side by side."""
    one = Markup('<div class="tile"><dt>{}</dt><dd>{}</dd><dd class="note">{}</dd></div>')
    return Markup('<dl class="tiles">{}</dl>').format(Markup("").join(one.format(*item) for item in items))


def facts(pairs: Iterable[tuple[str, Cell | Markup]]) -> Markup:
    """Names and values, one a line; those without a value are left out."""
    one = Markup("<div><dt>{}</dt><dd>{}</dd></div>")
    lines = [one.format(name, _cell(value)) for name, value in pairs if value is not None and value != ""]
    return Markup('<dl class="facts">{}</dl>').format(Markup("").join(lines))


def table(
    head: Sequence[str], rows: Iterable[Sequence[Cell | Markup]], texts: int = 1, sortable: bool = False
) -> Markup:
    """A table that scrolls in itself where the screen is narrow.

    Args:
        head: names of the columns.
        rows: cells; None is shown as a dash.
        texts: columns from the left that are text; the others are aligned as numbers.
        sortable: headings are buttons; numbers are in order of the first one in each cell.
    """
    kind = ["text" if i < texts else "number" for i in range(len(head))]
    names = [Markup('<button type="button" class="sort">{}</button>').format(h) for h in head]
    top = Markup("").join(
        Markup('<th scope="col" class="{}">{}</th>').format(k, h)
        for k, h in zip(kind, names if sortable else head, strict=True)
    )
    lines = Markup("\n").join(
        Markup("<tr>{}</tr>").format(
            Markup("").join(
                Markup('<td class="{}">{}</td>').format(k, _cell(c)) for k, c in zip(kind, row, strict=True)
            )
        )
        for row in rows
    )
    return Markup(
        '<div class="scroll" tabindex="0"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(top, lines)


def split(*parts: Markup) -> Markup:
    """Side by side within a card, or below one another where the screen is narrow."""
    halves = Markup("").join(Markup("<div>{}</div>").format(part) for part in parts)
    return Markup('<div class="split">{}</div>').format(halves)


def details(title: str, *parts: Markup | str, opened: bool = False) -> Markup:
    """What is folded away until it is asked for."""
    return Markup("<details{}><summary>{}</summary>{}</details>").format(
        Markup(" open") if opened else "", title, Markup("\n").join(parts)
    )


def pre(text: str) -> Markup:
    """Text as it is, a file say."""
    return Markup('<pre class="scroll" tabindex="0">{}</pre>').format(text)


def plot(figure: go.Figure, says: str, height: int = 260) -> Markup:
    """A figure in the page's colours; its axes are named by whoever made it.

    Args:
        figure: colours from `paint`, text of others through `label`. Its template is the page's own.
        says: for those who cannot see it.
        height: in CSS pixels.
    """
    drawn = figure.to_plotly_json()
    layout = {k: v for k, v in drawn["layout"].items() if k != "template"} | {"height": height}
    return Markup(
        '<div class="plot" role="img" aria-label="{}" style="height:{}px"></div>'
        '<script type="application/json">{}</script>'
    ).format(says, height, Markup(_json({"data": drawn["data"], "layout": layout})))


def _json(value: Any) -> str:
    """For a script element: no tag can begin in it, and what is no number is a gap."""
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() >= {"dtype", "bdata"}:  # Plotly packs arrays
        flat = np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
        return _plain(flat.reshape([int(n) for n in str(value.get("shape", flat.size)).split(",")]))
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Cell | Markup) -> Markup:
    if isinstance(value, float):
        return Markup("{}").format(f"{value:.4g}" if math.isfinite(value) else "–")
    return escape("–" if value is None else value)


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _variables() -> str:
    """Both sets of colours: the system's choice counts unless the reader has made one."""
    light, dark = (";".join(f"--{k}:{v[i]}" for k, v in COLOURS.items()) for i in (0, 1))
    return (
        f":root{{color-scheme:light;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{color-scheme:dark;{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
    )


@cache
def _resource(name: str) -> str:
    return resources.files("distill.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """Plotly's library, as its package has it; a parser would read other line ends, and hash other text."""
    script = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    assert "</script" not in script.lower(), "the library would end its own element"
    return script

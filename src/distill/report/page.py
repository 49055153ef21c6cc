"""Build one self-contained HTML page of headings, tables and plots that needs no network.

Contents are untrusted (prompts, model output): text is escaped unless it is `Markup`, and the page's content
security policy allows only its own scripts and no requests.
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

# name -> (light, dark). Series use the colour-blind-safe palette of Okabe and Ito.
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
    """CSS variable of a colour, for figures; follows the light or dark theme."""
    if name not in COLOURS:
        raise KeyError(name)
    return f"var(--{name})"


def label(text: str) -> str:
    """Escape untrusted text for a figure; Plotly interprets a subset of HTML."""
    return str(escape(text))


def page(title: str, parts: Iterable[Markup], subtitle: str = "") -> str:
    """Build the HTML document.

    Args:
        title: heading and name of the tab.
        parts: parts from the functions below, in reading order.
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
    """Put two half-width cards in a row; a single one becomes full width."""
    result, open_row = [], False
    for part in [*parts, Markup()]:
        half = part.startswith(_HALF)
        if open_row and not half:
            result[-1] = Markup(_WHOLE) + result[-1][len(_HALF) :]
        open_row = half and not open_row
        result.append(part)
    return result


def section(title: str, *parts: Markup | str, caption: str = "", wide: bool = False) -> Markup:
    """Card with a heading and a caption."""
    return Markup("{}<h2>{}</h2>{}{}</section>").format(
        Markup(_WHOLE if wide else _HALF),
        title,
        Markup('<p class="says">{}</p>').format(caption) if caption else "",
        Markup("\n").join(parts),
    )


def heading(text: str) -> Markup:
    """Heading between cards."""
    return Markup('<h2 class="between">{}</h2>').format(text)


def prose(text: str) -> Markup:
    """A paragraph."""
    return Markup("<p>{}</p>").format(text)


def tiles(items: Iterable[tuple[str, Markup | str, Markup | str]]) -> Markup:
    """Tiles of (name, value, note) side by side."""
    one = Markup('<div class="tile"><dt>{}</dt><dd>{}</dd><dd class="note">{}</dd></div>')
    return Markup('<dl class="tiles">{}</dl>').format(Markup("").join(one.format(*item) for item in items))


def facts(pairs: Iterable[tuple[str, Cell | Markup]]) -> Markup:
    """List of names and values, one per line; entries without a value are omitted."""
    one = Markup("<div><dt>{}</dt><dd>{}</dd></div>")
    lines = [one.format(name, _cell(value)) for name, value in pairs if value is not None and value != ""]
    return Markup('<dl class="facts">{}</dl>').format(Markup("").join(lines))


def table(
    head: Sequence[str], rows: Iterable[Sequence[Cell | Markup]], texts: int = 1, sortable: bool = False
) -> Markup:
    """Table that scrolls horizontally on a narrow screen.

    Args:
        head: names of the columns.
        rows: cells; None is shown as a dash.
        texts: number of text columns from the left; the others are aligned as numbers.
        sortable: headings are buttons; numeric columns sort by the first number in each cell.
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
    """Put parts side by side within a card; one below another on a narrow screen."""
    halves = Markup("").join(Markup("<div>{}</div>").format(part) for part in parts)
    return Markup('<div class="split">{}</div>').format(halves)


def details(title: str, *parts: Markup | str, opened: bool = False) -> Markup:
    """Collapsible section; `opened` expands it initially."""
    return Markup("<details{}><summary>{}</summary>{}</details>").format(
        Markup(" open") if opened else "", title, Markup("\n").join(parts)
    )


def pre(text: str) -> Markup:
    """Preformatted text."""
    return Markup('<pre class="scroll" tabindex="0">{}</pre>').format(text)


def plot(figure: go.Figure, caption: str, height: int = 260) -> Markup:
    """Plotly figure in the page's colours.

    Args:
        figure: figure with colours from `paint` and untrusted text through `label`; its template is replaced.
        caption: label for screen readers.
        height: in CSS pixels.
    """
    values = figure.to_plotly_json()
    layout = {k: v for k, v in values["layout"].items() if k != "template"} | {"height": height}
    return Markup(
        '<div class="plot" role="img" aria-label="{}" style="height:{}px"></div>'
        '<script type="application/json">{}</script>'
    ).format(caption, height, Markup(_json({"data": values["data"], "layout": layout})))


def _json(value: Any) -> str:
    """JSON for a script element: escapes characters that begin a tag; NaN and infinity become null."""
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
    """Light and dark colours; follows the system's preference until the reader presses the button."""
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
    """Source of Plotly, with line ends as an HTML parser reads them, since the text is hashed."""
    script = get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
    assert "</script" not in script.lower(), "the library would end its own element"
    return script

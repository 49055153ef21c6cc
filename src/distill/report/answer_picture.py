"""An answer as an SVG picture: accepted draft tokens and the target's own tokens in two colours.

The picture needs no font of its own and loads nothing. It follows `prefers-color-scheme`, also where a page
shows it as an <img>. Each run of characters has the width that the layout gives it (`textLength`), so the
boxes fit in every monospace font.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

COLUMNS = 52  # of text; readable at 390 CSS pixels
WIDTH, HEIGHT, MARGIN = 9.6, 26, 20  # of a column, of a line, around the text
SIZE = 16  # of the font
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
STYLE = f"""
svg {{ --page: #ffffff; --line: #d0d7de; --ink: #1f2328; --dim: #59636e; }}
svg {{ --drafted: #b6e8cf; --own: #eceff2; }}
@media (prefers-color-scheme: dark) {{
  svg {{ --page: #0d1117; --line: #3d444d; --ink: #f0f6fc; --dim: #9ba5b0; }}
  svg {{ --drafted: #0e5a41; --own: #262c36; }}
}}
.page {{ fill: var(--page); stroke: var(--line); }}
.drafted rect {{ fill: var(--drafted); }}
.own rect {{ fill: var(--own); }}
text {{ fill: var(--ink); font: {SIZE}px {FONT}; white-space: pre; }}
.dim {{ fill: var(--dim); font-size: {SIZE - 2}px; }}
"""


class Part(NamedTuple):
    """Text of one token."""

    text: str
    drafted: bool  # by the drafter, and accepted


def answer_picture(prompt: str, parts: Sequence[Part], drafter: str, tau: float) -> str:
    """The picture of an answer.

    Args:
        prompt: is shown above the answer.
        parts: text of each token of the answer.
        drafter: name of the drafter.
        tau: tokens per target pass of this answer.
    """
    asked = [line for line in lines([Part(f"> {prompt}", drafted=False)]) if line]
    answer = lines(parts)
    drawn, top = [], MARGIN
    for line in asked:
        drawn.append(_text(MARGIN, top, "".join(part.text for part in line), "dim"))
        top += HEIGHT
    top += HEIGHT // 2
    for line in answer:
        left = float(MARGIN)
        for part in line:
            drawn.append(_box(left, top, part))
            left += columns(part.text) * WIDTH
        top += HEIGHT if line else HEIGHT // 2
    top += HEIGHT // 2
    for part, meaning in (
        (Part("  ", drafted=True), "drafted and accepted"),
        (Part("  ", drafted=False), "the target's own token"),
    ):
        drawn += [_box(MARGIN, top, part), _text(MARGIN + 3 * WIDTH, top, meaning, "dim")]
        top += HEIGHT
    drawn.append(
        _text(MARGIN, top, f"{drafter}: tau {tau:.2f} in this answer (tokens per target pass)", "dim")
    )
    width, height = COLUMNS * WIDTH + 2 * MARGIN, top + HEIGHT + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
            f' width="{width:g}" height="{height:g}" role="img">',
            f"<title>An answer decoded with {_escaped(drafter)}; accepted draft tokens are in colour</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>',
            *drawn,
            "</svg>\n",
        ]
    )


def lines(parts: Sequence[Part]) -> list[list[Part]]:
    """Lay text out in lines of at most `COLUMNS` columns.

    A line ends at a line break of the text or at a space; a longer word is cut. A space at which a line ends
    may stand in the column after the last one. Tabs become four spaces.
    """
    letters = [
        (letter, i)
        for i, part in enumerate(parts)
        for letter in part.text.replace("\t", "    ").replace("\r", "")
    ]
    found, start = [], 0
    for end in [at for at, (letter, _) in enumerate(letters) if letter == "\n"] + [len(letters)]:
        begin = start
        while begin < end:
            stop = _fitting([letter for letter, _ in letters[begin:end]]) + begin
            found.append(_runs(letters[begin:stop], parts))
            begin = stop
        if start == end:
            found.append([])
        start = end + 1
    while found and not found[-1]:
        found.pop()
    return found


def columns(text: str) -> int:
    """Columns of a text on a terminal: two for a wide character, none for a combining one."""
    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )


def _fitting(letters: Sequence[str]) -> int:
    """Number of letters that go into a line."""
    used, space = 0, 0
    for i, letter in enumerate(letters):
        used += columns(letter)
        if used > COLUMNS:
            if letter == " ":
                return i + 1
            return space or max(i, 1)
        if letter == " ":
            space = i + 1
    return len(letters)


def _runs(letters: Sequence[tuple[str, int]], parts: Sequence[Part]) -> list[Part]:
    """Join the letters of each token."""
    found: dict[int, str] = {}
    for letter, i in letters:
        found[i] = found.get(i, "") + letter
    return [Part(text, parts[i].drafted) for i, text in found.items()]


def _escaped(text: str) -> str:
    """XML text; what XML cannot hold is replaced."""
    return escape(NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text))


def _box(left: float, top: float, part: Part) -> str:
    """A token on its coloured box."""
    width = max(columns(part.text) * WIDTH - 1, 0)
    box = f'<rect x="{left + 0.5:g}" y="{top + 2:g}" width="{width:g}" height="{HEIGHT - 4}" rx="3"/>'
    return f'<g class="{"drafted" if part.drafted else "own"}">{box}{_text(left, top, part.text)}</g>'


def _text(left: float, top: float, text: str, kind: str = "") -> str:
    """A run of text; its token box has its width."""
    fitted = f' textLength="{columns(text) * WIDTH:g}" lengthAdjust="spacingAndGlyphs"' if not kind else ""
    named = f' class="{kind}"' if kind else ""
    place = f'x="{left:g}" y="{top + HEIGHT - 8:g}"'
    return f'<text{named} {place}{fitted} xml:space="preserve">{_escaped(text)}</text>'

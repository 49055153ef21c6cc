"""The picture of an answer: its text, its colours, its lines, and that it is XML."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from distill.report.answer_picture import COLUMNS, WIDTH, Part, answer_picture, columns, lines

SVG = "{http://www.w3.org/2000/svg}"
PARTS = [
    *(Part("if", False), Part(" a<b", True), Part(" && ", True), Part('"c"', False), Part(":\n\n", True)),
    *(Part("\tword", True), Part(" 中文", False), Part("e\u0301", True), Part("\x00\uffff", False)),
]


def boxes(picture: str) -> list[tuple[str, str, float, float]]:
    """Kind, text, left edge and width of every token, without the legend's two."""
    found = []
    for group in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        text = group.find(f"{SVG}text")
        assert text is not None
        kind, place = group.attrib["class"], text.attrib
        found.append((kind, "".join(text.itertext()), float(place["x"]), float(place["textLength"])))
    return found[:-2]


def test_tokens_are_the_text_in_the_colour_of_their_source():
    shown = boxes(answer_picture("x", PARTS, "eagle", 2.5))
    assert [(kind, text) for kind, text, *_ in shown] == [
        *(("own", "if"), ("drafted", " a<b"), ("drafted", " && "), ("own", '"c"'), ("drafted", ":")),
        *(("drafted", "    word"), ("own", " 中文"), ("drafted", "e\u0301"), ("own", "\ufffd\ufffd")),
    ]


def test_tokens_of_a_line_are_next_to_each_other():
    shown = boxes(answer_picture("x", PARTS[:4], "eagle", 2.5))
    edges = [(left, left + width) for _, _, left, width in shown]
    assert [right for _, right in edges[:-1]] == pytest.approx([left for left, _ in edges[1:]])
    assert edges[2][1] - edges[2][0] == pytest.approx(4 * WIDTH)


def test_picture_follows_the_colour_scheme_and_loads_nothing():
    picture = answer_picture("<b>&", PARTS, "eagle", 2.5)
    assert "@media (prefers-color-scheme: dark)" in picture
    assert "&gt; &lt;b&gt;&amp;" in picture
    assert "eagle: tau 2.50 in this answer" in picture
    assert all(word not in picture for word in ("url(", "@import", "href", "<script", "@font-face"))


@pytest.mark.parametrize(
    "text",
    [
        "one two three " * 20,
        "x" * 3 * COLUMNS + " y",
        "中" * COLUMNS,
        "  indented\n\n    more\n" + "a " * COLUMNS,
        "a" * COLUMNS + " b",
        "",
    ],
)
def test_lines_hold_the_text_and_are_no_wider_than_the_picture(text):
    parts = [Part(text[i : i + 5], drafted=i % 2 == 0) for i in range(0, len(text), 5)]
    found = ["".join(part.text for part in line) for line in lines(parts)]
    assert "".join(found) == text.replace("\n", "")
    assert all(columns(line.rstrip(" ")) <= COLUMNS for line in found)
    assert [line for line in found if line and columns(line) > COLUMNS + 1] == []
    if "\n" in text:
        assert found[:3] == text.split("\n")[:3]


def test_line_ends_at_a_space_and_not_in_a_word():
    words = [f"word{i}" for i in range(100)]
    found = ["".join(part.text for part in line) for line in lines([Part(" ".join(words), True)])]
    assert [word for line in found for word in line.split()] == words

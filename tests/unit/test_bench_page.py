"""The page of `pdserve bench`: what it shows, and that it asks for nothing and runs nothing."""

from __future__ import annotations

from base64 import b64decode
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from measure.bench.answer import Answer
from measure.bench.document import SCHEMA, Document, Run, Saturation, Target
from measure.bench.judge import judge
from measure.bench.page import render
from measure.plan.slo import Constraint, Slo

HOSTILE = "<script>alert(1)</script>\"'&{{ 7 * 7 }} $x_1$"
SLO = Slo(1.0, 0.2)
_EMPTY = {"meta", "br", "img"}
_SVG = "data:image/svg+xml;base64,"


class Page(HTMLParser):
    """Fails where elements are not closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _EMPTY:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in {"td", "th"}:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data

    @property
    def pictures(self) -> list[str]:
        return [
            b64decode(value.removeprefix(_SVG)).decode()
            for name, value in self.attributes
            if name == "src"
        ]


def run(first_s: float, *, late_s: float = 0.0, broken: bool = False) -> Run:
    good = Answer(10, late_s, first_s, first_s + 0.2, [0.1, 0.1], 3)
    answers = [good, Answer(10, failure="HTTP 503") if broken else good]
    return judge([1.0, 1.5], answers, 2.0, 0.0, SLO)


def document(*targets: Target) -> Document:
    return Document(SCHEMA, "now", "here", "pdserve bench", "poisson", SLO, 0.0, list(targets))


def target(name: str, *runs: Run, saturation: Saturation | None = None) -> Target:
    return Target(name, "http://one:8000", "m", list(runs), [], saturation)


def test_every_target_has_its_figures_in_words_and_in_pictures() -> None:
    saturated = Saturation(4.5, Constraint.TTFT, client_limited=False)
    whole = Target("whole", "http://one:8000", "m", [run(0.25)], [run(0.75)], saturated)
    page = Page(render(document(whole, target("split", run(0.5), run(0.5, broken=True)))))
    targets, runs = page.tables
    figures = {row[0]: row[1:] for row in targets}
    assert figures[""] == ["whole", "split"]
    assert figures["within the SLO"] == ["100.0%", "75.0%"]
    assert figures["TTFT p50 / p99, ms"] == ["250.0 / 250.0", "500.0 / 500.0"]
    assert figures["saturated at"] == ["4.5/s, time to first token", "-"]
    shown = [(row[0], row[1], row[6], row[9]) for row in runs[1:]]
    assert shown == [
        ("whole", "asked rate", "250.0 / 250.0", ""),
        ("whole", "search", "750.0 / 750.0", ""),
        ("split", "asked rate", "500.0 / 500.0", ""),
        ("split", "asked rate", "500.0 / 500.0", "1 HTTP 503"),
    ]
    assert len(page.pictures) == 3
    assert all(len(ElementTree.fromstring(it)) for it in page.pictures)


def test_without_a_search_there_is_no_picture_of_one() -> None:
    assert len(Page(render(document(target("whole", run(0.5))))).pictures) == 2


def test_where_nothing_was_answered_there_are_pictures_all_the_same() -> None:
    failed = judge([1.0], [Answer(10, failure="HTTP 503")], 2.0, 0.0, SLO)
    assert len(Page(render(document(target("whole", failed)))).pictures) == 2


def test_that_the_client_was_the_limit_is_said() -> None:
    text = render(document(target("whole", run(0.5, late_s=0.06))))
    assert "whole: this client sent up to 60 ms late" in text


@pytest.mark.parametrize("name", [HOSTILE, "_hidden", "名前"])
def test_names_are_shown_as_they_are(name: str) -> None:
    page = Page(render(document(target(name, run(0.5)))))
    assert page.tables[0][0] == ["", name]
    assert page.seen.count("script") == 0


def test_nothing_is_asked_of_a_network() -> None:
    page = Page(render(document(target(HOSTILE, run(0.5)))))
    assert not {"script", "link", "iframe", "a", "base"} & set(page.seen)
    asked = [value for name, value in page.attributes if name in {"src", "href", "srcset"}]
    assert asked
    assert all(value.startswith(_SVG) for value in asked)
    assert "url(" not in render(document(target("whole", run(0.5))))
    for picture in page.pictures:
        references = [
            value
            for element in ElementTree.fromstring(picture).iter()
            for name, value in element.attrib.items()
            if name.endswith("href")
        ]
        assert all(value.startswith("#") for value in references)
        assert "@import" not in picture

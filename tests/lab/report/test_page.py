"""The page of a report: reproducible, and text that stays text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from decentlam.lab.report import (
    write,
)
from tests.lab.report.written_runs import (
    EVIL,
    METHODS,
    embedded_data,
    write_hostile_run,
    write_run,
)


def test_the_same_runs_give_the_same_bytes(tmp_path: Path):
    runs = [write_run(tmp_path / method, method) for method in METHODS]
    first, second = tmp_path / "new" / "1.html", tmp_path / "2.html"
    assert write(runs, first).read_bytes() == write(runs[::-1], second).read_bytes()


class Elements(HTMLParser):
    """All start tags of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_no_text_of_a_run_becomes_markup(tmp_path: Path):
    runs = [write_hostile_run(tmp_path / "evil"), write_run(tmp_path / "good")]
    page = write(runs, tmp_path / "page.html")
    tags = Elements(page.read_text()).tags
    assert [attributes for tag, attributes in tags if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert not {"img", "b", "iframe", "link", "object"} & {tag for tag, _ in tags}
    assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
    assert EVIL in [group["label"] for group in embedded_data(page)["groups"]]

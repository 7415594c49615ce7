"""The page of a report in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from decentlam.lab.report import write
from tests import pages
from tests.lab.report.test_nodes import record, write_nodes
from tests.lab.report.written_runs import (
    EPOCHS,
    EVIL,
    METHODS,
    embedded_data,
    write_hostile_run,
    write_run,
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[pages.Browser]:
    with pages.browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five methods with three seeds each, one run of which diverged."""
    study = tmp_path_factory.mktemp("study")
    for method in METHODS:
        for seed in range(3):
            diverged = (method, seed) == ("dmsgd", 2)
            status, until = ("diverged", 7) if diverged else ("finished", EPOCHS)
            write_run(study / "runs" / f"{method}-{seed}", method, seed, status, until)
    return write([study], study / "report.html")


@pytest.fixture
def opened(chromium: pages.Browser, page: Path) -> pages.Browser:
    chromium.size(1280, 900)
    chromium.media()
    chromium.open(page)
    return chromium


def test_the_page_opens_without_errors_and_asks_for_nothing_else(opened, page: Path):
    opened.requests()
    opened.open(page)
    for button in range(len(opened.texts(".toggle"))):
        opened.run("document.querySelectorAll('.toggle')[arguments[0]].click()", button)
    assert opened.messages() == []
    assert opened.requests() == [page.resolve().as_uri()]
    assert opened.run("return document.querySelectorAll('#charts svg .curve').length") == 0


def test_pointing_at_a_chart_reads_the_values_of_all_methods(opened, page: Path):
    opened.hover("#chart-averaged .plot > svg", 0.5)
    head, _, *rows = opened.text("#chart-averaged .readout").split("\n")
    epoch = int(head.removeprefix("epoch "))
    assert 4 <= epoch <= 8
    data = embedded_data(page)
    chart = next(c for c in data["charts"] if c["name"] == "averaged")
    label = {group["index"]: group["label"] for group in data["groups"]}
    values = {label[line["group"]]: line["y"][epoch] for line in chart["lines"] if not line["name"]}
    shown = dict(row.split("\t")[:2] for row in rows if "diverged" not in row)
    assert shown == {name: f"{value:.2f} %" for name, value in values.items()}
    assert list(shown) == sorted(values, key=lambda name: -values[name])
    assert opened.run("return document.querySelectorAll('#chart-averaged .cross line').length") == 1


def test_arrow_keys_read_the_values_too(opened):
    svg = "#chart-loss .plot > svg"
    right, end, escape = "\ue014", "\ue010", "\ue00c"  # as WebDriver spells keys
    opened.type(svg, right)
    first = opened.text("#chart-loss .readout")
    opened.type(svg, right)
    assert first != opened.text("#chart-loss .readout")
    opened.type(svg, end)
    assert opened.text("#chart-loss .readout").startswith("epoch 12\n")
    opened.type(svg, escape)
    assert opened.run("return document.querySelector('#chart-loss .readout').hidden")


def test_the_legend_hides_and_shows_a_line(opened):
    count = "return document.querySelectorAll('.curve[data-group=\"4\"]').length"
    everything = opened.run(count)
    assert everything == 4  # the fifth chart has one line for all: the learning rate
    opened.click('.legend button[data-group="4"]')
    assert opened.run(count) == 0
    pressed = "return document.querySelector('.legend [data-group=\"4\"]').ariaPressed"
    assert opened.run(pressed) == "false"
    opened.run("document.querySelector('.legend [data-group=\"4\"]').focus()")
    opened.type('.legend button[data-group="4"]', " ")  # by keyboard
    assert opened.run(count) == everything


def test_the_log_scale_changes_the_axis(opened):
    ticks = "#chart-consensus_distance .tick.y"
    logarithmic = opened.texts(ticks)
    opened.click("#chart-consensus_distance .toggle")
    linear = [float(tick) for tick in opened.texts(ticks)]
    assert opened.texts(ticks) != logarithmic
    assert linear[0] == 0.0 and linear[2] == pytest.approx(2 * linear[1])


def test_hostile_text_stays_text(opened, tmp_path: Path):
    runs = [write_hostile_run(tmp_path / "evil"), write_run(tmp_path / "good", "dmsgd")]
    write_nodes(runs[0], record(0, 5, time=2e9, warnings=[EVIL]), record(1, 5, time=2e9, loss=EVIL))
    opened.open(write(runs[:1], tmp_path / "alone.html"))
    assert EVIL in opened.text("#state .odd")
    opened.size(390, 844)
    opened.open(write(runs, tmp_path / "page.html"))
    opened.hover("#chart-averaged .plot > svg", 0.5)
    assert opened.messages() == []
    assert opened.run("return document.documentElement.scrollWidth") == 390
    assert opened.run("return document.title").startswith(EVIL.split("'")[0])
    assert EVIL in opened.text("#chart-averaged .readout")
    assert EVIL in opened.run("return document.querySelector('.run code').textContent")


def test_the_page_is_dark_for_those_who_prefer_it_and_white_on_paper(opened):
    paper = "return getComputedStyle(document.body).backgroundColor"
    line = "return getComputedStyle(document.querySelector('.curve[data-group=\"0\"]')).stroke"
    assert (opened.run(paper), opened.run(line)) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")
    opened.media(scheme="dark")
    assert opened.run(paper) == "rgb(21, 23, 27)"
    assert opened.run(line) == "oklch(0.72 0 0)"  # black, made light enough
    opened.media("print", "dark")
    assert (opened.run(paper), opened.run(line)) == ("rgb(255, 255, 255)", "rgb(0, 0, 0)")


def test_the_reader_chooses_among_settings(opened, tmp_path: Path):
    runs = [
        write_run(tmp_path / f"{method}-{batch}", method, batch=batch)
        for method in ("dmsgd", "decentlam")
        for batch in (1024, 8192)
    ]
    opened.open(write(runs, tmp_path / "page.html"))
    curves_of = (
        "return [...document.querySelectorAll('#chart-averaged .curve')]"
        ".map((curve) => curve.dataset.group)"
    )
    assert opened.texts(".settings span") == ["batch 1024", "batch 8192"]
    assert opened.run(curves_of) == ["0", "1"]
    opened.click(".settings label:last-of-type")
    assert opened.run(curves_of) == ["2", "3"]
    assert opened.messages() == []

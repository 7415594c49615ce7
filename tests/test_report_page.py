"""The page of a report: lines, tables, drawings, and text that stays text."""

from __future__ import annotations

import json
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
from written_runs import EVIL, METHODS, embedded_data, only_group, write_hostile_run, write_run

from decentlam import ALGORITHMS, TOPOLOGIES
from decentlam.lab import style
from decentlam.lab.report import groups, looks, network, text, timing, write
from decentlam.lab.report.runs import read
from decentlam.lab.report.table import COLUMNS


def test_lines_have_the_look_of_all_figures_and_can_be_read_in_the_dark(tmp_path: Path):
    styled = [method for method in ALGORITHMS if groups.method_label(method) != method]
    runs = [read(write_run(tmp_path / method, method)) for method in styled]
    (setting,) = groups.collect(runs)
    found = looks.looks([setting])
    assert [group.method for group in setting.groups] == styled and set(METHODS) < set(styled)
    for group in setting.groups:
        look, line = found[group.index], style.line(group.method)
        assert (look.light, look.width) == (line["color"], line["linewidth"])
        assert bool(look.dash) == (line["linestyle"] != "-")
        assert looks.contrast(look.dark, looks.DARK_PAPER) >= 4.5
    assert looks.contrast("#000000", "#ffffff") == pytest.approx(21)


def test_the_parts_of_a_step_sum_to_the_step(tmp_path: Path):
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"][1:]  # without the warm-up
    found = timing.split(only_group([run]))
    assert found is not None
    assert sum(found.values()) == pytest.approx(statistics.mean(r["step_seconds"] for r in steps))
    assert found["data"] == pytest.approx(statistics.mean(r["data_seconds"] for r in steps))
    assert found["other"] > 0


def test_simulated_nodes_do_not_wait(tmp_path: Path):
    column = COLUMNS[-1]
    assert column.value(only_group([write_run(tmp_path / "a", simulated=True)])) is None
    real = column.value(only_group([write_run(tmp_path / "b", simulated=False)]))
    assert real is not None and real.mean == pytest.approx(METHODS["decentlam"][2])


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_is_drawn_with_all_its_nodes_and_edges(tmp_path: Path, name: str):
    (drawing,) = network.drawings([read(write_run(tmp_path / "run", topology=name))])
    graph = TOPOLOGIES[name](8)
    panels = drawing.split("<svg")[1:]
    assert len(panels) == min(graph.period or 4, 4)
    for step, panel in enumerate(panels):
        directed = int((graph.weights(step) - graph.weights(step).diag().diag() > 0).sum())
        assert panel.count("<circle") == 8
        assert panel.count("<path") == (directed // 2 if graph.symmetric else directed)
    repeats = f"repeats every {graph.period} steps" if graph.period else "Random at every step"
    assert (repeats in drawing) == (graph.period != 1)


def test_a_network_that_cannot_be_drawn_is_said_so(tmp_path: Path):
    runs = [
        read(write_run(tmp_path / "a", topology="<b>mine</b>")),
        read(write_run(tmp_path / "b", topology="complete", nodes=256)),
        read(write_run(tmp_path / "c", topology="ring", nodes=1)),
    ]
    unknown, large, lone = network.drawings(runs)
    assert "is not drawn: unknown topology" in unknown and "<b>" not in unknown
    assert "too large to draw" in large and "<circle" not in large
    assert lone.count("<circle") == 1 and "<path" not in lone


def test_numbers_read_well():
    assert [text.quantity(v) for v in (1234.5, 12.345, 0.0012345, 1.2e-7, 0, None)] == [
        "1,234", "12.3", "0.00123", "1.2e-07", "0", "–",
    ]  # fmt: skip
    assert text.quantity_spread(text.Spread(0.04774, 0.00327)) == "0.0477 ± 0.0033"
    assert text.percent_spread(text.Spread(0.96739, 0.00541)) == "96.74 ± 0.54"
    assert [text.duration(v) for v in (0.0042, 12, 200, 7500)] == [
        "4.20 ms", "12.0 s", "3 min 20 s", "2 h 5 min",
    ]  # fmt: skip
    assert text.listed(["a", "b", "c"]) == "a, b and c"


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

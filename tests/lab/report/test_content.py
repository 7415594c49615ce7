"""What the page says, and that text of a run stays text."""

from __future__ import annotations

import json
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest

from decentlam import TOPOLOGIES
from decentlam.lab.report import write
from decentlam.lab.report.content import COLUMNS, split
from tests.lab.report.written_runs import (
    EVIL,
    METHODS,
    embedded_data,
    only_group,
    write_hostile_run,
    write_run,
)


def test_the_same_runs_give_the_same_bytes(tmp_path: Path):
    runs = [write_run(tmp_path / method, method) for method in METHODS]
    first, second = tmp_path / "new" / "1.html", tmp_path / "2.html"
    assert write(runs, first).read_bytes() == write(runs[::-1], second).read_bytes()


def test_no_text_of_a_run_becomes_markup(tmp_path: Path):
    runs = [write_hostile_run(tmp_path / "evil"), write_run(tmp_path / "good")]
    page = write(runs, tmp_path / "page.html")
    tags: list[tuple[str, dict[str, str | None]]] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, values: tags.append((tag, dict(values)))  # type: ignore[method-assign]
    parser.feed(page.read_text())
    assert [attributes for tag, attributes in tags if tag == "script"] == [
        {"type": "application/json", "id": "data"},
        {},
    ]
    assert not {"img", "b", "iframe", "link", "object"} & {tag for tag, _ in tags}
    assert EVIL in [group["label"] for group in embedded_data(page)["groups"]]


def test_the_parts_of_a_step_sum_to_the_step(tmp_path: Path):
    run = write_run(tmp_path / "run")
    records = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    steps = [r for r in records if r["kind"] == "step"][1:]  # without the warm-up
    found = split(only_group([run]))
    assert found is not None and found["other"] > 0
    assert sum(found.values()) == pytest.approx(statistics.mean(r["step_seconds"] for r in steps))
    assert found["data"] == pytest.approx(statistics.mean(r["data_seconds"] for r in steps))


def test_simulated_nodes_do_not_wait(tmp_path: Path):
    wait = COLUMNS[-1].value
    assert wait(only_group([write_run(tmp_path / "a", simulated=True)])) is None
    real = wait(only_group([write_run(tmp_path / "b", simulated=False)]))
    assert real is not None and real[0] == pytest.approx(METHODS["decentlam"][2])


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_topology_is_drawn_with_all_its_nodes_and_edges(tmp_path: Path, name: str):
    run = write_run(tmp_path / "run", topology=name)
    (drawing,) = embedded_data(write([run], tmp_path / "page.html"))["networks"]
    graph = TOPOLOGIES[name](8)
    assert len(drawing["places"]) == 8
    assert len(drawing["panels"]) == min(graph.period or 4, 4)
    for step, edges in enumerate(drawing["panels"]):
        directed = int((graph.weights(step) - graph.weights(step).diag().diag() > 0).sum())
        assert len(edges) == (directed // 2 if graph.symmetric else directed)
    repeats = f"repeats every {graph.period} steps" if graph.period else "Random at every step"
    assert (repeats in drawing["caption"]) == (graph.period != 1)


def test_a_network_that_cannot_be_drawn_is_said_so(tmp_path: Path):
    runs = [
        write_run(tmp_path / "a", topology="<b>mine</b>"),
        write_run(tmp_path / "b", topology="complete", nodes=256),
    ]
    unknown, large = embedded_data(write(runs, tmp_path / "page.html"))["networks"]
    assert "is not drawn: unknown topology" in unknown["caption"] and not unknown["panels"]
    assert "too large to draw" in large["caption"] and not large["panels"]

"""What the processes of a run wrote, read while they write: also if it is cut or hostile."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from decentlam.lab.report import write
from decentlam.lab.report.nodes import Nodes, curves, now
from tests.lab.report.written_runs import EVIL, embedded_data, write_hostile_run, write_run


def record(node: int, step: int, **values: Any) -> dict[str, Any]:
    return {
        "time": 1e9 + step / 10,
        "node": node,
        "member": node,
        "members": [0, 1, 2],
        "step": step,
        "total_steps": 400,
        "lr": 0.1,
        "step_seconds": 0.1,
        "wait_seconds": 0.02,
        "bytes_sent": 1000.0,
        "disagreement": 0.5,
        "loss": 1.0 + node,
        "warnings": [],
        **values,
    }


def write_nodes(directory: Path, *records: dict[str, Any]) -> Path:
    (directory / "nodes").mkdir(parents=True, exist_ok=True)
    for one in records:
        with (directory / "nodes" / f"{one['member']}.jsonl").open("a") as file:
            file.write(json.dumps(one) + "\n")
    return directory


INFO = {"recipe": {"method": "decentlam", "topology": "ring", "nodes": 3}, "parameters": 10**6}


def shown(directory: Path) -> dict[str, Any]:
    found = now(Nodes(directory).follow(), INFO)
    assert found is not None
    return found | {"numbers": {what: (value, more) for what, value, more in found["numbers"]}}


def test_numbers_of_all_nodes_by_hand(tmp_path: Path) -> None:
    late = {"wait_seconds": 0.0, "step_seconds": 0.12}  # 120 ms of its own, the others have 80
    write_nodes(tmp_path, record(0, 100), record(1, 100), record(2, 100, **late))
    seen = shown(tmp_path)
    assert seen["numbers"]["step"] == ("100 of 400", "")
    assert seen["numbers"]["steps per second"] == ("10.0", "30.0 s left")
    assert seen["numbers"]["nodes"] == ("3", "all there")
    assert seen["numbers"]["loss"] == ("2.00", "1.00 to 3.00")
    assert seen["numbers"]["sent per node"] == ("10 kB/s", "1 kB a step; an all-reduce 5.33 MB")
    assert seen["numbers"]["slowest"][0] == "node 2"
    assert seen["nodes"][0]["name"] == "node 2"
    assert seen["nodes"][0]["late"] == pytest.approx(0.5)
    assert seen["nodes"][1]["split"] == pytest.approx([0, 0.08, 0.02])
    assert seen["edges"] == [(0, 1), (0, 2), (1, 2)]


def test_who_is_no_member_or_silent_is_lost_and_who_was_not_there_at_first_has_joined(
    tmp_path: Path,
) -> None:
    write_nodes(tmp_path, *(record(k, 1) for k in range(3)))
    fresh = {"members": [0, 2, 3], "time": 1e9 + 40}
    write_nodes(tmp_path, record(0, 9, **fresh), record(2, 9, time=1e9 + 5))
    write_nodes(tmp_path, record(1, 9, member=3, **fresh))
    states = {row["member"]: row["state"] for row in shown(tmp_path)["nodes"]}
    assert states == {0: "ok", 1: "lost", 2: "lost", 3: "joined"}
    assert shown(tmp_path)["numbers"]["nodes"] == ("2", "2 lost, 1 joined")
    write_nodes(tmp_path, record(0, 10, ended=True, **fresh), record(1, 10, member=3, **fresh))
    assert {row["state"] for row in shown(tmp_path)["nodes"]} == {"ended", "lost", "joined"}


def test_files_are_read_on_and_a_line_that_is_still_written_is_read_later(tmp_path: Path) -> None:
    nodes = Nodes(write_nodes(tmp_path, record(0, 1)))
    file = tmp_path / "nodes" / "0.jsonl"
    with file.open("a") as out:
        out.write(json.dumps(record(0, 2))[:20])
    assert nodes.follow()[0].last["step"] == 1
    file.write_text(json.dumps(record(0, 1)) + "\n" + json.dumps(record(0, 2)) + "\n")
    assert nodes.follow()[0].last["step"] == 2
    write_nodes(tmp_path, record(0, 1))  # resumed from there
    (process,) = nodes.follow()
    assert [one["step"] for one in process.records] == [1, 1]
    file.write_text(json.dumps(record(0, 0)) + "\n")  # another run in the same directory
    assert [one["step"] for one in nodes.follow()[0].records] == [0]


def test_curves_are_mean_lowest_and_highest_over_the_nodes(tmp_path: Path) -> None:
    write_nodes(tmp_path, *(record(k, step, loss=k + step) for k in range(3) for step in (1, 2)))
    processes = Nodes(tmp_path).follow()
    assert curves(processes, 1.0)["loss"] == {
        "x": [2, 2],
        "y": [2, 3],
        "low": [1, 2],
        "high": [3, 4],
    }
    write_nodes(tmp_path, *(record(0, step) for step in range(3, 9000)))
    process = Nodes(tmp_path).follow()[0]
    assert len(process.records) < 4000 and process.last["step"] == 8999
    assert len(curves([process], 1.0)["loss"]["x"]) <= 201


HOSTILE: tuple[Any, ...] = (
    *("", "{", "[1]", "null", '"text"', "[" * 100_000, "\x00\xff", EVIL),
    {"time": EVIL, "step": 1},
    record(0, 5, members=EVIL),
    record(0, 9, members=[EVIL, None, {}, 10], warnings=[EVIL, 3], loss=EVIL, lr=float("nan")),
    record(0, 5) | {"step": float("inf")},
    record(0, 5, warnings=EVIL, disagreement=[1], bytes_sent={}, total_steps=-1),
    record(10**9, 6, step_seconds=0.0, wait_seconds=-5.0, total_steps=0),
)


def test_cut_and_hostile_records_give_a_page(tmp_path: Path) -> None:
    run = write_hostile_run(tmp_path / "run")
    (run / "nodes").mkdir()
    for k, content in enumerate(HOSTILE):
        text = content if isinstance(content, str) else json.dumps(content)
        (run / "nodes" / f"{k}.jsonl").write_text(text + "\n", errors="replace")
    (run / "nodes" / f"{EVIL.replace('/', '')}.jsonl").write_text(json.dumps(record(0, 5)) + "\n")
    info = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(info | {"started": EVIL}))
    page = write([run], tmp_path / "page.html")
    data = embedded_data(page)
    assert data["now"] is not None and EVIL in " ".join(data["now"]["warnings"])
    assert EVIL in [group["label"] for group in data["groups"]]
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, values: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(page.read_text())
    assert tags.count("script") == 2
    assert not {"img", "b", "iframe", "link", "object"} & set(tags)


def test_processes_of_an_earlier_run_in_the_same_directory_do_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")  # which began in 2026
    write_nodes(run, record(0, 5), record(1, 5, time=2e9))
    (row,) = embedded_data(write([run], tmp_path / "page.html"))["now"]["nodes"]
    assert row["member"] == 1

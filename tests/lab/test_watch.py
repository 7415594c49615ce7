"""A run while it trains, in a real browser: 4 processes, an elastic run with a death, 100 nodes."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decentlam.lab.recipes import Recipe
from decentlam.lab.train import train
from decentlam.lab.watch import serving, show_in_terminal
from tests import pages
from tests.helpers.processes import HANG_SECONDS, leave_fork_server
from tests.lab.helpers import recipe
from tests.lab.report.test_nodes import record, write_nodes
from tests.lab.report.written_runs import write_run

LONG = recipe(nodes=4, shards="iid", epochs=1e5, evaluate_every=1.0, precision="float32")


@pytest.fixture(scope="module")
def chromium() -> Iterator[pages.Browser]:
    with pages.browser() as browser:
        yield browser


def train_on(directory: str, plan: Recipe, elastic: bool) -> None:
    leave_fork_server()
    os.setpgrp()  # all of them end together
    train(plan, Path(directory), elastic=elastic, note=print)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Start a run in the background, which ends with the test."""
    found: list[multiprocessing.process.BaseProcess] = []

    def start(**options: Any) -> Path:
        context = multiprocessing.get_context("forkserver")
        work = (str(tmp_path / "run"), LONG, options.get("elastic", False))
        process = context.Process(target=train_on, args=work)
        process.start()
        found.append(process)
        return tmp_path / "run"

    yield start
    for process in found:
        assert process.pid is not None
        os.killpg(process.pid, signal.SIGKILL)
        process.join()


def eventually(condition: Callable[[], Any], process: str = "the page") -> Any:
    deadline = time.monotonic() + HANG_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, process
        time.sleep(0.1)
    return found


NUMBERS = """
return Object.fromEntries([...document.querySelectorAll("#state .numbers > div")].map(
  (one) => [one.querySelector("dt").textContent,
    [...one.querySelectorAll("dd")].map((dd) => dd.textContent)]))
"""


def step_of(page: pages.Browser) -> int:
    numbers = page.run(NUMBERS)
    return int(numbers["step"][0].split(" of ")[0].replace(",", "")) if numbers else 0


@pytest.mark.system
def test_step_and_loss_advance_on_the_page_of_4_processes(
    chromium: pages.Browser, started: Callable[..., Path]
) -> None:
    with serving(started()) as address:
        chromium.visit(address)
        first = eventually(lambda: step_of(chromium))
        losses = chromium.run(NUMBERS)["loss"]
        eventually(lambda: step_of(chromium) > first)
        eventually(lambda: chromium.run(NUMBERS)["loss"] != losses)
        assert chromium.run(NUMBERS)["nodes"] == ["4", "all there"]
        assert len(chromium.texts("#state circle")) == 4 and chromium.texts("#state .bars .name")
        eventually(lambda: chromium.texts("#chart-averaged .curve"))
        eventually(lambda: chromium.texts("#chart-disagreement .curve"))
        assert chromium.messages() == []
        asked = {url for url in chromium.requests() if url.startswith("http")}
        assert asked <= {address, f"{address}values"}


@pytest.mark.system
def test_a_killed_node_of_an_elastic_run_is_marked_and_so_is_the_newcomer(
    chromium: pages.Browser, started: Callable[..., Path]
) -> None:
    directory = started(elastic=True)
    with serving(directory) as address:
        chromium.visit(address)
        eventually(lambda: len(chromium.texts("#state circle")) == 4)
        victim = eventually(lambda: pid_of(directory, 2))
        os.kill(victim, signal.SIGKILL)
        eventually(lambda: chromium.texts("#state circle.lost"))
        assert chromium.texts("#state .name.lost")[0].startswith("process 2")
        eventually(lambda: chromium.texts("#state circle.joined"))
        assert chromium.messages() == []


def pid_of(directory: Path, member: int) -> int | None:
    """Return the process that writes the file of this member."""
    file = directory / "nodes" / f"{member}.jsonl"
    return int(json.loads(file.read_text().splitlines()[-1])["pid"]) if file.exists() else None


def test_a_hundred_nodes_are_readable(chromium: pages.Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", status=None, nodes=100, topology="ring", simulated=False)
    members = list(range(100))
    for k in members:
        own = 0.08 + 0.0002 * k
        for step in range(0, 200, 20):
            times = {"time": 2e9 + step, "step_seconds": 0.1, "wait_seconds": 0.1 - own}
            write_nodes(run, record(k, step, members=members, **times))
    with serving(run) as address:
        chromium.size(390, 900)
        chromium.media()
        chromium.visit(address)
        assert len(chromium.texts("#state circle")) == 100
        names = [name.split("\n")[0] for name in chromium.texts("#state .name")]
        assert names == [f"node {k}" for k in range(99, 91, -1)]
        assert "92 others are not listed" in chromium.text("#state")
        assert chromium.run("return document.documentElement.scrollWidth") == 390
        assert chromium.messages() == []


def ask(address: str, **headers: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(address, headers=headers), timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""


def test_the_server_has_the_page_and_its_values_and_nothing_else(tmp_path: Path) -> None:
    with serving(write_run(tmp_path / "run")) as address:
        assert address.startswith("http://127.0.0.1:")
        code, text = ask(address)
        assert code == 200 and "Content-Security-Policy" in text
        assert json.loads(ask(f"{address}values")[1])["live"] is None  # it has ended
        for path in ("run.json", "../run.json", "%2e%2e/run.json", "nodes/0.jsonl"):
            assert ask(address + path)[0] == 404
        assert ask(address, Host="evil.example")[0] == 403  # a name that another site gave us


def test_a_run_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    with serving(tmp_path) as address:
        values = json.loads(ask(f"{address}values")[1])
    assert values["lead"] == "Nothing is written yet." and values["live"]


def test_the_terminal_has_a_line_per_node_the_latest_first(tmp_path: Path) -> None:
    own: dict[str, Any] = {"time": 2e9, "ended": True}
    run = write_run(tmp_path / "run", nodes=3, simulated=False)
    late = record(2, 7, **own, wait_seconds=0.0, warnings=["step 5 was \x1b[2Jskipped"])
    write_nodes(run, record(0, 7, **own), record(1, 7, **own), late)
    out = io.StringIO()
    show_in_terminal(run, out)
    rows = [line.split() for line in out.getvalue().splitlines() if line.startswith("| node ")]
    rows = [row for row in rows if row[2].isdigit()]
    assert [row[2] for row in rows] == ["2", "0", "1"]
    assert [cell for cell in rows[0] if cell != "|"][2:6] == ["ended", "+25%", "7", "3"]
    assert "node 2: step 5 was  [2Jskipped" in out.getvalue()


def test_the_terminal_says_that_nothing_was_written(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    out = io.StringIO()
    show_in_terminal(tmp_path / "run", out)
    assert out.getvalue() == "Nothing was written.\n"

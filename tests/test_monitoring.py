"""What a record says, where it goes, and that mixing tells the disagreement."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import decentlam
from tests.helpers.processes import HANG_SECONDS, run_processes

NODES, STEPS = 4, 30


def trained(
    optimizer: Any, model: torch.nn.Module, watch: decentlam.Monitor, steps: int = STEPS
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        watch.log(loss=loss, double=2 * loss)
        optimizer.step()


def alone(to: Any, **options: Any) -> tuple[Any, Any, decentlam.Monitor]:
    model = torch.nn.Linear(3, 1)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1)
    return optimizer, model, decentlam.monitor(optimizer, to, **options)


def test_a_function_gets_plain_records_of_the_steps_since_the_last() -> None:
    records: list[dict[str, Any]] = []
    optimizer, model, watch = alone(records.append, every_seconds=0, total_steps=STEPS)
    trained(optimizer, model, watch)
    watch.close()
    watch.close()
    *records, end = records
    assert end == records[-1] | {"time": end["time"], "ended": True}
    assert json.loads(json.dumps(records)) == records
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for record in records:
        assert record["double"] == pytest.approx(2 * record["loss"])
        assert (record["node"], record["members"], record["peers"]) == (0, [0], [])
        assert 0 <= record["wait_seconds"] <= record["step_seconds"]
        assert (record["total_steps"], record["lr"], record["disagreement"]) == (STEPS, 0.1, None)


def test_records_are_as_rare_as_asked_and_means_of_what_lay_between() -> None:
    records: list[dict[str, Any]] = []
    optimizer, model, watch = alone(records.append, every_seconds=1e6)
    trained(optimizer, model, watch, 1)
    losses: list[float] = []
    for _ in range(3):
        before = len(records)
        watch.log(own=float(len(losses)))
        losses.append(float(len(losses)))
        trained(optimizer, model, watch, 1)
        assert len(records) == before == 1
    watch._every = 0.0
    trained(optimizer, model, watch, 1)
    assert [record["step"] for record in records] == [1, 5]
    assert records[1]["own"] == sum(losses) / 3


def test_loading_counts_the_seconds_until_a_batch_is_there() -> None:
    records: list[dict[str, Any]] = []
    optimizer, model, watch = alone(records.append, every_seconds=0)
    source = watch.loading([1, 2])
    assert next(source) == 1
    trained(optimizer, model, watch, 1)
    assert 0 <= records[0]["data_seconds"] <= records[0]["step_seconds"]
    assert list(source) == [2]


class Board:
    """Keeps scalars as a SummaryWriter does."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


class WandbRun:
    """Has the one method of `wandb.run` that is called."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)


def test_loggers_get_the_numbers_and_no_others() -> None:
    board, run = Board(), WandbRun()
    for to in (board, run):
        trained(*alone(to, every_seconds=0), steps=1)
    names = {name for name, _, _ in board.scalars}
    assert names == set(run.logged[0]) and {step for _, _, step in board.scalars} == {1}
    assert {"decentlam/loss", "decentlam/wait_seconds", "decentlam/bytes_sent"} <= names
    assert not {"decentlam/members", "decentlam/time"} & names


def test_warnings_of_the_library_are_told_and_the_handler_goes() -> None:
    records: list[dict[str, Any]] = []
    optimizer, model, watch = alone(records.append, every_seconds=0)
    logging.getLogger("decentlam.somewhere").warning("the sky %s", "falls")
    trained(optimizer, model, watch, 1)
    assert records[0]["warnings"] == ["the sky falls"]
    watch.close()
    assert watch._warnings not in logging.getLogger("decentlam").handlers


def test_bad_arguments_are_refused_with_what_is_allowed() -> None:
    model = torch.nn.Linear(3, 1)
    with pytest.raises(TypeError, match="needs an optimizer of decentlam, got SGD"):
        decentlam.monitor(torch.optim.SGD(model.parameters()), print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a SummaryWriter, wandb\.run or a function"):
        alone(3)
    with pytest.raises(ValueError, match="every_seconds must be 0 or more"):
        alone(print, every_seconds=-1)


# Real processes ----------------------------------------------------------------------------------


def scenario(directory: str, topology: str) -> list[tuple[float | None, float]]:
    """Train on numbers that pull the nodes apart; return what is told of it and what is true."""
    torch.manual_seed(7 + dist.get_rank())
    model = torch.nn.Linear(1000, 1, bias=False)
    optimizer = decentlam.DSGD(model.parameters(), lr=1.0, topology=topology, overlap="none")
    watch = decentlam.monitor(optimizer, directory, every_seconds=0)
    found: list[tuple[float | None, float]] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.weight.grad = torch.randn_like(model.weight)  # independent on every node
        before = optimizer.consensus_distance()
        optimizer.step()
        assert watch._latest is not None
        found.append((watch._latest["disagreement"], before))
    watch.close()
    return found


def local_steps() -> tuple[float, float]:
    """Return the bytes per step in a record of four local steps, and those of an average."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Linear(100, 1)
    optimizer = decentlam.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    records: list[dict[str, Any]] = []
    watch = decentlam.monitor(optimizer, records.append, every_seconds=0)
    for step in range(5):
        watch._every = 0.0 if step in (0, 4) else math.inf
        optimizer.zero_grad()
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
    statistics = optimizer.statistics
    assert records[1]["wait_seconds"] == pytest.approx(statistics.total_wait_seconds / 4)
    return records[1]["bytes_sent"], statistics.bytes_sent


def see_another_disk(directory: str) -> None:
    """The last process finds its directory somewhere else than the others do."""
    model = torch.nn.Linear(10, 1)
    optimizer = decentlam.DSGD(model.parameters(), lr=1.0, topology="ring")
    hidden = dist.get_rank() == NODES - 1
    watch = decentlam.monitor(optimizer, directory + hidden * "/elsewhere", every_seconds=0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(2, 10)).sum().backward()
        optimizer.step()
        sending: Any = watch._write.__self__._sending  # type: ignore[attr-defined]
        _ = sending and sending.result(HANG_SECONDS)  # else a step is over before a request is
        dist.barrier()
    watch.close()


def observe(directory: str) -> dict[str, Any]:
    see_another_disk(f"{directory}/hidden")
    found = {
        name: scenario(f"{directory}/{name}", name)
        for name in ("bipartite-random-match", "complete")
    }
    return {"local steps": local_steps(), **found}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    directory = tmp_path_factory.mktemp("run")
    return directory, run_processes(observe, NODES, (str(directory),))


@pytest.mark.parametrize("name", ["bipartite-random-match", "complete"])
def test_what_mixing_moves_tells_the_disagreement(
    observed: tuple[Path, list[Any]], name: str
) -> None:
    """Messages are x - lr g: models with a fresh, independent gradient of length sqrt(1000)."""
    everyone = [one[name] for one in observed[1]]
    squares = [value**2 for one in everyone for value, _ in one if value is not None]
    told = math.sqrt(sum(squares) / len(squares))
    before = [distance**2 for _, distance in everyone[0]]
    true = math.sqrt(sum(before) / len(before) + 1000 * (NODES - 1) / NODES)
    assert told == pytest.approx(true, rel=0.1)


def test_every_process_writes_a_file_and_process_0_says_what_runs(
    observed: tuple[Path, list[Any]],
) -> None:
    directory = observed[0] / "complete"
    for rank in range(NODES):
        lines = (directory / "nodes" / f"{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records] == [*range(1, STEPS + 1), STEPS]
        assert {record["node"] for record in records} == {rank} and records[-1]["ended"]
    info = json.loads((directory / "run.json").read_text())
    assert info["recipe"]["method"] == "dsgd" and info["recipe"]["nodes"] == NODES
    assert info["parameters"] == 1000


def test_who_does_not_see_the_directory_hands_its_records_to_process_0(
    observed: tuple[Path, list[Any]],
) -> None:
    directory = observed[0] / "hidden"
    assert not (directory / "elsewhere").exists()
    lines = (directory / "nodes" / f"{NODES - 1}.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert len(steps) > STEPS / 2 and steps == sorted(steps)


def test_what_an_average_of_local_steps_costs_is_shared_by_the_steps(
    observed: tuple[Path, list[Any]],
) -> None:
    for one in observed[1]:
        told, average = one["local steps"]
        assert told == 2 * average / 4 > 0

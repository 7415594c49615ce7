"""Training: real nodes do what simulated ones do, a resumed run is the run that never stopped."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from decentlam import ALGORITHMS
from decentlam.lab.recipes import from_json, make
from decentlam.lab.train import Stop, Summary, train
from tests.helpers.processes import run_processes
from tests.lab.helpers import NODES, StopAfter, assert_close, assert_same_run, recipe, records

METHODS = ("decentlam", "dmsgd", "pmsgd")


# With pieces of 3 samples, the last of 2.
NESTEROV = {"nesterov": True}
BATCH_NORM = recipe("awc-dmsgd", model="cnn", micro_batch=3, epochs=2 / 22, hyper=NESTEROV)
LONG = recipe(epochs=30 / 22)


def all_scenarios(directory: Path) -> dict[str, Summary]:
    """One after the other in this process, which is one of the nodes."""
    summaries = {method: train(recipe(method), directory / method) for method in METHODS}
    summaries["batch norm"] = train(BATCH_NORM, directory / "batch norm")
    summaries["long"] = train(LONG, directory / "long")
    summaries["interrupted"] = _interrupted(directory / "interrupted")
    summaries["resumed"] = train(LONG, directory / "interrupted", resume=True)
    return summaries


class _Interrupting:
    """Looked at for the second time, which is mid-training, it sends a SIGINT."""

    def __init__(self, stop: Stop) -> None:
        self._stop, self._looks = stop, 0

    @property
    def requested(self) -> bool:
        self._looks += 1
        if self._looks == 2:
            signal.raise_signal(signal.SIGINT)
        return self._stop.requested


def _interrupted(directory: Path) -> Summary:
    """One node of four gets a real SIGINT mid-training."""
    stop = Stop()
    with stop.listening():
        interrupting: Any = _Interrupting(stop) if dist.get_rank() == 3 else stop
        return train(LONG, directory, stop=interrupting)


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[Path, list[dict[str, Summary]]]:
    """All scenarios in one group of four processes; the directory, and what each returned."""
    directory = tmp_path_factory.mktemp("real")
    everyone = run_processes(all_scenarios, NODES, (directory,))
    assert all(isinstance(summaries, dict) for summaries in everyone), everyone
    return directory, everyone


@pytest.mark.parametrize("method", METHODS)
def test_processes_and_simulation_write_the_same_records(method: str, real, tmp_path: Path):
    summary = train(recipe(method), tmp_path / "run", simulate=True)
    assert summary.status == "finished" and summary.step == 9
    kinds = [(record["kind"], record["step"]) for record in records(tmp_path / "run")]
    assert kinds == [
        *[("step", 2), ("step", 4), ("evaluation", 4), ("step", 6), ("step", 8)],
        *[("evaluation", 8), ("step", 9), ("evaluation", 9), ("end", 9)],
    ]
    assert_close(real[0] / method, tmp_path / "run")
    assert records(tmp_path / "run", "evaluation")[-1]["consensus_distance"] > (
        1e-3 if method != "pmsgd" else -1
    )


def test_processes_and_simulation_agree_on_batch_norm_and_micro_batches(real, tmp_path: Path):
    train(BATCH_NORM, tmp_path / "run", simulate=True)
    assert_close(real[0] / "batch norm", tmp_path / "run")


def test_run_json_says_what_was_run(real, tmp_path: Path):
    train(recipe("dmsgd"), tmp_path, simulate=True)
    here, there = (json.loads((d / "run.json").read_text()) for d in (tmp_path, real[0] / "dmsgd"))
    assert from_json(here["recipe"]) == from_json(there["recipe"]) == recipe("dmsgd")
    assert (here["simulated"], there["simulated"]) == (True, False)
    weights = (64 * 128 + 128) + (128 * 128 + 128) + (128 * 10 + 10)
    for info in (here, there):
        assert (info["parameters"], info["steps"], info["steps_per_epoch"]) == (weights, 9, 22)
        assert info["versions"]["torch"] == torch.__version__


def test_nodes_stop_at_the_same_step_when_one_is_interrupted(real):
    _, everyone = real
    stopped = {summaries["interrupted"].step for summaries in everyone}
    assert len(stopped) == 1 and 1 < stopped.pop() < 30
    assert {summaries["interrupted"].status for summaries in everyone} == {"interrupted"}
    assert {summaries["resumed"].status for summaries in everyone} == {"finished"}


def test_resumed_processes_end_where_uninterrupted_ones_do(real):
    assert_same_run(real[0] / "long", real[0] / "interrupted")


@pytest.mark.parametrize("method", ["decentlam", "slowmo"])
def test_resumed_simulation_ends_where_an_uninterrupted_one_does(method: str, tmp_path: Path):
    plan = recipe(method, model="cnn", nodes=2, precision="float32", batch=63 + 1)
    plan = replace(plan, hyper=(("tau", 3),)) if method == "slowmo" else plan
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(plan, whole, simulate=True)
    assert train(plan, parts, simulate=True, stop=StopAfter(1)).step == 2
    assert records(parts)[-1] == {"kind": "end", "step": 2, "status": "interrupted"}
    assert train(plan, parts, simulate=True, resume=True, stop=StopAfter(2)).step == 6
    assert train(plan, parts, simulate=True, resume=True).status == "finished"
    assert_same_run(whole, parts)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path):
    plan = recipe(nodes=2)
    train(plan, tmp_path / "whole", simulate=True)
    train(plan, tmp_path / "killed", simulate=True, stop=StopAfter(2))
    with open(tmp_path / "killed" / "records.jsonl", "a") as file:  # as a run does until it dies
        file.write('{"kind": "step", "step": 6, "loss": 1.0}\n{"kind": "st')
    train(plan, tmp_path / "killed", simulate=True, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("method", ALGORITHMS)
def test_every_method_trains_in_simulation(method: str, tmp_path: Path):
    plan = recipe(method, precision="bfloat16", epochs=2 / 22, evaluate_every=1.0)
    assert train(plan, tmp_path, simulate=True).status == "finished"
    steps = records(tmp_path, "step")
    assert steps[-1]["step"] == 2 and np.isfinite(steps[-1]["loss"])


def test_digits_are_learned(tmp_path: Path):
    summary = train(make("digits", epochs=6.0), tmp_path, simulate=True)
    assert summary.evaluation is not None and summary.evaluation["averaged_top1"] > 0.9
    losses = [record["loss"] for record in records(tmp_path, "step")]
    assert losses[-1] < 0.1 * losses[0]


def test_records_are_the_mean_of_their_steps(tmp_path: Path):
    """One record of four steps against four records of one."""
    plan = recipe(nodes=2, epochs=4 / 22)
    train(replace(plan, log_every=1), tmp_path / "one", simulate=True)
    train(replace(plan, log_every=4), tmp_path / "four", simulate=True)
    ones, (four,) = records(tmp_path / "one", "step"), records(tmp_path / "four", "step")
    assert four["loss"] == pytest.approx(np.mean([one["loss"] for one in ones]), rel=1e-12)
    assert four["lr"] == ones[-1]["lr"] == 0.05
    assert ones[0]["lr"] == pytest.approx(0.005)  # warm-up starts at a tenth and takes a step


def test_micro_batches_add_up_to_the_batch(tmp_path: Path):
    plan = recipe(nodes=2, epochs=4 / 22)
    train(plan, tmp_path / "whole", simulate=True)
    train(replace(plan, micro_batch=10), tmp_path / "pieces", simulate=True)  # 32 = 3 * 10 + 2
    assert_close(tmp_path / "pieces", tmp_path / "whole")


def test_divergence_is_recorded_and_says_so(tmp_path: Path):
    summary = train(recipe(nodes=2, lr=1e18, warmup_epochs=0.0), tmp_path, simulate=True)
    assert summary.status == "diverged" and "NaN or infinite" in summary.message
    last = records(tmp_path)[-1]
    assert last == {"kind": "end", "step": summary.step, "status": "diverged"}


def test_another_run_is_neither_overwritten_nor_continued(tmp_path: Path):
    plan = recipe(nodes=2, epochs=2 / 22, evaluate_every=1.0)
    with pytest.raises(ValueError, match="no run to resume"):
        train(plan, tmp_path / "run", simulate=True, resume=True)
    train(plan, tmp_path / "run", simulate=True)
    before = records(tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already; continue it with --resume"):
        train(plan, tmp_path / "run", simulate=True)
    with pytest.raises(ValueError, match=r"lr was 0\.05, is 0\.1; seed was 3, is 4"):
        train(replace(plan, lr=0.1, seed=4), tmp_path / "run", simulate=True, resume=True)
    with pytest.raises(ValueError, match="it was simulated"):
        train(plan, tmp_path / "run", resume=True)
    assert records(tmp_path / "run") == before

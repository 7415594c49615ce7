"""Training: real nodes do what simulated ones do, a resumed run is the run that never stopped."""

from __future__ import annotations

import doctest
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import runs_train
import torch
from PIL import Image
from runs_train import LONG, METHODS, NODES, recipe
from torch import Tensor

from decentlam import ALGORITHMS
from decentlam.lab import recipes
from decentlam.lab.data import load
from decentlam.lab.recipes import RECIPES, Recipe, from_json, make
from decentlam.lab.train import Summary, evaluation, train
from decentlam.lab.train.numerics import Numerics

pytestmark = pytest.mark.timeout(300)

TIMES = ("seconds", "step_seconds", "data_seconds", "compute_seconds", "wait_seconds")
SPEEDS = (*TIMES, "images_per_second")
FLOAT64 = Numerics("float64", torch.device("cpu"))


def records(directory: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Without what a clock measured."""
    lines = [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in SPEEDS}
        for record in lines
        if kind is None or record["kind"] == kind
    ]


def tensors(content: Any) -> list[Tensor]:
    """All tensors of a checkpoint, in order."""
    if isinstance(content, Tensor):
        return [content]
    parts = content.values() if isinstance(content, dict) else content
    return [t for part in parts for t in tensors(part)] if isinstance(content, dict | list) else []


def checkpoint(directory: Path) -> list[Tensor]:
    files = sorted((directory / "checkpoint").glob("process-*.pt"))
    assert files
    return tensors([torch.load(file, weights_only=True) for file in files])


def assert_same_run(one: Path, other: Path) -> None:
    """Records and all that a checkpoint holds are equal, to the bit."""
    assert records(one) == records(other)
    for a, b in zip(checkpoint(one), checkpoint(other), strict=True):
        assert torch.equal(a, b)


class StopAfter:
    """Asks a simulated run to stop after so many more steps."""

    forward = None

    def __init__(self, steps: int) -> None:
        self.left = steps

    @property
    def requested(self) -> bool:
        self.left -= 1
        return self.left <= 0


# Eight real processes --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[Path, list[dict[str, Summary]]]:
    """All scenarios in one group of eight processes; the directory, and what each returned."""
    directory = tmp_path_factory.mktemp("real")
    # What costs seconds to import is imported once, if nobody has started the server before.
    heavy = ["torch._dynamo", "torch.distributed", "sklearn.model_selection", "decentlam.lab.train"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(heavy)
    forkserver.ensure_running()
    everyone = runs.run_processes(runs_train.all_scenarios, NODES, (directory,), seconds=240)
    assert all(isinstance(summaries, dict) for summaries in everyone), everyone
    return directory, everyone


def assert_close(real: Path, simulated: Path) -> None:
    """The same records but for rounding: 1e-9 in float64, relative to 1 or to the value."""
    for a, b in zip(records(real), records(simulated), strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            assert value == (
                pytest.approx(b[key], rel=1e-9, abs=1e-9) if value != b[key] else b[key]
            )


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


@pytest.mark.parametrize("how", runs_train.BATCH_NORM)
def test_processes_and_simulation_agree_on_batch_norm_and_micro_batches(
    how: str, real, tmp_path: Path
):
    train(runs_train.BATCH_NORM[how], tmp_path / "run", simulate=True)
    assert_close(real[0] / how, tmp_path / "run")


def test_run_json_says_what_was_run(real, tmp_path: Path):
    train(recipe("dmsgd"), tmp_path, simulate=True)
    here, there = (json.loads((d / "run.json").read_text()) for d in (tmp_path, real[0] / "dmsgd"))
    assert from_json(here["recipe"]) == from_json(there["recipe"]) == recipe("dmsgd")
    assert (here["simulated"], there["simulated"]) == (True, False)
    weights = (64 * 128 + 128) + (128 * 128 + 128) + (128 * 10 + 10)
    for info in (here, there):
        assert info["parameters"] == weights and info["message_bytes"] == 8 * weights
        assert (info["steps"], info["steps_per_epoch"], info["peers"]) == (9, 22, 2.0)
        assert info["rho"] == pytest.approx(0.8047, abs=1e-4)
        assert info["versions"]["torch"] == torch.__version__
    assert (tmp_path / "tensorboard").is_dir()


def test_nodes_stop_at_the_same_step_when_one_is_interrupted(real):
    _, everyone = real
    stopped = {summaries["interrupted"].step for summaries in everyone}
    assert len(stopped) == 1 and 1 < stopped.pop() < 30
    assert {summaries["interrupted"].status for summaries in everyone} == {"interrupted"}
    assert {summaries["resumed"].status for summaries in everyone} == {"finished"}


def test_resumed_processes_end_where_uninterrupted_ones_do(real):
    assert_same_run(real[0] / "long", real[0] / "interrupted")


# Simulated -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["decentlam", "slowmo"])
def test_resumed_simulation_ends_where_an_uninterrupted_one_does(method: str, tmp_path: Path):
    plan = recipe(method, model="cnn", nodes=2, precision="float32", batch=63 + 1)
    plan = replace(plan, hyper=(("tau", 3),)) if method == "slowmo" else plan
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(plan, whole, simulate=True)
    assert train(plan, parts, simulate=True, stop=StopAfter(3)).step == 3
    assert records(parts)[-1] == {"kind": "end", "step": 3, "status": "interrupted"}
    assert train(plan, parts, simulate=True, resume=True, stop=StopAfter(2)).step == 5
    assert train(plan, parts, simulate=True, resume=True).status == "finished"
    assert_same_run(whole, parts)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path: Path):
    plan = recipe(nodes=2)
    train(plan, tmp_path / "whole", simulate=True)
    train(plan, tmp_path / "killed", simulate=True, stop=StopAfter(4))
    with open(tmp_path / "killed" / "records.jsonl", "a") as file:  # as a run does until it dies
        file.write('{"kind": "step", "step": 6, "loss": 1.0}\n{"kind": "st')
    train(plan, tmp_path / "killed", simulate=True, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path):
    plan = recipe(nodes=2, epochs=2 / 22)
    train(plan, tmp_path, simulate=True)
    before = records(tmp_path)
    assert train(plan, tmp_path, simulate=True, resume=True).evaluation is not None
    assert records(tmp_path) == before


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
    summary = train(recipe(nodes=2, lr=1e200, warmup_epochs=0.0), tmp_path, simulate=True)
    assert summary.status == "diverged" and "NaN or infinite" in summary.message
    last = records(tmp_path)[-1]
    assert last == {"kind": "end", "step": summary.step, "status": "diverged"}


# Evaluation ------------------------------------------------------------------------------------


def test_scores_are_counted_by_hand():
    """Three classes, so top-5 is everything; of four samples two are right."""
    outputs = torch.tensor([[2.0, 1.0, 0.0]] * 4, dtype=torch.float64)
    model = torch.nn.Identity()
    loss, top1, top5, samples = evaluation.score(
        model, (outputs, torch.tensor([0, 0, 1, 2])), FLOAT64
    )
    assert (top1, top5, samples) == (2, 4, 4)
    lost = np.log(np.exp([2.0, 1.0, 0.0]).sum()) - np.array([2.0, 2.0, 1.0, 0.0])
    assert loss == pytest.approx(lost.sum(), rel=1e-12)


def test_estimated_statistics_are_those_of_training_samples():
    """One batch norm on the pixels: its statistics are theirs, but for a smaller last batch."""
    data = load("digits")
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(1, momentum=0.3), torch.nn.Dropout()).double()
    state = torch.get_rng_state()
    evaluation.estimate_batch_norm(model, data, FLOAT64, seed=0)
    pixels, _ = data.train_batch(torch.arange(len(data.labels)), torch.Generator())
    assert model[0].running_mean.item() == pytest.approx(pixels.mean().item(), abs=5e-3)
    assert model[0].running_var.item() == pytest.approx(pixels.var().item(), rel=5e-3)
    assert model[0].momentum == 0.3 and not model.training
    assert torch.equal(torch.get_rng_state(), state)


# Recipes ---------------------------------------------------------------------------------------


def write_images(root: Path, parts: tuple[str, str], classes: int, each: int, size: int) -> Path:
    draw = np.random.default_rng(0)
    for part in parts:
        for label in range(classes):
            (root / part / f"n{label:02d}").mkdir(parents=True)
            for k in range(each):
                pixels = draw.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / part / f"n{label:02d}" / f"{k}.png")
    return root


def test_cifar_recipe_runs_on_a_tiny_folder(tmp_path: Path):
    images = write_images(tmp_path / "images", ("train", "test"), classes=10, each=1, size=32)
    plan = make("cifar10-resnet20", nodes=2, batch=4, data_path=str(images), epochs=0.5)
    assert plan.lr == 0.1 * 4 / 256 and plan.schedule == "cifar-step"
    assert train(plan, tmp_path / "run", simulate=True).status == "finished"
    assert records(tmp_path / "run", "evaluation")[-1]["averaged_top5"] >= 0.3


def test_imagenet_recipe_runs_on_a_tiny_folder(tmp_path: Path):
    images = write_images(tmp_path / "images", ("train", "val"), classes=2, each=1, size=40)
    tiny = {"nodes": 1, "batch": 2, "epochs": 1.0, "data_path": str(images), "model": "resnet18"}
    plan = make("imagenet-resnet50-32k", **tiny)
    assert (plan.precision, plan.schedule) == ("bfloat16", "imagenet-step")  # of a small batch
    plan = replace(plan, precision="float32")  # bfloat16 convolutions are slow on many CPUs
    summary = train(plan, tmp_path / "run", simulate=True)
    assert summary.status == "finished" and summary.evaluation is not None
    assert summary.evaluation["averaged_top5"] == 1.0


def test_the_papers_settings():
    two, eight, sixteen, most = (make(f"imagenet-resnet50-{k}k") for k in (2, 8, 16, 32))
    assert [r.batch for r in (two, eight, sixteen, most)] == [2048, 8192, 16384, 32768]
    assert [r.lr for r in (two, eight, sixteen, most)] == [0.8, 3.2, 6.4, 12.8]
    assert [r.epochs for r in (two, eight, sixteen, most)] == [90, 90, 120, 120]
    for r in (two, eight, sixteen, most):
        assert (r.nodes, r.topology, r.momentum) == (8, "symmetric-exponential", 0.9)
        assert r.weight_decay == 1e-4 and r.lr * r.warmup_from == pytest.approx(0.1)
    rate = eight.factor(steps_per_epoch=156)
    assert rate(5 * 156) == 1 and rate(30 * 156) == pytest.approx(0.1)
    bias = make("fashion-mlp")
    assert (bias.nodes, bias.topology, bias.batch, bias.lr) == (8, "ring", 8000, 0.05)
    assert (bias.shards, bias.epochs, bias.schedule) == ("label-sorted:2", 20, "constant")


def test_examples_of_recipes_run():
    assert doctest.testmod(recipes) == (0, 1)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_json(name: str):
    plan = make(name, method="qg-dmsgd", hyper={"mu": 0.5})
    assert from_json(json.loads(json.dumps(plan.as_json()))) == plan


BAD = {
    "method": ({"method": "nope"}, "unknown algorithm 'nope'"),
    "topology": ({"topology": "nope"}, "unknown topology 'nope'"),
    "model": ({"model": "nope"}, "unknown model 'nope'; choose from linear, mlp"),
    "data": ({"data": "nope"}, "unknown data 'nope'; choose from digits"),
    "schedule": ({"schedule": "nope"}, "unknown schedule 'nope'; choose from constant"),
    "precision": ({"precision": "float16"}, "unknown precision 'float16'; choose from float32"),
    "batch norm": ({"batch_norm": "nope"}, "choose from average, estimate"),
    "directed": ({"topology": "exponential"}, "needs symmetric weights"),
    "indivisible": ({"batch": 1001, "nodes": 8}, "cannot be divided among 8 nodes; try 1000"),
    "no batch": ({"batch": 0}, "batch must be a whole number of 1 or more, got 0"),
    "half a node": ({"nodes": 1.5}, "nodes must be a whole number"),
    "micro batch": ({"micro_batch": 0}, "micro_batch must be a whole number"),
    "epochs": ({"epochs": 0.0}, "epochs must be above 0, got 0.0"),
    "lr": ({"lr": float("nan")}, "lr must be 0 or more, got nan"),
    "momentum": ({"momentum": 1.0}, "momentum must be in [0, 1)"),
    "seed": ({"seed": -1}, "seed must be a whole number of 0 or more"),
    "hyper": ({"hyper": {"tau": 3}}, "decentlam has no hyper-parameter 'tau'"),
    "stable": ({"stable": "nope"}, "unknown stable 'nope'; choose from auto"),
    "nesterov": ({"method": "dsgd", "nesterov": True}, "dsgd has no hyper-parameter 'nesterov'"),
    "warm-up": ({"epochs": 3.0, "warmup_epochs": 4.0}, "less than all 3.0 epochs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_recipes_are_refused_with_what_is_allowed(case: str):
    changes, words = BAD[case]
    with pytest.raises(ValueError) as caught:
        Recipe(**changes)
    assert words in str(caught.value)


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


# The command, in processes of its own ------------------------------------------------------------


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "decentlam", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_ctrl_c_stops_a_local_process_with_a_checkpoint(tmp_path: Path):
    images = write_images(tmp_path / "images", ("train", "test"), classes=10, each=2, size=32)
    directory = tmp_path / "run"
    plan = ["--data", "cifar10", "--data-path", str(images), "-n", "1", "--batch", "4"]
    process = start(*plan, "--epochs", "100000", "--log-every", "1", "--out", str(directory))
    try:
        deadline = time.monotonic() + 120
        written = directory / "records.jsonl"
        while not (written.exists() and written.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "stopping after this step" in errors and "Traceback" not in errors
    assert f"decentlam train --resume --out {directory}" in errors
    last = records(directory)[-1]
    assert last["status"] == "interrupted" and last["step"] > 0
    meta = json.loads((directory / "checkpoint" / "meta.json").read_text())
    assert (meta["step"], meta["num_nodes"]) == (last["step"], 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_local_processes_train_diverge_and_refuse(tmp_path: Path):
    """`decentlam train` starts them itself; the records are those of the simulation."""
    changes = {k: v for k, v in LONG.as_json().items() if v not in (None, [], False)}
    options = [word for k, v in changes.items() for word in (f"--{k.replace('_', '-')}", str(v))]
    directory = tmp_path / "run"
    process = start(*options, "--out", str(directory), "--json", "--quiet")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and not errors, errors
    assert json.loads(out)["status"] == "finished"
    train(LONG, tmp_path / "simulated", simulate=True)
    assert_close(directory, tmp_path / "simulated")

    wild = ["--lr", "1e200", "--nodes", "2", "--out", str(tmp_path / "wild"), "--quiet"]
    process = start(*options, *wild)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1 and errors.startswith("decentlam: diverged: node")
    assert errors.count("\n") == 1
    assert records(tmp_path / "wild")[-1]["status"] == "diverged"

    process = start(
        "--data", "imagenet", "--data-path", str(tmp_path), "--out", str(tmp_path / "no")
    )
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and errors.startswith("decentlam: imagenet needs --data-path")
    assert errors.count("\n") == 1 and not (tmp_path / "no").exists()

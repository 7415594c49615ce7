"""What simulated modules refuse, with what was given and the cure."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from modules import BATCH, N, batch, make_model, mlp
from torch import nn

from decentlam import NonFiniteError, SimulatedModule, topology


def test_a_refused_step_changes_nothing() -> None:
    name = "cnn with batch norm"
    simulated = SimulatedModule(make_model(name), "decentlam", "ring", N, lr=0.05)
    simulated.step(F.cross_entropy, *batch(name, 0))
    x, buffers = simulated.x.clone(), copy.deepcopy(simulated.buffers)
    inputs, targets = batch(name, 1)
    inputs[2, 0, 0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"step 1 .* node\(s\) \[2\]"):
        simulated.step(F.cross_entropy, inputs, targets)
    assert torch.equal(simulated.x, x)
    for key, buffer in simulated.buffers.items():
        assert torch.equal(buffer, buffers[key])


def mixed_precision() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3).double())


def step_with(inputs: object, targets: object = None, loss_fn: Callable = F.cross_entropy) -> None:
    good = batch("mlp", 0)
    simulated = SimulatedModule(make_model("mlp"), "dsgd", "ring", N)
    simulated.step(
        loss_fn,
        good[0] if inputs is None else inputs,
        good[1] if targets is None else targets,
    )


def load(other: str, n: int = N) -> None:
    saved = SimulatedModule(make_model(other), "dsgd", "ring", n).state_dict()
    SimulatedModule(make_model("cnn with batch norm"), "dsgd", "ring", N).load_state_dict(saved)


BAD: dict[str, tuple[Callable[[], object], list[str]]] = {
    "inputs of other nodes": (
        lambda: step_with(torch.zeros(3, BATCH, 5)),
        ["inputs", "(4, batch, ...)", "(3, 6, 5)", "torch.stack"],
    ),
    "targets of other nodes": (
        lambda: step_with(None, torch.zeros(24)),
        ["targets", "(4, batch, ...)", "(24,)", "torch.stack"],
    ),
    "inputs a list": (lambda: step_with([torch.zeros(5)] * N), ["inputs", "list", "torch.stack"]),
    "inputs a number": (lambda: step_with(torch.tensor(1.0)), ["inputs", "got ()"]),
    "loss not a scalar": (
        lambda: step_with(None, None, lambda out, y: F.cross_entropy(out, y, reduction="none")),
        ["one number per node", "shape (6,)", ".mean()"],
    ),
    "loss a float": (lambda: step_with(None, None, lambda out, y: 0.5), ["one number", "float"]),
    "no micro batch": (
        lambda: SimulatedModule(mlp().double(), "dsgd", "ring", N).step(
            F.cross_entropy, *batch("mlp", 0), micro_batch=0
        ),
        ["micro_batch", "above 0 or None", "got 0"],
    ),
    "nothing to train": (
        lambda: SimulatedModule(mlp().requires_grad_(False), "dsgd", "ring", N),
        ["no parameter to train", "requires_grad"],
    ),
    "several precisions": (
        lambda: SimulatedModule(mixed_precision(), "dsgd", "ring", N),
        ["torch.float32, torch.float64", "model.float()"],
    ),
    "half precision": (
        lambda: SimulatedModule(mlp().half(), "dsgd", "ring", N),
        ["torch.float16", "float32 or float64"],
    ),
    "how many nodes": (
        lambda: SimulatedModule(mlp(), "dsgd", "ring"),
        ["'ring'", "Pass num_nodes", "ring(8)"],
    ),
    "two numbers of nodes": (
        lambda: SimulatedModule(mlp(), "dsgd", topology.ring(5), N),
        ["ring(5)", "there are 4"],
    ),
    "negative lr": (lambda: SimulatedModule(mlp(), "dsgd", "ring", N, -1.0), ["lr", "-1.0"]),
    "lr set to NaN": (
        lambda: setattr(SimulatedModule(mlp(), "dsgd", "ring", N), "lr", math.nan),
        ["lr", "nan"],
    ),
    "unknown hyper-parameter": (
        lambda: SimulatedModule(mlp(), "dmsgd", "ring", N, tau=3),
        ["'tau'", "takes nesterov"],
    ),
    "no such node": (
        lambda: SimulatedModule(mlp(), "dsgd", "ring", N).node(4),
        ["0 to 3", "no 4"],
    ),
    "no node -1": (lambda: SimulatedModule(mlp(), "dsgd", "ring", N).node(-1), ["no -1"]),
    "state of another model": (lambda: load("mlp"), ["buffers {}", "running_mean", "same model"]),
    "state of other nodes": (
        lambda: load("cnn with batch norm", 5),
        ["(5, 4)", "(4, 4)", "same model"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses_with_what_was_given_and_the_cure(case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)

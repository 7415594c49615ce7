"""Averages, nodes and saved states of simulated modules are copies of their own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from modules import N, batch, make_model
from torch import nn

from decentlam import ALGORITHMS, SimulatedModule


def test_averaged_is_the_mean_of_the_nodes() -> None:
    name = "cnn with batch norm"
    simulated = SimulatedModule(make_model(name), "decentlam", "ring", N, lr=0.05)
    for k in range(3):
        simulated.step(F.cross_entropy, *batch(name, k))
    nodes = [simulated.node(i).state_dict() for i in range(N)]
    mean = simulated.averaged()
    for key, value in mean.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(value, torch.stack([node[key] for node in nodes]).mean(0))
        else:
            assert value.item() == 3
    assert isinstance(mean, nn.Sequential)
    assert torch.isfinite(mean.eval()(torch.zeros(1, 1, 8, 8, dtype=torch.float64))).all()


def test_averaged_and_node_are_copies() -> None:
    simulated = SimulatedModule(make_model("mlp"), "dsgd", "ring", N, lr=0.05)
    before = simulated.x.clone()
    for module in (simulated.node(0), simulated.averaged()):
        for p in module.parameters():
            assert p.requires_grad and p.grad is None
            p.data.zero_()
    assert torch.equal(simulated.x, before)


def test_copies_carry_no_gradients() -> None:
    model = make_model("mlp")
    model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
    simulated = SimulatedModule(model, "dsgd", "ring", N)
    assert all(p.grad is None for p in simulated.node(0).parameters())


def test_the_given_model_is_left_alone() -> None:
    name = "cnn with batch norm"
    model = make_model(name)
    before = copy.deepcopy(model.state_dict())
    simulated = SimulatedModule(model, "dmsgd", "ring", N, lr=0.5)
    simulated.step(F.cross_entropy, *batch(name, 0))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert all(p.grad is None for p in model.parameters())


def test_what_happens_to_the_given_model_later_does_not_matter() -> None:
    model = make_model("tied and frozen")
    simulated = SimulatedModule(model, "dmsgd", "ring", N)
    frozen = model.frozen.weight.clone()
    model.eval().requires_grad_(False)
    with torch.no_grad():
        model.frozen.weight.zero_()
    node = simulated.node(0)
    assert torch.equal(node.frozen.weight, frozen)
    assert node.training and node.encode.weight.requires_grad


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resuming_repeats_to_the_bit(algorithm: str) -> None:
    name = "cnn with batch norm"
    hyper = {"tau": 3} if algorithm == "slowmo" else {}
    first, second = (
        SimulatedModule(make_model(name), algorithm, "ring", N, momentum=0.7, **hyper)
        for _ in range(2)
    )
    for k in range(4):
        first.lr = 0.05 * k
        first.step(F.cross_entropy, *batch(name, k))
    saved = copy.deepcopy(first.state_dict())
    second.load_state_dict(saved)
    assert second.lr == first.lr
    for k in range(4, 8):
        for nodes in (first, second):
            nodes.step(F.cross_entropy, *batch(name, k), lr=0.01 * k)
    assert torch.equal(first.x, second.x)
    for key, buffer in first.buffers.items():
        assert torch.equal(buffer, second.buffers[key])
    assert first.lr == pytest.approx(0.15)  # lr of a step holds for that step


def test_state_survives_a_file(tmp_path) -> None:
    name = "cnn with batch norm"
    simulated = SimulatedModule(make_model(name), "decentlam", "ring", N)
    simulated.step(F.cross_entropy, *batch(name, 0))
    torch.save(simulated.state_dict(), tmp_path / "state.pt")
    other = SimulatedModule(make_model(name), "decentlam", "ring", N)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other.x, simulated.x)

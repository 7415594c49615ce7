"""Every class of a method is its algorithm with its own defaults."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import decentlam
from decentlam import algorithms
from decentlam.analysis.stability import choose, growth_rate
from decentlam.options import OptimizerOptions
from decentlam.topology import resolve
from tests.helpers.one_node import Net, assert_close, train
from tests.helpers.quadratic import CLASSES


def test_dsgd_on_one_node_is_sgd() -> None:
    ours, theirs = Net(), Net()
    optimizer = decentlam.DSGD(ours.parameters(), lr=0.1, weight_decay=0.05)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=0.05)
    assert_close(train(ours, optimizer, range(20)), train(theirs, reference, range(20)))


@pytest.mark.parametrize("name", decentlam.ALGORITHMS)
def test_one_node_runs_the_same_however_it_is_asked_for(name: str) -> None:
    algorithm = decentlam.algorithms.make(name)
    ours, theirs = (nn.Parameter(torch.ones(2, 2).double()) for _ in range(2))
    hyper = {"lars": True} if name == "pmsgd-lars" else {"weight_decay": 0.0}
    one = CLASSES[name]([ours], lr=0.1, **hyper)
    other = decentlam.DecentralizedOptimizer([theirs], algorithm, lr=0.1)
    assert one.algorithm == other.algorithm == algorithm.alone()
    for step in range(5):
        for p, optimizer in ((ours, one), (theirs, other)):
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            ((p - step) ** 2).sum().backward()
            optimizer.step()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", CLASSES.values(), ids=lambda kind: kind.__name__)
def test_every_method_is_stable_on_its_default_topology(kind: type) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(1))])
    options = optimizer._options
    network = resolve(options.topology, 9)
    algorithm, network, _ = choose(optimizer.method, network, options.stable)
    if not algorithms.always_everyone(algorithm):
        assert growth_rate(algorithm, network, batch_steps=40).value < 1
    assert network.max_peers == 1 or kind in (decentlam.D2DmSGD, decentlam.GTDmSGD)


@pytest.mark.parametrize("name", sorted(set(CLASSES)))
def test_help_shows_every_option_with_its_default(name: str) -> None:
    shown = inspect.signature(CLASSES[name]).parameters
    assert OptimizerOptions.__annotations__.keys() <= shown.keys()
    optimizer = CLASSES[name](torch.nn.Linear(2, 1).parameters())
    for option, value in vars(optimizer._options).items():
        if option != "overlap":  # True and "backward" are the same
            assert shown[option].default == value, option

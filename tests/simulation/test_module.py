"""Real modules on simulated nodes, against n separate modules stepped one by one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import decentlam
from decentlam import NonFiniteError, SimulatedModule, topology

N, BATCH = 4, 6


class TiedAndFrozen(nn.Module):
    """Decodes with its encoder's weights, behind a first layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.encode = nn.Linear(5, 3)
        self.again = nn.Linear(5, 3)
        self.again.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.frozen(x))
        return self.encode(x) + torch.sin(self.again(x))


class ReplacesItsBuffer(nn.Module):
    """A running mean that is assigned and not written to, at the root and with no batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        self.seen = self.seen + len(x)
        return self.linear(x - self.mean)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 2),
        nn.BatchNorm2d(5, affine=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (5,)),
    "cnn with batch norm": (cnn, (1, 8, 8)),
    "tied and frozen": (TiedAndFrozen, (5,)),
    "replaces its buffer": (ReplacesItsBuffer, (5,)),
}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def batch(name: str, k: int, n: int = N) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(k)
    inputs = torch.randn(n, BATCH, *MODELS[name][1], generator=random, dtype=torch.float64)
    return inputs, torch.randint(3, (n, BATCH), generator=random)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


class OneByOne:
    """n ordinary modules, backward on each; only the averaging is the simulator's."""

    def __init__(self, model: nn.Module, algorithm: str, net: topology.Topology, **kwargs) -> None:
        self.models = [copy.deepcopy(model) for _ in range(net.num_nodes)]
        layers = [p.numel() for p in trained(model)]
        adaptive = [p.ndim > 1 for p in trained(model)]
        self.nodes = decentlam.Nodes(
            algorithm, net, self.flat(), layers=layers, adaptive=adaptive, **kwargs
        )

    def flat(self, grad: bool = False) -> Tensor:
        return torch.stack(
            [
                torch.cat([(p.grad if grad else p).detach().flatten() for p in trained(model)])
                for model in self.models
            ]
        )

    def step(self, inputs: Tensor, targets: Tensor, lr: float) -> Tensor:
        losses = []
        for model, x, y in zip(self.models, inputs, targets, strict=True):
            model.zero_grad()
            losses.append(F.cross_entropy(model(x), y))
            losses[-1].backward()
        self.nodes.step(self.flat(grad=True), lr)
        with torch.no_grad():
            for model, row in zip(self.models, self.nodes.x, strict=True):
                nn.utils.vector_to_parameters(row, trained(model))
        return torch.stack(losses).detach()


def assert_close(got: Tensor, expected: Tensor) -> None:
    np.testing.assert_allclose(got.detach(), expected.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["decentlam", "pmsgd-lars"])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_are_those_of_separate_modules(name: str, algorithm: str) -> None:
    model, net = make_model(name), topology.ring(N)
    kwargs: dict = {"momentum": 0.8, "weight_decay": 0.01}
    if algorithm == "pmsgd-lars":
        kwargs["trust"] = 0.1
    simulated = SimulatedModule(model, algorithm, net, lr=0.05, **kwargs)
    separate = OneByOne(model, algorithm, net, **kwargs)
    for k in range(10):
        lr = 0.05 / (1 + k)
        simulated.lr = lr
        losses = simulated.step(F.cross_entropy, *batch(name, k))
        assert_close(losses, separate.step(*batch(name, k), lr))
        for i, expected in enumerate(separate.models):
            node = simulated.node(i)
            assert list(node.state_dict()) == list(expected.state_dict())
            for key, value in node.state_dict().items():
                assert value.dtype == expected.state_dict()[key].dtype
                assert_close(value, expected.state_dict()[key])
    if algorithm != "pmsgd-lars":
        assert simulated.consensus_distance() > 1e-4


@pytest.mark.parametrize("name", ["tied and frozen", "cnn with batch norm"])
def test_batches_in_pieces_add_up_and_batch_norm_sees_each(name: str) -> None:
    model = make_model(name)
    simulated, separate = (
        SimulatedModule(model, "dmsgd", "ring", N, 0.05),
        OneByOne(model, "dmsgd", topology.ring(N)),
    )
    inputs, targets = batch(name, 0)
    pieces = [
        [((x[:4], y[:4]), 4 / 6), ((x[4:], y[4:]), 2 / 6)]
        for x, y in zip(inputs, targets, strict=True)
    ]
    simulated.step_on(lambda model, piece: F.cross_entropy(model(piece[0]), piece[1]), pieces)
    for module, parts in zip(separate.models, pieces, strict=True):
        for (x, y), share in parts:
            (F.cross_entropy(module(x), y) * share).backward()
    separate.nodes.step(separate.flat(grad=True), 0.05)
    assert_close(simulated.x, separate.nodes.x)
    for key, buffer in simulated.node(1).named_buffers():
        assert_close(buffer, separate.models[1].get_buffer(key))


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


@pytest.mark.parametrize("algorithm", ["decentlam", "slowmo"])
def test_resuming_repeats_to_the_bit(algorithm: str, tmp_path) -> None:
    name = "cnn with batch norm"
    hyper = {"tau": 3} if algorithm == "slowmo" else {}
    first, second = (
        SimulatedModule(make_model(name), algorithm, "ring", N, momentum=0.7, **hyper)
        for _ in range(2)
    )
    for k in range(4):
        first.lr = 0.05 * k
        first.step(F.cross_entropy, *batch(name, k))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert second.lr == first.lr
    for k in range(4, 8):
        for nodes in (first, second):
            nodes.step(F.cross_entropy, *batch(name, k), lr=0.01 * k)
    for key, value in first.node(1).state_dict().items():
        assert torch.equal(value, second.node(1).state_dict()[key])
    assert first.lr == pytest.approx(0.15)  # lr of a step holds for that step


def test_a_refused_step_changes_nothing() -> None:
    name = "cnn with batch norm"
    simulated = SimulatedModule(make_model(name), "decentlam", "ring", N, lr=0.05)
    simulated.step(F.cross_entropy, *batch(name, 0))
    before = simulated.node(1).state_dict()
    inputs, targets = batch(name, 1)
    inputs[2, 0, 0, 0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"step 1 .* node\(s\) \[2\]"):
        simulated.step(F.cross_entropy, inputs, targets)
    for key, value in simulated.node(1).state_dict().items():
        assert torch.equal(value, before[key])


def mixed_precision() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3).double())


def step_with(inputs: object, targets: object = None, loss_fn: Callable = F.cross_entropy) -> None:
    good = batch("mlp", 0)
    simulated = SimulatedModule(make_model("mlp"), "dsgd", "ring", N)
    simulated.step(
        loss_fn, good[0] if inputs is None else inputs, good[1] if targets is None else targets
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
    "loss not a scalar": (
        lambda: step_with(None, None, lambda out, y: F.cross_entropy(out, y, reduction="none")),
        ["one number per node", "shape (6,)", ".mean()"],
    ),
    "nothing to train": (
        lambda: SimulatedModule(mlp().requires_grad_(False), "dsgd", "ring", N),
        ["no parameter to train", "requires_grad"],
    ),
    "several precisions": (
        lambda: SimulatedModule(mixed_precision(), "dsgd", "ring", N),
        ["torch.float32, torch.float64", "model.float()"],
    ),
    "how many nodes": (
        lambda: SimulatedModule(mlp(), "dsgd", "ring"),
        ["'ring'", "Pass num_nodes", "ring(8)"],
    ),
    "no such node": (lambda: SimulatedModule(mlp(), "dsgd", "ring", N).node(4), ["0 to 3", "no 4"]),
    "state of another model": (lambda: load("mlp"), ["models (4, 66)", "same model"]),
    "state of other nodes": (lambda: load("cnn with batch norm", 5), ["models (5", "same model"]),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses_with_what_was_given_and_the_cure(case: str) -> None:
    call, words = BAD[case]
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)

"""The quadratic whose trajectories are compared with the simulator's, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
from tests.helpers.processes import HANG_SECONDS, Group
from tests.helpers.trajectories import ADAM_METHODS

CLASSES = {
    "pmsgd": decentlam.PmSGD,
    "pmsgd-lars": decentlam.PmSGD,
    "dsgd": decentlam.DSGD,
    "dmsgd": decentlam.DmSGD,
    "da-dmsgd": decentlam.DADmSGD,
    "awc-dmsgd": decentlam.AWCDmSGD,
    "slowmo": decentlam.SlowMo,
    "qg-dmsgd": decentlam.QGDmSGD,
    "d2-dmsgd": decentlam.D2DmSGD,
    "decentlam": decentlam.DecentLaM,
    "decentlam-exact": decentlam.ExactDecentLaM,
    "decentlam-steady": decentlam.SteadyDecentLaM,
    "gt-dmsgd": decentlam.GTDmSGD,
    "adamw": decentlam.AdamW,
    "pmadamw": decentlam.PmAdamW,
}
LR, DECAY, MOMENTUM = 0.05, 0.01, 0.6
SCALE = torch.tensor([0.5, 1.0, 1.5, 0.7, 2.0], dtype=torch.float64)
Loss = Callable[[nn.Module, int, int], Tensor]  # (model, node, step)
Absent = Callable[[int, int], bool]  # (node, step): whether the node has no gradient then


class Quadratic(nn.Module):
    """f_i(w) = 1/2 |w - t_i|^2_H over several parameters of different shapes; float64."""

    SHAPES = ((3, 4), (5,), (2, 3, 2), (7, 2), (1,))
    SIZES = tuple(torch.Size(shape).numel() for shape in SHAPES)

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weights = nn.ParameterList(
            [nn.Parameter(_randn(shape, generator)) for shape in self.SHAPES]
        )

    def forward(self, targets: list[Tensor], scale: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for w, t, s in zip(self.weights, targets, scale, strict=True):
            total = total + 0.5 * s * (w - t).square().sum()
        return total


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def targets_of(node: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + node)
    return [3 * _randn(shape, generator) for shape in Quadratic.SHAPES]


def quadratic_loss(model: nn.Module, node: int, step: int) -> Tensor:
    return (1 + 0.1 * step) * model(targets_of(node), SCALE)


def quadratic_gradient(n: int) -> Callable[[Tensor, int], Tensor]:
    """Return the gradient of n nodes' quadratics, all at the scale of step 0."""
    targets = torch.stack([torch.cat([t.reshape(-1) for t in targets_of(i)]) for i in range(n)])
    scale = SCALE.repeat_interleave(torch.tensor(Quadratic.SIZES))
    return lambda x, step: scale * (x - targets)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def build(
    method: str, model: nn.Module, process_group: Group | None, **options: Any
) -> decentlam.DecentralizedOptimizer:
    hyper: dict[str, Any] = {} if method == "dsgd" else {"momentum": MOMENTUM}
    if method == "slowmo":
        hyper["tau"] = 3
    if method == "pmsgd-lars":
        hyper["lars"] = True
    arguments = {
        "lr": LR,
        "weight_decay": DECAY,
        "topology": "ring",
        "overlap": True,
        "bucket_bytes": 100,
        "shared_memory": False,  # as between hosts
        "stable": "ignore",  # as in the simulator
        "timeout_seconds": HANG_SECONDS,
        "process_group": process_group,
        **hyper,
        **options,
    }
    if method in ADAM_METHODS:
        arguments["betas"] = (arguments.pop("momentum"), 0.999)
        arguments.pop("nesterov", None)
    return CLASSES[method](model.named_parameters(), **arguments)


def start(
    process_group: Group | None, method: str, **options: Any
) -> tuple[int, Quadratic, decentlam.DecentralizedOptimizer]:
    """Return this rank, its own quadratic, and an optimizer that makes all of them equal."""
    node = dist.get_rank(process_group)
    model = Quadratic(seed=node)
    return node, model, build(method, model, process_group, **options)


def train(
    optimizer: Any, model: nn.Module, node: int, steps: range, loss: Loss = quadratic_loss
) -> list[Tensor]:
    trajectory = []
    for step in steps:
        optimizer.zero_grad()
        loss(model, node, step).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


# What the simulator does ------------------------------------------------------------------------


def simulate(
    method: str,
    n: int,
    steps: int,
    *,
    model: Callable[[], nn.Module] = Quadratic,
    loss: Loss = quadratic_loss,
    topology: Any = "ring",
    absent: Absent = lambda node, step: False,
    change: Callable[[Tensor], Tensor] = lambda g: g,
    lr: Callable[[int], float] = lambda step: LR,
    weight_decay: float = DECAY,
    momentum: float = MOMENTUM,
    **hyper: Any,
) -> list[Tensor]:
    """Return what n nodes do, each with its own loss; `change` is applied to one node's gradient.

    A node that is absent at a step has gradient zero and no weight decay then.
    """
    network = model()
    trained = [p for p in network.parameters() if p.requires_grad]
    x0 = torch.cat([p.detach().reshape(-1) for p in trained])
    if method == "slowmo":
        hyper = {"tau": 3, **hyper}
    if method in ADAM_METHODS:
        hyper.pop("nesterov", None)
    nodes = decentlam.Nodes(
        method,
        topology,
        x0.expand(n, -1),
        None if method == "dsgd" else momentum,
        weight_decay=weight_decay,
        layers=[p.numel() for p in trained],
        adaptive=[p.ndim > 1 for p in trained],
        **hyper,
    )
    trajectory = []
    for step in range(steps):
        rows = []
        for node, row in enumerate(nodes.x):
            if absent(node, step):
                rows.append(-weight_decay * row)
                continue
            nn.utils.vector_to_parameters(row.clone(), trained)
            network.zero_grad()
            loss(network, node, step).backward()
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in trained]
            rows.append(change(torch.cat([g.reshape(-1) for g in grads])))
        nodes.step(torch.stack(rows), lr(step))
        trajectory.append(nodes.x.clone())
    return trajectory


def node_loss(per_node: int, loss: Loss = quadratic_loss) -> Loss:
    """Return the loss whose gradient is the mean over the processes of a node."""

    def mean(model: nn.Module, node: int, step: int) -> Tensor:
        ranks = range(node * per_node, (node + 1) * per_node)
        return sum(loss(model, rank, step) for rank in ranks) / per_node

    return mean


def clipped(max_norm: float) -> Callable[[Tensor], Tensor]:
    return lambda g: g * min(1.0, max_norm / (g.norm().item() + 1e-6))


def assert_equal(
    trajectories: list[list[Tensor]], expected: list[Tensor], tolerance: float = 1e-12
) -> None:
    """Compare one trajectory per process with the simulator's, (nodes, d) at every step.

    Consecutive processes of one node must be equal to the bit.
    """
    assert [len(trajectory) for trajectory in trajectories] == [len(expected)] * len(trajectories)
    for step, x in enumerate(expected):
        real = torch.stack([trajectory[step] for trajectory in trajectories])
        real = real.unflatten(0, (len(x), -1))
        assert torch.equal(real, real[:, :1].expand_as(real)), f"inside a node at step {step}"
        assert (real[:, 0] - x).abs().max() < tolerance, f"step {step}"


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

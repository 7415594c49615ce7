"""Local steps of real processes against loops in float64 that know nothing of the library's."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import decentlam
from decentlam import algorithms
from decentlam.topology import resolve
from tests.helpers.processes import HANG_SECONDS, Group, Scenarios, every, message_of
from tests.helpers.quadratic import Quadratic, assert_equal, flat, quadratic_loss, train

N, EVERY, STEPS = 4, 3, 11
scenarios = Scenarios(N)
INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.6, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, betas=(0.8, 0.9)),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.02),
}
STATE = {"sgd": None, "adamw": "exp_avg_sq", "rmsprop": "square_avg"}
OUTER = {
    "diloco": (algorithms.PmSGD(0.9, nesterov=True), 0.7),
    "noloco": (algorithms.DecentLaM(0.5), 1.0),
    "gossip": (algorithms.DSGD(), 1.0),
}


def start(
    process_group: Group | None, inner: str, **options: Any
) -> tuple[int, Quadratic, decentlam.LocalSteps]:
    """Return this rank, its quadratic, and its optimizer, which makes all of them equal."""
    node = dist.get_rank(process_group) if process_group is not None else 0
    model = Quadratic(seed=node)
    arguments = {
        "every": EVERY,
        "shared_memory": False,
        "timeout_seconds": HANG_SECONDS,
        "process_group": process_group,
        **options,
    }
    return node, model, decentlam.LocalSteps(INNER[inner](model.parameters()), **arguments)


def halve_rate(optimizer: Any, step: int) -> None:
    """Change the rate as a scheduler would; one of the rates is zero."""
    for group in optimizer.param_groups:
        group["lr"] *= (0.5, 1.5, 0.0)[step % 3] if step == 5 else 1.1


# The recursion ----------------------------------------------------------------------------------


class Loop:
    """N nodes of LocalSteps in one process, written down from its equations."""

    def __init__(self, inner: str, topology: str, outer: str | None, delay: int) -> None:
        self.models = [Quadratic(seed=0) for _ in range(N)]
        self.inner = [INNER[inner](model.parameters()) for model in self.models]
        self.weights, self.delay = resolve(topology, N).weights, delay
        self.state_name = STATE[inner] if outer is None else None
        self.outer = outer
        self.e = torch.zeros_like(self.x)
        self.anchor, self.velocity = self.x, torch.zeros_like(self.x)
        self.sum_of_rates, self.mixes, self.sent = 0.0, 0, None

    @property
    def x(self) -> Tensor:
        return torch.stack([flat(model) for model in self.models])

    def put(self, x: Tensor) -> None:
        for model, values in zip(self.models, x, strict=True):
            nn.utils.vector_to_parameters(values, model.parameters())

    def step(self, step: int) -> None:
        for node, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
            inner.zero_grad()
            quadratic_loss(model, node, step).backward()
            inner.step()
        lr = self.inner[0].param_groups[0]["lr"]
        if self.outer is None:
            self.put(self.x - lr * self.e)
        self.sum_of_rates += lr
        if self.sent is not None and (step + 1) % EVERY == self.delay:
            self.receive()
        if (step + 1) % EVERY == 0:
            self.sent = self.x, self.sum_of_rates
            self.sent_state = [self.second_moments(node) for node in range(N)]
            self.sum_of_rates = 0.0
            if self.delay == 0:
                self.receive()

    def receive(self) -> None:
        W = self.weights(self.mixes)
        assert self.sent is not None
        (sent, rates), self.sent = self.sent, None
        if self.outer is None:
            moved = sent - W @ sent
            if rates:
                self.e = self.e + 0.2 * moved / rates
            self.put(self.x - moved)
        else:
            after = self.outer_step(W, sent)
            self.put(self.x + after - sent)
            self.anchor = after
        for node in range(N):
            for k, value in enumerate(self.second_moments(node)):
                theirs = [quarter_octaves(their[k]) for their in self.sent_state]
                rest = sum(W[node, j] * theirs[j] for j in range(N) if j != node)
                self.second_moments(node)[k].copy_(W[node, node] * value + rest)
        self.mixes += 1

    def outer_step(self, W: Tensor, sent: Tensor) -> Tensor:
        way = self.anchor - sent
        if self.outer == "diloco":  # theta+ = theta - g (D + b m+)
            mean = way.mean(dim=0, keepdim=True).expand_as(way)
            self.velocity = 0.9 * self.velocity + mean
            return self.anchor - 0.7 * (mean + 0.9 * self.velocity)
        if self.outer == "gossip":
            return W @ sent
        # NoLoCo as published, with two payloads: what all have gone, and where they began.
        self.velocity = 0.5 * self.velocity - W @ way - (self.anchor - W @ self.anchor)
        return self.anchor + self.velocity

    def second_moments(self, node: int) -> list[Tensor]:
        if self.state_name is None:
            return []
        state = self.inner[node].state
        found = [state[p][self.state_name] for p in self.models[node].parameters()]
        return found if self.sent is None else [value.clone() for value in found]


def quarter_octaves(values: Tensor) -> Tensor:
    """Return positive numbers rounded to powers of the fourth root of two."""
    return torch.where(values > 0, torch.exp2((4 * values.log2()).round() / 4), 0.0)


def trained(process_group: Group, inner: str, outer: str | None, **options: Any) -> list[Tensor]:
    if outer is not None:
        options["outer"], options["outer_lr"] = OUTER[outer]
    node, model, optimizer = start(process_group, inner, **options)
    trajectory = []
    for step in range(STEPS):
        trajectory += train(optimizer, model, node, range(step, step + 1))
        halve_rate(optimizer, step)
    assert optimizer.steps == STEPS
    return trajectory


CASES = [
    *every(inner=["sgd", "adamw"], topology=["ring", "bipartite-random-match"], delay=[0, 2]),
    {"inner": "rmsprop", "topology": "bipartite-random-match", "delay": 1},
    {"inner": "sgd", "topology": "ring", "delay": 0, "shared_memory": True},
    {"inner": "adamw", "topology": "ring", "delay": 2, "shared_memory": True},
    *every(inner=["sgd"], topology=["ring"], delay=[0, 2], outer=["diloco", "noloco", "gossip"]),
]
CASES = [{"outer": None, "shared_memory": False, **case} for case in CASES]


@scenarios.run(trained, CASES)
def test_processes_equal_a_loop_over_the_equations(
    results: list[list[Tensor]], inner: str, topology: str, delay: int, outer: str | None
) -> None:
    loop, expected = Loop(inner, topology, outer, delay), []
    for step in range(STEPS):
        loop.step(step)
        expected.append(loop.x)
        for optimizer in loop.inner:
            halve_rate(optimizer, step)
    assert_equal(results, expected)
    assert loop.mixes == STEPS // EVERY


# torch.optim's contract, and the library's ------------------------------------------------------


def test_one_node_is_the_inner_optimizer_to_the_bit() -> None:
    models = Quadratic(), Quadratic()
    inner = INNER["adamw"](models[1].parameters())
    wrapped = decentlam.LocalSteps(INNER["adamw"](models[0].parameters()), every=2, delay=1)
    trajectories = [train(o, m, 0, range(7)) for o, m in zip((wrapped, inner), models, strict=True)]
    assert all(map(torch.equal, *trajectories))


def test_a_scheduler_on_either_optimizer_sets_the_rate_of_both() -> None:
    model = Quadratic()
    optimizer = decentlam.LocalSteps(INNER["sgd"](model.parameters()))
    for owner in (optimizer, optimizer.inner):
        scheduler = torch.optim.lr_scheduler.ExponentialLR(owner, gamma=0.5)
        train(optimizer, model, 0, range(1))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.inner.param_groups[0]["lr"] == 0.0125


def resumed(process_group: Group, inner: str, delay: int) -> list[list[Tensor]]:
    """Eight steps in one go; five, saved in two ways, and three more in new optimizers."""
    place = [tempfile.mkdtemp() if dist.get_rank(process_group) == 0 else ""]
    dist.broadcast_object_list(place, group_src=0, group=process_group)
    (tmp,) = place
    options = {"topology": "bipartite-random-match", "delay": delay}
    node, model, optimizer = start(process_group, inner, **options)
    train(optimizer, model, node, range(5))
    decentlam.save_checkpoint(tmp, model=model, optimizer=optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    results = [train(optimizer, model, node, range(5, 9))]
    node, model, optimizer = start(process_group, inner, **options)
    train(optimizer, model, node, range(4))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    results.append(train(optimizer, model, node, range(5, 9)))
    node, model, optimizer = start(process_group, inner, **options)
    train(optimizer, model, node, range(2))
    assert decentlam.load_checkpoint(tmp, model=model, optimizer=optimizer).step == 5
    assert optimizer.steps == 5
    results.append(train(optimizer, model, node, range(5, 9)))
    return results


@scenarios.run(resumed, [{"inner": "adamw", "delay": 0}, {"inner": "sgd", "delay": 2}])
def test_a_run_resumes_to_the_bit(results: Any) -> None:
    for whole, *others in results:
        for other in others:
            assert all(map(torch.equal, whole, other))


def looked_at(process_group: Group) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return the model, its average, and the model after; while a message is under way."""
    node, model, optimizer = start(process_group, "sgd", delay=1)
    train(optimizer, model, node, range(EVERY))
    with optimizer.averaged(model):
        mean = flat(model)
    before = flat(model)
    optimizer.eval(model)
    assert torch.equal(flat(model), mean)
    refused = message_of(optimizer.step)
    assert "in evaluation" in refused, refused
    optimizer.train()
    assert torch.equal(flat(model), before)
    distance = optimizer.consensus_distance()
    optimizer.merge(model)
    return before, mean, flat(model), distance


@scenarios.run(looked_at)
def test_the_average_is_that_of_all_nodes(results: list[Any]) -> None:
    x = torch.stack([before for before, *_ in results])
    expected = (x - x.mean(0)).square().sum(1).mean().sqrt()
    for _, mean, merged, distance in results:
        assert (mean - x.mean(0)).abs().max() < 1e-12
        assert torch.equal(mean, merged)
        assert distance == pytest.approx(float(expected))


def joined(process_group: Group, fewest: int) -> int:
    node, model, optimizer = start(process_group, "adamw")
    with Join([optimizer]):
        train(optimizer, model, node, range(fewest + 3 * node))
    return optimizer.runtime.index


@scenarios.run(joined, every(fewest=[0, 2]))
def test_nodes_with_fewer_batches_or_none_go_on_averaging(results: list[int], fewest: int) -> None:
    assert results == [(fewest + 3 * (N - 1)) // EVERY] * N


def half_precision(process_group: Group) -> tuple[int, int, float]:
    """Return the bytes of an average of whole and of half messages, and how far apart models are
    after one."""
    found, models = [], []
    for dtype in (None, torch.float16):
        node, model, optimizer = start(process_group, "adamw", message_dtype=dtype, topology="ring")
        train(optimizer, model, node, range(EVERY))
        found.append(optimizer.statistics.bytes_sent)
        models.append(flat(model))
    return found[0], found[1], float((models[0] - models[1]).abs().max())


@scenarios.run(half_precision)
def test_messages_are_of_the_model_and_one_byte_of_state(results: list[Any]) -> None:
    size, neighbors = sum(Quadratic.SIZES), 2
    for whole, half, difference in results:
        assert whole == neighbors * (8 * size + size + 5)
        assert half == neighbors * (2 * size + size + 5)
        assert 0 < difference < 0.02


def scaled(process_group: Group) -> list[Tensor]:
    """Train with a scaler that finds an overflow on node 1 in the second step."""
    node, model, optimizer = start(process_group, "sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    trajectory = []
    for step in range(EVERY):
        optimizer.zero_grad()
        scaler.scale(quadratic_loss(model, node, step)).backward()
        if node == 1 and step == 1:
            next(model.parameters()).grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        trajectory.append(flat(model))
    assert optimizer.runtime.index == 1  # nobody has waited for node 1
    return trajectory


@scenarios.run(scaled)
def test_a_step_that_overflows_is_left_out_and_counted(results: list[list[Tensor]]) -> None:
    assert torch.equal(results[1][0], results[1][1])
    assert not torch.equal(results[0][0], results[0][1])
    assert all(torch.isfinite(result[-1]).all() for result in results)


def overflows_at_once(process_group: Group, average_state: Any) -> tuple[Tensor, float]:
    """Train with a gradient that overflows on node 1 in the first step, so that its AdamW has no
    state yet when others send theirs; return its moments and the bytes of the last average."""
    options = {"topology": "ring", "every": 1, "average_state": average_state}
    node, model, optimizer = start(process_group, "adamw", **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(quadratic_loss(model, node, step)).backward()
        if node == 1 and step == 0:
            next(model.parameters()).grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    moments = [state["exp_avg_sq"].ravel() for state in optimizer.inner.state.values()]
    return torch.cat(moments), optimizer.statistics.bytes_sent


@scenarios.run(overflows_at_once, [{"average_state": names} for names in (None, ("exp_avg_sq",))])
def test_second_moments_are_averaged_although_one_node_had_none_at_first(results: Any) -> None:
    size, neighbors = sum(Quadratic.SIZES), 2
    for moments, sent in results:
        assert moments.isfinite().all() and moments.gt(0).all()
        assert sent == neighbors * (8 * size + size + 5)


def later(process_group: Group) -> tuple[Tensor, list[float]]:
    """Train one parameter and, after an average, all; return the model and the rates."""
    node = dist.get_rank(process_group)
    model = Quadratic(seed=0)
    first, *rest = model.parameters()
    inner = torch.optim.AdamW([first], lr=0.1)
    options = {"topology": "ring", "every": 2, "shared_memory": False}
    optimizer = decentlam.LocalSteps(inner, **options, process_group=process_group)
    train(optimizer, model, node, range(3))
    optimizer.add_param_group({"params": rest, "lr": 0.2})
    train(optimizer, model, node, range(3, 8))
    return optimizer.statistics.bytes_sent, [group["lr"] for group in inner.param_groups]


@scenarios.run(later)
def test_a_param_group_that_joins_later_is_averaged_with_its_state(results: list[Any]) -> None:
    size = sum(Quadratic.SIZES)
    assert results == [(2 * (8 * size + size + 5), [0.1, 0.2])] * N


def unequal(process_group: Group) -> list[str]:
    """Return what is said to nodes that do not mean the same."""
    node = dist.get_rank(process_group)
    rate = torch.optim.SGD(Quadratic().parameters(), lr=0.1 * (1 + node))
    same = torch.optim.SGD(Quadratic().parameters(), lr=0.1)
    return [
        message_of(lambda: decentlam.LocalSteps(rate, process_group=process_group)),
        message_of(lambda: decentlam.LocalSteps(same, 2 + node, process_group=process_group)),
    ]


@scenarios.run(unequal)
def test_nodes_that_differ_are_named(results: list[list[str]]) -> None:
    for rate, count in results:
        assert "process 1 has lr of group 0 = 0.2, process 0 has 0.1" in rate
        assert "3 steps of SGD" in count and "2 steps of SGD" in count


class Sparse(nn.Module):
    """A model whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 2, sparse=True)


def test_what_cannot_be_averaged_is_refused_with_the_cure() -> None:
    params = lambda: Quadratic().parameters()  # noqa: E731
    sgd = lambda: torch.optim.SGD(params(), lr=0.1)  # noqa: E731
    refused: list[tuple[Any, type[Exception], str]] = [
        (lambda: decentlam.LocalSteps(params()), TypeError, "inner must be a torch optimizer"),
        (lambda: decentlam.LocalSteps(decentlam.DSGD(params())), ValueError, "averages with"),
        (lambda: decentlam.LocalSteps(sgd(), every=0), ValueError, "every must be a whole number"),
        (lambda: decentlam.LocalSteps(sgd(), every=4, delay=4), ValueError, "less than every=4"),
        (
            lambda: decentlam.LocalSteps(sgd(), outer="pmsgd"),
            TypeError,
            "outer must be an Algorithm",
        ),
        (lambda: decentlam.LocalSteps(sgd(), correction=-1), ValueError, "correction"),
        (lambda: decentlam.LocalSteps(sgd(), model=nn.Linear(1, 1)), ValueError, "none of the opt"),
        (
            lambda: decentlam.LocalSteps(sgd(), outer=algorithms.PmSGD(), average_state=("a",)),
            ValueError,
            "averages over everyone",
        ),
    ]
    for build, kind, text in refused:
        with pytest.raises(kind, match=text):
            build()


def test_a_state_that_does_not_exist_is_refused_after_the_first_step() -> None:
    model = Quadratic()
    inner = INNER["adamw"](model.parameters())
    optimizer = decentlam.LocalSteps(inner, average_state=("exp_avg_square",))
    with pytest.raises(ValueError, match=r"average_state names 'exp_avg_square'.*exp_avg_sq"):
        train(optimizer, model, 0, range(1))


def test_sparse_and_missing_gradients_are_refused() -> None:
    model = Sparse()
    optimizer = decentlam.LocalSteps(torch.optim.SGD(model.parameters(), lr=0.1), every=1)
    with pytest.raises(RuntimeError, match="without any gradient"):
        optimizer.step()
    model.table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        optimizer.step()


def test_a_rate_that_is_no_number_is_refused_before_anything_changes() -> None:
    model = Quadratic()
    optimizer = decentlam.LocalSteps(INNER["sgd"](model.parameters()))
    optimizer.param_groups[0]["lr"], before = float("nan"), flat(model)
    with pytest.raises(ValueError, match="lr must be a finite number"):
        train(optimizer, model, 0, range(1))
    assert torch.equal(flat(model), before) and optimizer.steps == 0


def test_growth_of_the_average_without_gradients_is_below_one() -> None:
    method = algorithms.local_average.LocalAverage()
    assert decentlam.growth(method, resolve("bipartite-random-match", 8)) < 0.9


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (INNER["sgd"], "not the state of a LocalSteps"),
        (lambda params: decentlam.LocalSteps(INNER["adamw"](params)), "SGD has .*momentum"),
        (lambda params: decentlam.LocalSteps(INNER["sgd"](list(params)[:3])), "size of optimizer"),
    ],
)
def test_state_of_another_optimizer_is_refused_and_changes_nothing(other: Any, reason: str) -> None:
    model = Quadratic()
    optimizer = decentlam.LocalSteps(INNER["sgd"](model.parameters()))
    train(optimizer, model, 0, range(2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=reason):
        optimizer.load_state_dict(other(Quadratic().parameters()).state_dict())
    assert str(optimizer.state_dict()) == str(before)

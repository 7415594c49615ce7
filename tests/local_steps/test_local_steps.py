"""Local steps of real processes against loops in float64 that know nothing of the library's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
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

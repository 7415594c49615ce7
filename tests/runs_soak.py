"""Jobs of four nodes in which every process is late at random, again and again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import runs_steps
import torch
import torch.distributed as dist
from runs import HANG_SECONDS, Quadratic, flat
from torch import Tensor

METHODS = (
    "decentlam", "dmsgd", "awc-dmsgd", "da-dmsgd", "pmsgd",
    "qg-dmsgd", "slowmo", "d2-dmsgd", "dsgd", "decentlam",
)  # fmt: skip
SYMMETRIC = ("ring", "star", "bipartite-random-match", "one-peer-symmetric-exponential")
STEPS = 20


@dataclass(frozen=True)
class Job:
    """What run number `number` does; the same in every process."""

    number: int

    @property
    def method(self) -> str:
        return METHODS[self.number % len(METHODS)]

    @property
    def topology(self) -> str:
        directed = self.method not in ("decentlam", "d2-dmsgd")
        choices = (*SYMMETRIC, "one-peer-exponential") if directed else SYMMETRIC
        return choices[self.number // 10 % len(choices)]

    @property
    def overlap(self) -> bool:
        return self.number % 3 != 0

    @property
    def bucket_bytes(self) -> int:
        return (40, 100, 10**6)[self.number % 7 % 3]

    @property
    def shared_memory(self) -> bool:
        return self.number % 4 < 2

    def run(self) -> Tensor:
        """The model of this node after the last step, late by up to 5 ms at every point."""
        rank = dist.get_rank()
        chance = random.Random(1000 * self.number + rank)

        def dawdle(*arguments: object) -> None:
            if chance.random() < 0.25:
                time.sleep(chance.random() * 0.005)

        model = Quadratic(seed=rank)
        for p in model.parameters():
            p.register_hook(dawdle)
        optimizer = runs_steps.build(
            self.method,
            model,
            None,
            topology=self.topology,
            overlap=self.overlap,
            bucket_bytes=self.bucket_bytes,
            timeout_seconds=HANG_SECONDS,
            shared_memory=self.shared_memory,
            stable="ignore",  # as in the simulator
        )
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            dawdle()
            loss = runs_steps.quadratic_loss(model, rank, step)
            dawdle()
            loss.backward()
            dawdle()
            optimizer.step()
        return flat(model)

    def simulate(self) -> Tensor:
        return runs_steps.simulate(self.method, 4, STEPS, topology=self.topology)[-1]


def run_jobs(numbers: range) -> list[Tensor]:
    return [Job(number).run() for number in numbers]


def worst(numbers: range, everyone: list[list[Tensor]]) -> float:
    """The largest distance from the simulator in any run."""
    distances = []
    for i, number in enumerate(numbers):
        real = torch.stack([results[i] for results in everyone])
        distances.append((real - Job(number).simulate()).abs().max().item())
    return max(distances)

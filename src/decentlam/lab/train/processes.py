"""The one node of this process; the others are in other processes of the group."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.checkpoint import Saving, load_checkpoint, save_checkpoint
from decentlam.lab.recipes import Recipe
from decentlam.lab.schedules import scheduler
from decentlam.lab.train.engine import KEEP, Cost, Evaluation
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.numerics import Numerics
from decentlam.lab.train.tasks import Task
from decentlam.lab.train.tasks.base import Batch, record
from decentlam.optimizer import DecentralizedOptimizer


class Processes:
    """An `Engine` around a module and its decentralized optimizer."""

    def __init__(
        self, recipe: Recipe, task: Task, numerics: Numerics, steps_per_epoch: int
    ) -> None:
        self.recipe, self.task, self.numerics = recipe, task, numerics
        self.model = task.model()
        algorithm, network, _ = recipe.chosen()
        self.optimizer = DecentralizedOptimizer(
            list(self.model.named_parameters()),
            algorithm,
            recipe.lr,
            weight_decay=recipe.weight_decay,
            topology=network,
            stable="ignore",  # the recipe has chosen already
        )
        self.scheduler = scheduler(self.optimizer, recipe.factor(steps_per_epoch))
        self.network = self.optimizer.network
        self.alone = self.network.num_processes == 1
        self.nodes = [self.network.node]
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        torch.manual_seed(recipe.seed + self.network.node)  # of dropout, different on every node

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def cost(self) -> Cost:
        last = self.optimizer.statistics
        return Cost(last.wait_seconds, float(last.bytes_sent))

    def step(self, batches: Sequence[Batch]) -> Tensor:
        pieces = self.task.pieces(batches[0], self.recipe.micro_batch)
        total = torch.zeros((), dtype=self.numerics.dtype, device=self.numerics.device)
        self.model.train()
        self.optimizer.zero_grad()
        for k, (piece, share) in enumerate(pieces):
            last = k == len(pieces) - 1
            with contextlib.nullcontext() if last else self.optimizer.no_sync():
                loss = self.task.loss(self.model, piece)
                (loss * share).backward()
            total += loss.detach() * share
        self.optimizer.step()
        self.scheduler.step()
        return total[None]

    def evaluate(self, workers: int) -> Evaluation:
        """Everyone scores its own model on the whole test set, and the averaged one on every n-th
        batch: in one pass, because images may have to be decoded for it."""
        with self.optimizer.averaged(self.model):
            average = copy.deepcopy(self.model)
        self.task.settle(average)
        own, share = [], []
        for k, batch in enumerate(self.task.test_batches(workers)):
            own.append(self.task.score(self.model, batch))
            if k % self.network.num_nodes == self.network.node:
                share.append(self.task.score(average, batch))
        reports = self.network.gather((self.task.numbers(own), share))
        averaged = [outcome for _, share in reports for outcome in share]
        nodes = [numbers for numbers, _ in reports]
        distance = self.optimizer.consensus_distance()
        numbers = record(self.task, self.task.numbers(averaged), nodes, distance)
        return Evaluation(numbers, averaged)

    def mean(self, values: Sequence[float]) -> list[float]:
        sums = self._reduced(values, dist.ReduceOp.SUM)
        return [value / self.network.num_processes for value in sums]

    def highest(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.network.group is None:
            return list(values)
        device = self.network.control_device
        tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
        with self.network.errors():
            dist.all_reduce(tensor, how, group=self.network.group)
        found: list[float] = tensor.tolist()
        return found

    def save(self, path: Path, meter: Meter) -> Saving:
        return save_checkpoint(
            path,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            meter=meter,
            keep=KEEP,
            background=True,
        )

    def load(self, path: Path, meter: Meter) -> int:
        return load_checkpoint(
            path,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            meter=meter,
        ).step

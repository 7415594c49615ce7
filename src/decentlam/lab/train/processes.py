"""The one node of this process; the others are in other processes of the group."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from decentlam.checkpoint import load_checkpoint, save_checkpoint
from decentlam.exchange.network import communication_device
from decentlam.lab.data import Data
from decentlam.lab.models import make_model
from decentlam.lab.recipes import Recipe
from decentlam.lab.schedules import scheduler
from decentlam.lab.train import evaluation
from decentlam.lab.train.engine import Cost
from decentlam.lab.train.meter import Meter
from decentlam.lab.train.numerics import Numerics
from decentlam.methods import Method


class Processes:
    """An `Engine` around a module and its decentralized optimizer."""

    def __init__(
        self, recipe: Recipe, data: Data, numerics: Numerics, steps_per_epoch: int
    ) -> None:
        self.recipe, self.data, self.numerics = recipe, data, numerics
        self.model = numerics.model(make_model(recipe.model, data.shape, data.classes, recipe.seed))
        algorithm, network, _ = recipe.chosen()
        self.optimizer = Method(
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

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        x, y = self.numerics.inputs(inputs[0]), labels[0].to(self.numerics.device)
        size = self.recipe.micro_batch or len(x)
        pieces = list(zip(x.split(size), y.split(size), strict=True))
        total = torch.zeros((), dtype=self.numerics.dtype, device=self.numerics.device)
        self.model.train()
        self.optimizer.zero_grad()
        for k, (some_x, some_y) in enumerate(pieces):
            last = k == len(pieces) - 1
            with contextlib.nullcontext() if last else self.optimizer.no_sync():
                with self.numerics.autocast():
                    loss = F.cross_entropy(self.model(some_x), some_y)
                (loss * (len(some_x) / len(x))).backward()
            total += loss.detach() * (len(some_x) / len(x))
        self.optimizer.step()
        self.scheduler.step()
        return total[None]

    def evaluate(self, workers: int) -> dict[str, Any]:
        """Everyone scores its own model on the whole test set, and the averaged one on every n-th
        batch: in one pass, because images may have to be decoded for it."""
        with self.optimizer.averaged(self.model):
            average = copy.deepcopy(self.model)
        if self.recipe.batch_norm == "estimate":
            evaluation.estimate_batch_norm(average, self.data, self.numerics, self.recipe.seed)
        own, share = [0.0] * 4, [0.0] * 4
        batches = self.data.test_batches(evaluation.batch_size(self.data), workers)
        for k, batch in enumerate(batches):
            evaluation.add(own, evaluation.score(self.model, batch, self.numerics))
            if k % self.network.num_nodes == self.network.node:
                evaluation.add(share, evaluation.score(average, batch, self.numerics))
        reports = self.network.gather((own, share))
        averaged = [sum(values) for values in zip(*(share for _, share in reports), strict=True)]
        distance = self.optimizer.consensus_distance()
        return evaluation.numbers(averaged, [own for own, _ in reports], distance)

    def mean(self, values: Sequence[float]) -> list[float]:
        sums = self._reduced(values, dist.ReduceOp.SUM)
        return [value / self.network.num_processes for value in sums]

    def highest(self, values: Sequence[float]) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.network.group is None:
            return list(values)
        device = communication_device(self.network, self.numerics.device)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=device)
        dist.all_reduce(tensor, how, group=self.network.group)
        found: list[float] = tensor.tolist()
        return found

    def save(self, path: Path, meter: Meter) -> None:
        save_checkpoint(
            path,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            meter=meter,
        )

    def load(self, path: Path, meter: Meter) -> int:
        return load_checkpoint(
            path,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            meter=meter,
        ).step

"""Engines of the training loop: all nodes simulated, or the node of this process.

Both engines have the same attributes and methods; all processes of a run call them together.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Generator
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from decentlam.checkpoint import Saving, directory, load_checkpoint, save_checkpoint
from decentlam.checkpoint.saving import settle
from decentlam.data import Deal
from decentlam.elastic import membership
from decentlam.errors import CheckpointError
from decentlam.lab.data import Batches, load_batches
from decentlam.lab.data.batches import StepBatches
from decentlam.lab.recipes import Recipe
from decentlam.lab.train.tasks import Task
from decentlam.monitoring import Monitor, monitor
from decentlam.network.network import ALONE, Network
from decentlam.optimizer import DecentralizedOptimizer
from decentlam.options import Stable
from decentlam.simulation.module import SimulatedModule

StepStream = Generator[StepBatches, None, None]


class SimulatedEngine:
    """Trains the models of all nodes in this process."""

    writes = True  # whether this process writes the run directory
    network = ALONE  # the processes that train
    together = ALONE  # those that share measurements and stop after the same step

    def __init__(self, recipe: Recipe, task: Task) -> None:
        self._recipe, self._task = recipe, task
        torch.manual_seed(recipe.seed)  # of dropout; nothing else draws from torch's own numbers
        self._algorithm, self._topology, _ = recipe.chosen()
        self._nodes = SimulatedModule(
            task.model(), self._algorithm, self._topology, weight_decay=recipe.weight_decay
        )
        self.num_nodes = recipe.nodes
        self.parameters = self._nodes.x.shape[1]
        self.step = 0  # steps taken so far

    @property
    def cost(self) -> dict[str, float]:
        """Return what the last step cost a node of this process."""
        k = self.step - 1
        peers = self._topology.messages(k).double().mean().item()
        sent = self._algorithm.reach(k).messages_sent(self.num_nodes, peers)
        sent *= self._algorithm.payloads(k)  # tensors of the size of the model
        bytes_sent = sent * self.parameters * self._nodes.x.element_size()
        return {"wait_seconds": 0.0, "bytes_sent": bytes_sent}

    def batches(self, batches: Batches, last_step: int, workers: int) -> StepStream:
        """Yield the arguments of `train`, step by step."""
        nodes, steps = range(self.num_nodes), range(self.step, last_step)
        return load_batches(self._task.data, batches, nodes, steps, workers)

    def watch(self, directory: Path, total_steps: int) -> None:
        """Start to write what `decentlam watch` shows of this process."""

    def close(self) -> None:
        """Stop what `watch` started."""

    def train(self, batches: StepBatches, lr: float) -> Tensor:
        """Take a step on a batch for each node; return the losses before it, (nodes,)."""
        size = self._recipe.micro_batch
        pieces = [self._task.pieces(batch, size) for batch in batches]
        losses = self._nodes.step_on(self._task.loss, pieces, lr)
        self.step += 1
        return losses

    def models(self) -> tuple[nn.Module, list[nn.Module]]:
        """Return the averaged model, and the models of the nodes of this process."""
        return self._nodes.averaged(), [self._nodes.node(k) for k in range(self.num_nodes)]

    def consensus_distance(self) -> float:
        return self._nodes.consensus_distance()

    def save(self, path: Path) -> Saving:
        settle()
        content = {"nodes": self._nodes.state_dict(), "rng": torch.get_rng_state()}
        meta = {"method": "simulated", "step": self.step, "num_nodes": 1, "processes_per_node": 1}
        return Saving(ALONE, path, meta, content, keep=2, background=True)

    def load(self, path: Path) -> None:
        settle()
        meta, content = directory.read(directory.locate(path), 0)
        if content.keys() != {"nodes", "rng"}:
            raise CheckpointError(f"{path} is not the checkpoint of a simulated run")
        self._nodes.load_state_dict(content["nodes"])
        torch.set_rng_state(content["rng"])
        self.step = int(meta["step"])


class ProcessEngine:
    """Trains the model of this process's node; the other nodes are other processes.

    In an elastic run nodes come and go, and samples are dealt to the nodes that are there. A new
    process takes its state from another one; checkpoints are for the case that all have ended.
    """

    def __init__(self, recipe: Recipe, task: Task, elastic: bool) -> None:
        self._recipe, self._task, self._elastic = recipe, task, elastic
        self._model = task.model()
        self.parameters = sum(p.numel() for p in self._model.parameters() if p.requires_grad)
        if not elastic:
            algorithm, topology, _ = recipe.chosen()
            options: dict[str, Any] = {"topology": topology, "stable": "ignore"}
        else:  # the optimizer chooses a stable form for every number of nodes
            algorithm, stable = recipe.algorithm(), cast(Stable, recipe.stable)
            options = {"topology": recipe.topology, "stable": stable, "elastic": True}
            options["model"] = self._model
        self._optimizer = DecentralizedOptimizer(
            list(self._model.named_parameters()),
            algorithm,
            recipe.lr,
            weight_decay=recipe.weight_decay,
            **options,
        )
        self._monitor: Monitor | None = None
        run = membership.current() if elastic else None
        number = self.network.node if run is None else run.me
        torch.manual_seed(recipe.seed + number)  # of dropout, different on every node
        self._joins = run is not None and run.joins

    @property
    def network(self) -> Network:
        return self._optimizer.network

    @property
    def together(self) -> Network:
        """All processes; in an elastic run this one alone, for others may be dead."""
        return ALONE if self._elastic else self.network

    @property
    def writes(self) -> bool:
        """True on node 0; when it dies, another one becomes node 0."""
        return self.network.node == 0

    @property
    def num_nodes(self) -> int:
        return self.network.num_nodes

    @property
    def step(self) -> int:
        """The steps taken so far; may jump if this node was behind when the members changed."""
        return self._optimizer.place.step

    @property
    def cost(self) -> dict[str, float]:
        last = self._optimizer.statistics
        return {"wait_seconds": last.wait_seconds, "bytes_sent": float(last.bytes_sent)}

    def batches(self, batches: Batches, last_step: int, workers: int) -> StepStream:
        if self._elastic:
            loaded = self._shared_batches(batches)
        else:
            nodes, steps = [self.network.node], range(self.step, last_step)
            loaded = load_batches(self._task.data, batches, nodes, steps, workers)
        return loaded if self._monitor is None else self._monitor.loading(loaded)

    def watch(self, directory: Path, total_steps: int) -> None:
        self._monitor = monitor(self._optimizer, directory, total_steps=total_steps)

    def close(self) -> None:
        if self._monitor is not None:
            self._monitor.close()

    def _shared_batches(self, batches: Batches) -> StepStream:
        """Yield batches of one stream that all nodes share. None is loaded ahead, because the
        members of the next step are unknown."""
        stream = Deal(len(self._task.data.labels), batches.batch_per_node)
        while True:
            number = stream.position(self._optimizer.place) // batches.batch_per_node
            yield [batches.load(self._task.data, number, 0)]

    def train(self, batches: StepBatches, lr: float) -> Tensor:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._model.train()
        self._optimizer.zero_grad()
        pieces: list[tuple[Any, float]] = self._task.pieces(batches[0], self._recipe.micro_batch)
        losses = []
        for k, (piece, share) in enumerate(pieces):
            last = k == len(pieces) - 1
            with contextlib.nullcontext() if last else self._optimizer.no_sync():
                loss = self._task.loss(self._model, piece) * share
                loss.backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).sum(0, keepdim=True)
        if self._monitor is not None:
            self._monitor.log(loss=loss)
        self._optimizer.step()
        return loss

    def models(self) -> tuple[nn.Module, list[nn.Module]]:
        with self._optimizer.averaged(self._model):
            average = copy.deepcopy(self._model)
        return average, [self._model]

    def consensus_distance(self) -> float:
        return self._optimizer.consensus_distance()

    def save(self, path: Path) -> Saving:
        model, later = self._model, not self._elastic
        return save_checkpoint(path, model=model, optimizer=self._optimizer, background=later)

    def load(self, path: Path) -> None:
        if not self._joins:  # a process that joins takes newer state from another node
            load_checkpoint(path, model=self._model, optimizer=self._optimizer)


Engine: TypeAlias = SimulatedEngine | ProcessEngine

"""Simulated nodes for models that `torch.func.vmap` cannot run: one copy after another."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decentlam import Nodes
from decentlam.algorithms import Algorithm
from decentlam.lab.train.tasks import Batch, Task
from decentlam.topology import Topology


class SequentialNodes:
    """n copies of a task's model that average as the algorithm says.

    A copy's parameters are a row of `x` and its gradients a row of one tensor, so that nothing is
    copied between them and the algorithm. Frozen parameters stay as they are; one that a batch
    does not use has gradient zero.
    """

    def __init__(
        self, task: Task, algorithm: Algorithm, network: Topology, weight_decay: float
    ) -> None:
        self._task = task
        model = task.model()
        self._copies = [copy.deepcopy(model) for _ in range(network.num_nodes)]
        trained = _trained(model)
        start = torch.cat([p.detach().reshape(-1) for p in trained])
        self._nodes = Nodes(
            algorithm,
            network,
            start.expand(network.num_nodes, -1),
            weight_decay=weight_decay,
            layers=[p.numel() for p in trained],
            adaptive=[p.ndim > 1 for p in trained],
        )
        self._gradient = torch.zeros_like(self.x)
        for module, row, gradient in zip(self._copies, self.x, self._gradient, strict=True):
            own = _trained(module)
            sizes = [p.numel() for p in own]
            for p, x, g in zip(own, row.split(sizes), gradient.split(sizes), strict=True):
                p.data, p.grad = x.view_as(p), g.view_as(p)

    @property
    def x(self) -> Tensor:
        return self._nodes.x

    def step(self, batches: Sequence[Batch], lr: float, micro_batch: int | None) -> Tensor:
        self._gradient.zero_()
        losses = self.x.new_zeros(len(self._copies))
        for rank, (module, batch) in enumerate(zip(self._copies, batches, strict=True)):
            module.train()
            for piece, share in self._task.pieces(batch, micro_batch):
                loss = self._task.loss(module, piece)
                (loss * share).backward()  # adds to the gradients in place
                losses[rank] += loss.detach() * share
        self._nodes.step(self._gradient, lr)
        return losses

    def node(self, rank: int) -> nn.Module:
        """Return the model of a node itself: training goes on in it."""
        return self._copies[rank]

    @torch.no_grad()
    def averaged(self) -> nn.Module:
        """Return a module with the mean over the nodes of parameters and floating buffers."""
        average = copy.deepcopy(self._copies[0])
        own = _trained(average)
        for p, x in zip(own, self.x.mean(0).split([p.numel() for p in own]), strict=True):
            p.copy_(x.view_as(p))
        for name, buffer in average.named_buffers():
            if buffer.is_floating_point():
                values = [module.get_buffer(name) for module in self._copies]
                buffer.copy_(torch.stack(values).mean(0))
        return average

    def consensus_distance(self) -> float:
        return self._nodes.consensus_distance()

    def state_dict(self) -> dict[str, Any]:
        buffers = [dict(module.named_buffers()) for module in self._copies]
        return {"nodes": self._nodes.state_dict(), "buffers": buffers}

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._nodes.load_state_dict(saved["nodes"])
        for module, buffers in zip(self._copies, saved["buffers"], strict=True):
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]

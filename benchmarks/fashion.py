"""What several benchmarks share: simulated nodes that train a perceptron, and its accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import decentlam
from decentlam.lab.data import Batches, Data, split
from decentlam.lab.models import make_model


class Training:
    """Simulated nodes with a multi-layer perceptron, and the batches of their shards."""

    def __init__(
        self,
        data: Data,
        method: str,
        network: decentlam.topology.Topology,
        shards: str,
        batch: int,
        seed: int,
        **options: Any,
    ) -> None:
        self.data = data
        n = network.num_nodes
        self.batches = Batches(split(data.labels, n, shards, seed), batch // n, seed)
        self.model = make_model("mlp", data.shape, data.classes, seed)
        self.nodes = decentlam.SimulatedModule(self.model, method, network, momentum=0.9, **options)
        self.tests = list(data.test_batches(2000))

    def steps(self, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the number of each step, and the inputs and labels of all nodes, stacked."""
        n = self.nodes.x.shape[0]
        for step in range(count):
            drawn = [self.batches.load(self.data, step, node) for node in range(n)]
            inputs, labels = (torch.stack(part) for part in zip(*drawn, strict=True))
            yield step, inputs, labels

    @torch.no_grad()
    def top1(self, model: nn.Module) -> float:
        """Return the accuracy of a model on the test set in percent."""
        model.eval()
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in self.tests)
        return 100 * right / sum(len(y) for _, y in self.tests)

    def own(self, most: int) -> float:
        """Return the mean accuracy of the own models of `most` nodes, evenly spaced."""
        n = self.nodes.x.shape[0]
        looked_at = range(0, n, -(-n // most))
        return sum(self.top1(self.nodes.node(i)) for i in looked_at) / len(looked_at)

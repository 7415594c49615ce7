"""DecentLaM on a ring as one would write it without this library: node by node, layer by layer.

Every node has a module, an optimizer state and a DataLoader of its own. benchmarks/training.py
compares with it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class Shard(Dataset):
    """The images of one node, as torchvision's FashionMNIST hands them out."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels  # (N, 28, 28) uint8, (N,)
        self.transform = transforms.Compose(
            [transforms.ToTensor(), transforms.Normalize((0.286,), (0.353,))]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index].numpy())
        return self.transform(image), int(self.labels[index])


class Script:
    """Calling it is one step of all nodes."""

    def __init__(
        self, model: nn.Module, shards: Sequence[Dataset], batch: int, lr: float, momentum: float
    ) -> None:
        self.lr, self.momentum, nodes = lr, momentum, len(shards)
        self.models = [copy.deepcopy(model) for _ in shards]
        self.velocities = [[torch.zeros_like(p) for p in m.parameters()] for m in self.models]
        loaders = [DataLoader(shard, batch, shuffle=True, drop_last=True) for shard in shards]
        self.batches = [forever(loader) for loader in loaders]
        self.neighbors = [(i, (i + 1) % nodes, (i - 1) % nodes) for i in range(nodes)]

    def __call__(self) -> None:
        for model, batches in zip(self.models, self.batches, strict=True):
            x, y = next(batches)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            messages = [[p - self.lr * p.grad for p in m.parameters()] for m in self.models]
            for i, (model, vs) in enumerate(zip(self.models, self.velocities, strict=True)):
                for k, (p, v) in enumerate(zip(model.parameters(), vs, strict=True)):
                    mixed = sum(messages[j][k] for j in self.neighbors[i]) / 3
                    v.mul_(self.momentum).add_(p - mixed)
                    p.sub_(v)


def forever(loader: DataLoader) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader

"""What 16-bit messages do to accuracy: DecentLaM with and without message_dtype, on Fashion-MNIST.

    python benchmarks/sixteen_bits.py                 # 8 processes, 3 seeds, two networks

Real processes train the perceptron 784-128-128-10 on label-sorted shards, 8,000 samples per step in
all. Printed are the accuracy of the averaged model and of the nodes' own ones in the mean, in
percent, with whole and with 16-bit messages, and their differences seed by seed. Whole messages are
exact; the order of samples and the start are the same for both.
"""

from __future__ import annotations

import argparse
import statistics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import decentlam
from decentlam.lab.data import Batches, load, split
from decentlam.lab.models import make_model

BATCH, LR, MOMENTUM = 8000, 0.05, 0.9
NETWORKS = ("ring", "one-peer-symmetric-exponential")
KINDS = {"whole": None, "16 bits": torch.bfloat16}


def train(topology: str, dtype: torch.dtype | None, seed: int, steps: int) -> tuple[float, float]:
    """One node: the accuracy of the averaged model, and of its own."""
    torch.set_num_threads(1)
    node, nodes = dist.get_rank(), dist.get_world_size()
    data = load("fashion-mnist")
    batches = Batches(split(data.labels, nodes, "label-sorted:2", seed), BATCH // nodes, seed)
    model = make_model("mlp", data.shape, data.classes, seed)
    optimizer = decentlam.DecentLaM(
        model.parameters(), lr=LR, momentum=MOMENTUM, topology=topology, stable="auto",
        message_dtype=dtype, overlap=False,
    )  # fmt: skip
    for step in range(steps):
        indices = batches.indices(step, node)
        x, y = data.train_batch(indices, batches.generator(step, node))
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / (steps / 10))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with optimizer.averaged(model):
        averaged = accuracy(model, data)
    return averaged, accuracy(model, data)


@torch.no_grad()
def accuracy(model: nn.Module, data: object) -> float:
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in data.test_batches(2000))
    return 100 * hits / data.num_test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--nodes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for topology in NETWORKS:
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for seed in range(options.seeds):
            for kind, dtype in KINDS.items():
                arguments = (topology, dtype, seed, options.steps)
                results = decentlam.launch(train, options.nodes, arguments)
                nodes = statistics.mean(own for _, own in results)
                found[kind].append((results[0][0], nodes))
        print(f"{topology}, {options.nodes} nodes, {options.steps} steps, {options.seeds} seeds")
        for place, name in enumerate(("averaged", "nodes")):
            values = {kind: [pair[place] for pair in pairs] for kind, pairs in found.items()}
            means = ", ".join(f"{kind} {statistics.mean(v):.2f}" for kind, v in values.items())
            pairs = zip(values["16 bits"], values["whole"], strict=True)
            print(f"  {name}: {means}; by seed {', '.join(f'{a - b:+.2f}' for a, b in pairs)}")


if __name__ == "__main__":
    main()

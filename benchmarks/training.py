"""What simulated training costs: SimulatedModule beside a loop over the nodes, and the data path.

    python benchmarks/training.py [--rounds 7] [--threads 1] [--batches 1000 250 32]

The model is the multi-layer perceptron of the recipe fashion-mlp (784-128-128-10) on 8 nodes. The
loop has a torch module per node, whose parameters and gradients are views of two (8, d) matrices:
forward and backward on each, then one momentum update and one product with the weights for all.
"Products alone" are the matrix products that both cannot do without: the bound for any simulator.
The three are interleaved in random order, once per round, with the same number of threads. Figures
are medians over rounds with the lowest and highest in brackets; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import decentlam
from decentlam.lab.models import make_model
from decentlam.lab.recipes import make
from decentlam.lab.train import train

NODES, LR, MOMENTUM = 8, 0.05, 0.9
SHAPE, CLASSES = (1, 28, 28), 10


class Loop:
    """DecentLaM on a ring, one node after another."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        model = make_model("mlp", SHAPE, CLASSES, seed=0)
        size = sum(p.numel() for p in model.parameters())
        self.inputs, self.labels = inputs, labels
        self.x, self.g, self.v = (torch.zeros(NODES, size) for _ in range(3))
        self.weights = decentlam.topology.ring(NODES).weights().float()
        self.models = [copy.deepcopy(model) for _ in range(NODES)]
        for row, grad, node in zip(self.x, self.g, self.models, strict=True):
            sizes = [p.numel() for p in node.parameters()]
            pieces = zip(node.parameters(), row.split(sizes), grad.split(sizes), strict=True)
            for p, value, gradient in pieces:
                value.copy_(p.detach().flatten())
                p.data, p.grad = value.view_as(p), gradient.view_as(p)

    def __call__(self) -> None:
        self.g.zero_()
        for model, x, y in zip(self.models, self.inputs, self.labels, strict=True):
            F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            mixed = self.weights @ torch.sub(self.x, self.g, alpha=LR)
            self.v.mul_(MOMENTUM).add_(self.x - mixed)
            self.x.sub_(self.v)


def simulated(inputs: Tensor, labels: Tensor) -> Callable[[], object]:
    model = make_model("mlp", SHAPE, CLASSES, seed=0)
    nodes = decentlam.SimulatedModule(model, "decentlam", "ring", NODES, LR, MOMENTUM)
    return lambda: nodes.step(F.cross_entropy, inputs, labels)


def products(inputs: Tensor) -> Callable[[], object]:
    """Forward, gradient of the weights, and of the inputs of all layers but the first."""
    widths = [784, 128, 128, CLASSES]
    x = inputs.flatten(2)
    tensors = []
    for before, after in itertools.pairwise(widths):
        w, out = torch.randn(NODES, before, after), torch.randn(NODES, x.shape[1], after)
        tensors.append((x, w, out))
        x = out

    def run() -> None:
        for k, (x, w, out) in enumerate(tensors):
            torch.bmm(x, w)
            torch.bmm(x.transpose(1, 2), out)
            if k:
                torch.bmm(out, w.transpose(1, 2))

    return run


def compare(batch: int, rounds: int) -> None:
    inputs, labels = torch.randn(NODES, batch, *SHAPE), torch.randint(CLASSES, (NODES, batch))
    tasks = {
        "loop over nodes": Loop(inputs, labels),
        "SimulatedModule": simulated(inputs, labels),
        "products alone": products(inputs),
    }
    repeats = max(3, 4000 // batch)
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for measured in range(-1, rounds):  # the first round warms up and is not counted
        for name in random.sample(list(tasks), len(tasks)):
            begun = time.perf_counter()
            for _ in range(repeats):
                tasks[name]()
            if measured >= 0:
                times[name].append(1e3 * (time.perf_counter() - begun) / repeats)
    print(f"\n{NODES} nodes x {batch} samples")
    for name, values in times.items():
        ratio = [a / b for a, b in zip(times["loop over nodes"], values, strict=True)]
        print(f"  {name:<16} {spread(values)} ms   loop / this: {spread(ratio)}")


def data_share(steps: int) -> None:
    recipe = make("fashion-mlp", epochs=steps / 7, evaluate_every=100.0, log_every=1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(recipe, Path(folder) / "run", simulate=True)
        except ValueError as error:
            print(f"\nthe data path was not timed: {error}")
            return
        lines = (Path(folder) / "run" / "records.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["kind"] == "step"][2:]
    share = [100 * record["data_seconds"] / record["step_seconds"] for record in found]
    print(f"\ntrain --recipe fashion-mlp --simulate: data takes {spread(share)} % of a step")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1000, 250, 32])
    parser.add_argument(
        "--steps", type=int, default=20, help="of `train`, to time the data path; 0: leave it out"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    random.seed(0)
    print(f"784-128-128-10, float32, {options.threads} thread(s)")
    for batch in options.batches:
        compare(batch, options.rounds)
    if options.steps:
        data_share(options.steps)


if __name__ == "__main__":
    main()

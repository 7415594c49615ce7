"""What simulated training costs: SimulatedModule beside a loop over the nodes, and the data path.

    python benchmarks/training.py [--rounds 7] [--threads 1] [--batches 1000 250 32]

The model is the multi-layer perceptron of the recipe fashion-mlp (784-128-128-10) on 8 nodes. The
loop has a torch module per node, whose parameters and gradients are views of two (8, d) matrices:
forward and backward on each, then one momentum update and one product with the weights for all.
"Products alone" are the matrix products that both cannot do without: the bound for any simulator.
The three are interleaved in random order, once per round, with the same number of threads. Figures
are medians over rounds with the lowest and highest in brackets; ratios are taken within a round.

That loop has its batches ready and keeps nodes side by side in memory, as this library does. The
last part compares whole training steps on Fashion-MNIST, data included: `train --simulate` with its
records, and benchmarks/plain_script.py, which is what one writes without the library: with images
decoded one by one as torchvision does it, and with normalized tensors already in memory.
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
from plain_script import Script, Shard
from torch import Tensor
from torch.utils.data import TensorDataset

import decentlam
from decentlam.lab.data import fashion_mnist
from decentlam.lab.data.base import normalized
from decentlam.lab.models import make_model
from decentlam.lab.recipes import Recipe, make
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


def compare_training(steps: int, rounds: int) -> None:
    """Whole steps of the recipe fashion-mlp, batch 8,000, and the share that data takes of ours."""
    try:
        data = fashion_mnist()
    except ValueError as error:
        print(f"\nwhole training steps were not timed: {error}")
        return
    recipe = make("fashion-mlp", epochs=steps / 7, evaluate_every=100.0, log_every=1)
    per_node, model = recipe.batch // NODES, make_model("mlp", SHAPE, CLASSES, seed=0)
    parts = [(data.images[node::NODES], data.labels[node::NODES]) for node in range(NODES)]
    images = [Shard(x[:, 0], y) for x, y in parts]
    tensors = [TensorDataset(normalized(x, data.mean, data.std), y) for x, y in parts]
    tasks = {
        "script, images": Script(model, images, per_node, LR, MOMENTUM),
        "script, tensors": Script(model, tensors, per_node, LR, MOMENTUM),
    }
    times: dict[str, list[float]] = {"train --simulate": [], **{name: [] for name in tasks}}
    share = []
    for _ in range(rounds):
        found = _simulate(recipe)
        times["train --simulate"].append(1e3 * statistics.median(r["step_seconds"] for r in found))
        share += [100 * r["data_seconds"] / r["step_seconds"] for r in found]
        for name, task in tasks.items():
            times[name].append(1e3 * statistics.median(_seconds(task) for _ in range(4)))
    print(f"\nwhole training steps, {NODES} nodes x {per_node} samples of Fashion-MNIST")
    for name, values in times.items():
        ratio = [a / b for a, b in zip(values, times["train --simulate"], strict=True)]
        print(f"  {name:<16} {spread(values)} ms   this / simulated: {spread(ratio)}")
    print(f"of a simulated step the data path takes {spread(share)} %")


def _simulate(recipe: Recipe) -> list[dict[str, float]]:
    """The steps' records, without the first ones, which warm up."""
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, Path(folder) / "run", simulate=True)
        lines = (Path(folder) / "run" / "records.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"][2:]


def _seconds(task: Callable[[], object]) -> float:
    begun = time.perf_counter()
    task()
    return time.perf_counter() - begun


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):6.2f} [{min(values):.2f}, {max(values):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1000, 250, 32])
    parser.add_argument(
        "--steps", type=int, default=20, help="of each whole training; 0: leave it out"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    random.seed(0)
    print(f"784-128-128-10, float32, {options.threads} thread(s)")
    for batch in options.batches:
        compare(batch, options.rounds)
    if options.steps:
        compare_training(options.steps, options.rounds)


if __name__ == "__main__":
    main()

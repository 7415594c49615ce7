"""What patience_seconds does where one node pauses now and then: time, agreement and accuracy.

    python benchmarks/patience.py                     # 8 processes, 2 seeds, 9 kinds of run each

Real processes train the perceptron 784-128-128-10 on label-sorted shards of Fashion-MNIST. A sleep
stands for the rest of a step's computation; node 1 sleeps longer at random steps. Printed are, in
the mean over seeds, the milliseconds per step of the nodes that do not pause (lowest and highest
seed), the consensus distance at the end, the accuracy of the averaged model and of the nodes' own
ones in percent, the steps that node 1 skipped, and how many in a hundred messages to the other
nodes were left out. All kinds of run take turns in the same processes, so whatever else the machine
does reaches all of them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import decentlam
from decentlam.lab.data import Batches, load, split
from decentlam.lab.models import make_model

LR, MOMENTUM, BATCH = 0.05, 0.9, 100
PRINTED = "DecentLaM, Algorithm 2"  # which the optimizer would not choose by itself
METHODS = {
    "DecentLaM": decentlam.DecentLaM,
    PRINTED: partial(decentlam.DecentLaM, stable="ignore"),
    "DmSGD": decentlam.DmSGD,
}
NETWORKS = ("ring", "one-peer-symmetric-exponential")
Kind = tuple[str, str, float | None]  # method, topology, patience
Row = tuple[float, float, float, float, int, int]


def train_all(kinds: list[Kind], seeds: int, options: argparse.Namespace) -> list[Row]:
    """One node: a row for each seed and kind, kind after kind in every seed."""
    torch.set_num_threads(1)
    data = load("fashion-mnist")
    rows = []
    for seed, kind in itertools.product(range(seeds), kinds):
        rows.append(train(*kind, seed, data, options))
        if dist.get_rank() == 0:
            print(f"seed {seed}, {kind}: node 0 {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def train(
    method: str,
    topology: str,
    patience: float | None,
    seed: int,
    data: object,
    options: argparse.Namespace,
) -> Row:
    node, nodes = dist.get_rank(), dist.get_world_size()
    batches = Batches(split(data.labels, nodes, "label-sorted:2", seed), BATCH, seed)
    model = make_model("mlp", data.shape, data.classes, seed)
    optimizer = METHODS[method](
        model.parameters(), lr=LR, momentum=MOMENTUM, topology=topology, overlap=False,
        patience_seconds=patience, shared_memory=False,
    )  # fmt: skip
    pauses = torch.rand(options.steps, generator=torch.Generator().manual_seed(seed))
    taken = 0
    dist.barrier()
    begun = time.perf_counter()
    while (step := optimizer.place.step) < options.steps:
        x, y = data.train_batch(batches.indices(step, node), batches.generator(step, node))
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / (options.steps / 10))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        paused = node == 1 and pauses[step] < options.often
        time.sleep(options.compute + (options.pause if paused else 0.0))
        optimizer.step()
        taken += 1
    seconds = (time.perf_counter() - begun) / taken
    left_out = optimizer.statistics.total_left_out
    distance = optimizer.consensus_distance()
    with optimizer.averaged(model):
        averaged = accuracy(model, data)
    return seconds, distance, averaged, accuracy(model, data), options.steps - taken, left_out


@torch.no_grad()
def accuracy(model: nn.Module, data: object) -> float:
    hits = sum((model(x).argmax(1) == y).sum().item() for x, y in data.test_batches(2000))
    return 100 * hits / data.num_test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--nodes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--compute", type=float, default=0.03, help="seconds of every step")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds")
    parser.add_argument("--often", type=float, default=0.05, help="how likely a pause is")
    parser.add_argument("--patience", type=float, default=0.3, help="seconds")
    options = parser.parse_args()
    patiences = (None, options.patience)
    kinds: list[Kind] = [
        (method, topology, patience)
        for method, topology, patience in itertools.product(METHODS, NETWORKS, patiences)
        if method != PRINTED or (topology == "ring" and patience is not None)
    ]
    everyone = decentlam.launch(train_all, options.nodes, (kinds, options.seeds, options))
    names = "method | topology | patience | ms | distance | averaged | nodes | skipped | left out"
    print(f"| {names} |", f"|{'---|' * 9}", sep="\n")
    for k, (method, topology, patience) in enumerate(kinds):
        runs = [[node[k + seed * len(kinds)] for node in everyone] for seed in range(options.seeds)]
        net = decentlam.topology.resolve(topology, options.nodes)
        others = [i for i in range(options.nodes) if i != 1]
        messages = sum(int(net.messages(step)[others].sum()) for step in range(options.steps))
        means = [
            (
                1e3 * statistics.mean(run[i][0] for i in others),
                run[0][1],
                run[0][2],
                statistics.mean(row[3] for row in run),
                run[1][4],
                100 * sum(run[i][5] for i in others) / messages,
            )
            for run in runs
        ]
        ms, *rest = (statistics.mean(column) for column in zip(*means, strict=True))
        spread = "-".join(f"{f(m[0] for m in means):.0f}" for f in (min, max))
        texts = [f"{ms:.0f} ({spread})", *(f"{value:.2f}" for value in rest)]
        print(f"| {method} | {topology} | {patience or '-'} | {' | '.join(texts)} |")


if __name__ == "__main__":
    main()

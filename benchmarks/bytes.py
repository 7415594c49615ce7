"""Which method on which network reaches an accuracy with the fewest bytes, on Fashion-MNIST.

    python benchmarks/bytes.py                      # 8 nodes, 3 seeds, about half an hour
    python benchmarks/bytes.py --seeds 1 --epochs 10
    python benchmarks/bytes.py --methods decentlam qg-dmsgd --networks bipartite-random-match \\
        --mu 0 0.3 0.5 0.7 0.9                  # QG with several mu

Simulated nodes train the two-layer MLP on label-sorted shards, 8,000 samples per step in all. After
every epoch the mean accuracy of the nodes' own models is measured; printed is what a node has sent
when it first passes the target (all-reduce counts 2 (n-1)/n models), and the accuracy at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from pathlib import Path

import torch
from fashion import Training
from torch.nn import functional as F

import decentlam
from decentlam.lab.data import Data, load
from decentlam.topology import resolve

METHODS: dict[str, dict[str, object]] = {
    "pmsgd": {},
    "dmsgd": {},
    "qg-dmsgd": {"mu": 0.5},
    "gt-dmsgd": {},
    "d2-dmsgd": {},
    "decentlam": {"stable": "auto"},
}
NETWORKS = [
    "ring",
    "base-4",
    "one-peer-symmetric-exponential",
    "one-peer-hypercube",
    "bipartite-random-match",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--mu", nargs="+", type=float, default=[0.5], help="of QG-DmSGD")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the cures are in the table
    data = load("fashion-mnist")
    rows = []
    for method in arguments.methods:
        variants = (
            [{"mu": mu} for mu in arguments.mu] if method == "qg-dmsgd" else [METHODS[method]]
        )
        for network in arguments.networks if method != "pmsgd" else ["complete"]:
            for hyper in variants:
                runs = [
                    train(data, method, hyper, network, arguments, seed)
                    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds)
                ]
                name = f"{method} {hyper['mu']:g}" if "mu" in hyper else method
                rows.append(summary(name, network, runs))
                show(rows[-1])
    print("\nfewest bytes first:")
    for row in sorted(rows, key=lambda r: (r["megabytes"] is None, r["megabytes"] or 0.0)):
        show(row)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def train(
    data: Data,
    method: str,
    hyper: dict[str, object],
    network: str,
    arguments: argparse.Namespace,
    seed: int,
) -> dict[str, float | str | None]:
    n, batch = arguments.nodes, arguments.batch
    topology = resolve(network, n)
    hyper = {"lr": arguments.lr, **hyper}
    training = Training(data, method, topology, "label-sorted", batch, seed, **hyper)
    nodes = training.nodes
    algorithm, size = nodes._nodes.algorithm, sum(p.nbytes for p in training.model.parameters())
    sent, needed, per_epoch = 0.0, None, len(data.labels) // batch
    for step, inputs, labels in training.steps(arguments.epochs * per_epoch):
        lr = arguments.lr * min(1.0, (step + 1) / (2 * per_epoch))
        try:
            nodes.step(F.cross_entropy, inputs, labels, lr=lr)
        except decentlam.NonFiniteError:
            return {"needed": None, "nodes": 0.0, "averaged": 0.0, "ran": "diverged"}
        peers = 2 * (n - 1) / n if method == "pmsgd" else topology.messages(step).double().mean()
        sent += float(peers) * algorithm.payloads(step) * size
        if (step + 1) % per_epoch == 0:
            accuracy = training.own(most=n)
            if needed is None and accuracy >= 100 * arguments.target:
                needed = sent
    return {
        "needed": needed,
        "nodes": accuracy,
        "averaged": training.top1(training.nodes.averaged()),
        "ran": type(algorithm).__name__,
    }


def summary(method: str, network: str, runs: list[dict]) -> dict[str, object]:
    reached = [run["needed"] for run in runs if run["needed"] is not None]
    accuracy = {
        key: (
            statistics.mean(run[key] for run in runs),
            statistics.pstdev([run[key] for run in runs]),
        )
        for key in ("averaged", "nodes")
    }
    return {
        "method": method,
        "network": network,
        "ran": runs[0]["ran"],
        "megabytes": statistics.mean(reached) / 1e6 if len(reached) == len(runs) else None,
        "reached": f"{len(reached)} of {len(runs)}",
        **accuracy,
    }


def show(row: dict) -> None:
    needed = "-" if row["megabytes"] is None else f"{row['megabytes']:.1f} MB"
    averaged, nodes = (f"{mean:.1f} ± {sd:.1f}" for mean, sd in (row["averaged"], row["nodes"]))
    print(
        f"{row['method']:12s} {row['network']:32s} {row['ran']:16s} {needed:>9s} "
        f"({row['reached']})  averaged {averaged}  nodes {nodes}",
        flush=True,
    )


if __name__ == "__main__":
    main()

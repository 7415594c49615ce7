"""The table behind the default topology: bytes, time, stability and accuracy over the nodes.

    python benchmarks/topologies.py                        # computed columns, n = 2 to 256
    python benchmarks/topologies.py --markdown             # growth and bias as the docs have them
    python benchmarks/topologies.py --train                # and accuracy: 3 seeds, an hour or so
    python benchmarks/topologies.py --train --nodes 8 --networks ring base-4

Computed, for DecentLaM at momentum 0.9 with stable="auto": models sent per node and step; the time
of an iteration over that of an all-reduce (ResNet-50, 250 ms of compute, 50 us, at 1, 10 and 25
Gbit/s), as `decentlam predict` has it; the factor by which a step shrinks disagreement; the bias
over DSGD's on the same network; and the disagreement that constant gradients cause in DSGD, over
lr^2. With --markdown the last is that times the bias.

Trained: simulated nodes, the MLP 784-128-128-10 on Fashion-MNIST dealt by label, two pieces each,
2,400 samples per step in all, 140 steps; accuracy of the averaged model and of the nodes' own
ones (of 8 nodes at most) in percent, mean and standard deviation over seeds. Lines that are in
--out already are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from fashion import Training
from torch.nn import functional as F

import decentlam
from decentlam.analysis import stability
from decentlam.lab.data import load
from decentlam.lab.network.prediction import FORWARD_SHARE, Traffic, predict_step
from decentlam.topology import TOPOLOGIES, Topology, complete

EVERYONE = "all-reduce"
NETWORKS = (
    "symmetric-exponential",
    "ring",
    "one-peer-hypercube",
    "one-peer-exponential",
    "one-peer-symmetric-exponential",
    "bipartite-random-match",
    "base-2",
    "base-4",
)
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 24, 31, 32, 33, 48, 64, 100, 127, 128, 255, 256)
TRAINED = (8, 12, 15, 16, 32)
SPEEDS = (1, 10, 25)  # Gbit/s
RESNET50_BYTES, COMPUTE_SECONDS, LATENCY_SECONDS = 4 * 25_557_032, 0.25, 5e-5
BATCH, LR, MOMENTUM, STEPS, WARM_UP = 2400, 0.05, 0.9, 140, 14
Record = dict[str, object]


def computed(name: str, n: int) -> Record:
    if name == EVERYONE:
        return {"sent": 2 * (n - 1) / n, **{f"{speed} Gbit/s": 1.0 for speed in SPEEDS}}
    network = TOPOLOGIES[name](n)
    method = "decentlam" if network.symmetric else "dmsgd"
    period = min(network.period or 64, 64)
    peers = [network.messages(k) for k in range(period)]
    found: Record = {"method": method}
    found["sent"] = sum(float(sent.double().mean()) for sent in peers) / period
    for speed in SPEEDS:  # the busiest node decides how long a step takes
        ours = statistics.mean(seconds(n, speed, Traffic(int(sent.max()))) for sent in peers)
        theirs = seconds(n, speed, Traffic(None, ddp_buckets=True))
        found[f"{speed} Gbit/s"] = ours / theirs
    begun = time.perf_counter()
    growth = decentlam.growth(method, network, MOMENTUM, stable="auto")
    found |= {"growth": float(growth), "bias": growth.bias, "form": repr(growth.algorithm)}
    found |= {"weights": repr(growth.topology), "seconds": time.perf_counter() - begun}
    return found | {"apart": disagreement(growth.topology)}


def seconds(nodes: int, gigabits: float, traffic: Traffic) -> float:
    """Return the predicted time of a step of ResNet-50."""
    forward = FORWARD_SHARE * COMPUTE_SECONDS
    step = (forward, COMPUTE_SECONDS - forward, 0.0, LATENCY_SECONDS)
    return predict_step(traffic, nodes, RESNET50_BYTES, gigabits * 1e9, *step).seconds


def disagreement(topology: Topology, steps: int = 400, probes: int = 8) -> float:
    """Return the mean squared distance from the average that plain mixing sustains, over lr^2.

    x+ = W (x - lr g) with gradients that differ from node to node and stay. Static symmetric
    weights with eigenvalues l off the average give the mean of (l / (1 - l))^2.
    """
    n = topology.num_nodes
    if topology.static and topology.symmetric:
        values = np.sort(topology.eigenvalues(0).numpy())[:-1]
        return float(np.square(values / (1 - values)).sum() / n)
    g = np.random.default_rng(0).standard_normal((n, probes))
    g -= g.mean(0)
    x, total = np.zeros((n, probes)), 0.0
    for k in range(2 * steps):
        x = topology.sparse(k).apply(x - g)
        total += float(np.square(x).mean()) if k >= steps else 0.0
    return total / steps


def trained(name: str, n: int, seed: int) -> Record:
    network = complete(n) if name == EVERYONE else TOPOLOGIES[name](n)
    method = "pmsgd" if name == EVERYONE else "decentlam" if network.symmetric else "dmsgd"
    stable = {"stable": "auto"} if method == "decentlam" else {}
    data = load("fashion-mnist")
    training = Training(data, method, network, "label-sorted:2", BATCH, seed, lr=LR, **stable)
    for step, inputs, labels in training.steps(STEPS):
        lr = LR * min(1.0, (step + 1) / WARM_UP)
        training.nodes.step(F.cross_entropy, inputs, labels, lr=lr)
    own = training.own(most=1 if method == "pmsgd" else 8)
    return {"averaged": training.top1(training.nodes.averaged()), "own": own}


def exists(name: str, n: int) -> bool:
    try:
        return name == EVERYONE or TOPOLOGIES[name](n).num_nodes == n
    except ValueError:
        return False


def key(record: Record) -> tuple[object, ...]:
    return record["network"], record["nodes"], record.get("seed")


def show(records: list[Record]) -> None:
    """A line per size and network."""
    print(f"{'n':>3s} {'network':32s} {'sent':>5s} {'1, 10, 25 Gbit/s':>17s} {'growth':>6s} "
          f"{'bias':>6s} {'apart':>6s}  averaged     own")  # fmt: skip
    for place in dict.fromkeys(key(r)[:2] for r in sorted(records, key=lambda r: r["nodes"])):
        mine = [r for r in records if key(r)[:2] == place]
        facts = next((r for r in mine if "sent" in r), {})
        line = f"{place[1]:3d} {place[0]:32s} {facts.get('sent', float('nan')):5.2f} "
        line += " ".join(f"{facts.get(f'{s} Gbit/s', float('nan')):5.2f}" for s in SPEEDS)
        for column in ("growth", "bias", "apart"):
            value = facts.get(column)
            line += f" {value:6.3f}" if isinstance(value, float) else "      -"
        for score in ("averaged", "own"):
            values = [float(r[score]) for r in mine if score in r]
            spread = statistics.pstdev(values) if values else 0.0
            line += f"  {statistics.mean(values):.1f} ± {spread:.1f}" if values else ""
        print(line)


def show_markdown(records: list[Record]) -> None:
    """Growth / bias / disagreement: a row per size, a column per network."""
    found = {}
    for r in records:
        if "growth" in r and r["network"] != "one-peer-hypercube":  # base-2 is the same
            bias = float("inf") if r["bias"] is None else r["bias"]
            apart = bias * r["apart"]
            biased = f"{bias:.2f} / {apart:.{1 if apart < 10 else 0}f}" if apart > 1e-9 else "0 / 0"
            found[key(r)[:2]] = f"{r['growth']:.3f} / {biased}"
    names = list(dict.fromkeys(name for name, _ in found))
    print("| n |", " | ".join(f"`{name}`" for name in names), "|")
    print("|---" * (len(names) + 1) + "|")
    for n in sorted({n for _, n in found}):
        print(f"| {n} |", " | ".join(found.get((name, n), "") for name in names), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", nargs="+", type=int)
    parser.add_argument("--networks", nargs="+", default=[EVERYONE, *NETWORKS])
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--markdown", action="store_true", help="growth / bias / disagreement only")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/topologies.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    stability._LARGEST = 3 * max(SIZES)  # exact, also where a run would be quicker
    logging.disable(logging.WARNING)  # what ran is in the table
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    records = [json.loads(line) for line in lines]
    tasks = [(name, n, None) for n in options.nodes or SIZES for name in options.networks]
    if options.train:
        tasks += [
            (name, n, seed)
            for seed in range(options.seeds)
            for n in options.nodes or TRAINED
            for name in options.networks
        ]
    done = set(map(key, records))
    for name, n, seed in tasks:
        if (name, n, seed) in done or not exists(name, n):
            continue
        found = computed(name, n) if seed is None else trained(name, n, seed)
        records.append({"network": name, "nodes": n, "seed": seed, **found})
        with options.out.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
    (show_markdown if options.markdown else show)(records)


if __name__ == "__main__":
    main()

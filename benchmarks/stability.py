"""Bias and speed on networks that change: the tables of docs/stability.md.

    python benchmarks/stability.py

The paper's regression with full gradients: mean relative error of the last 300 of 3,000 steps, over
DSGD's on the same weights, and the steps until it stays below 1e-4, over DmSGD's; the growth too.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from decentlam import algorithms, simulate
from decentlam.analysis.stability import growth_rate
from decentlam.lab.studies.regression import steps_to
from decentlam.lab.theory import linear_regression
from decentlam.topology import Topology, resolve

NETWORKS = ["bipartite-random-match", "one-peer-hypercube", "one-peer-symmetric-exponential"]
CONTENDERS = {
    "dsgd": ("dsgd", {}),
    "dmsgd": ("dmsgd", {}),
    "da-dmsgd": ("da-dmsgd", {}),
    "d2-dmsgd": ("d2-dmsgd", {}),
    "gt-dmsgd": ("gt-dmsgd", {}),
    "decentlam-steady": ("decentlam-steady", {}),
    **{f"qg-dmsgd mu {mu}": ("qg-dmsgd", {"mu": mu}) for mu in (0.0, 0.3, 0.5, 0.7, 0.9)},
    "qg-dmsgd mu 0, lazy 0.6": ("qg-dmsgd", {"mu": 0.0}),
}


def measure(name: str, network: Topology, lr: float, seed: int) -> tuple[float, int | None, float]:
    method, hyper = CONTENDERS[name]
    network = network.lazy(0.6) if "lazy" in name else network
    problem = linear_regression(network.num_nodes, seed=seed)
    algorithm = algorithms.make(method, None if method == "dsgd" else 0.9, **hyper)
    errors = [problem.relative_error(problem.start)]
    simulate(
        algorithm,
        network,
        problem.start,
        problem.gradient,
        lr,
        3000,
        callback=lambda k, x: errors.append(problem.relative_error(x)),
    )
    rate = growth_rate(algorithm, network).value
    return float(np.mean(errors[-300:])), steps_to(errors, 1e-4), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for network in NETWORKS:
        print(f"\n{network}({arguments.nodes})", flush=True)
        found = {
            name: measure(name, resolve(network, arguments.nodes), arguments.lr, arguments.seed)
            for name in CONTENDERS
        }
        for name, (error, steps, rate) in found.items():
            ratio = error / found["dsgd"][0]
            speed = "-" if steps is None else f"{steps} ({steps / found['dmsgd'][1]:.2f})"
            print(f"  {name:24s} {error:9.3g} ({ratio:8.3g})  {speed:>12s}  growth {rate:.3f}")


if __name__ == "__main__":
    main()

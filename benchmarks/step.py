"""Median iteration time of local training, DDP, decent-dp and ours, interleaved in one run.

    python benchmarks/step.py                                   # n = 4, all models, on loopback
    python benchmarks/step.py --nodes 8 --models convnet-0.2M transformer-9.5M

Every contender is built, warmed up and timed in each round, in an order shuffled anew, so that
a noisy machine hits all alike. Printed is the time relative to DDP in the same round: median
and, in brackets, lowest and highest round; and the median relative to a bare exchange of one flat
message with one peer. Lower is faster.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

import decentlam
from decentlam.lab.network.contenders import BASE, LR, MOMENTUM, has_decent_dp
from decentlam.lab.network.models import Loss, make_model
from decentlam.lab.network.timing import Benchmark, measure

BARE = "raw exchange, 1 peer"
MODELS = ["convnet-0.2M", "transformer-9.5M", "transformer-25M"]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM, foreach=True),
    "decentlam": lambda p: decentlam.DecentLaM(p, lr=LR, momentum=MOMENTUM),
    "pmsgd": lambda p: decentlam.PmSGD(p, lr=LR, momentum=MOMENTUM),
}


def report(model: str, times: dict[str, list[float]], nodes: int) -> None:
    print(f"\n{model}, {nodes} nodes: DDP {1e3 * statistics.median(times[BASE]):.1f} ms")
    for name, values in times.items():
        line = f"  {name:42s} {spread(values, times[BASE])}"
        if BARE in times:
            beside = [a / b for a, b in zip(values, times[BARE], strict=True)]
            line += f"   {statistics.median(beside):5.2f} of the {BARE}"
        print(line, flush=True)


def spread(values: list[float], base: list[float]) -> str:
    ratio = [a / b for a, b in zip(values, base, strict=True)]
    return f"{statistics.median(ratio):5.2f} ({min(ratio):.2f}-{max(ratio):.2f})"


def single_node(rounds: int = 9) -> None:
    """Time step() with one node, beside torch.optim.SGD(foreach=True); update only."""
    print("\none node: time of step() relative to torch.optim.SGD(foreach=True)")
    torch.set_num_threads(1)
    for model_name in MODELS:
        times: dict[str, list[float]] = {name: [] for name in OPTIMIZERS}
        for _ in range(rounds):
            for name in random.sample(list(times), len(times)):
                times[name].append(time_step(name, *make_model(model_name)))
        for name in ("decentlam", "pmsgd"):
            print(f"  {model_name:20s} {name:10s} {spread(times[name], times['sgd'])}")


def time_step(name: str, model: torch.nn.Module, loss: Loss) -> float:
    optimizer = OPTIMIZERS[name](model.parameters())
    spent = []
    for _ in range(8):
        optimizer.zero_grad()
        loss(model).backward()
        begun = time.perf_counter()
        optimizer.step()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[], help="contenders; DDP is always there")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--skip-single", action="store_true")
    given = parser.parse_args()
    if not has_decent_dp():
        print("decent-dp is not installed and left out; `uv pip install decent-dp` adds it")
    seconds: dict[str, dict[str, list[float]]] = {}
    for model in given.models:
        benchmark = Benchmark(
            model, rounds=given.rounds, iterations=given.iterations, only=tuple(given.only)
        )
        times = seconds.setdefault(model, {})
        for record in measure(benchmark, given.nodes, None, loopback=True):
            if "seconds" in record:
                times.setdefault(record["contender"], []).append(record["seconds"])
        report(model, times, given.nodes)
    if not given.skip_single:
        single_node()
    if given.json:
        given.json.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()

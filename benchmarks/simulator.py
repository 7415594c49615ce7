"""What a simulated step costs: DecentLaM on rings of 128 to 2048 nodes, 10,000 columns, float32.

    python benchmarks/simulator.py [--rounds 9] [--nodes 128 1024] [--columns 10000]

Three things are timed on each ring, interleaved in random order, once per round: a whole step; the
mixing alone, block by block as a step does it; and one memory pass, `out.copy_(messages)`, the
least that touching every message once can cost. Messages rotate through a pool larger than the
cache, or the pass over a small ring would not leave it. Figures are medians over rounds, with the
lowest and highest round in brackets; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from decentlam.algorithms import Reach
from decentlam.exchange.dense import DenseMix
from decentlam.simulation.simulate import Nodes, column_blocks
from decentlam.topology import ring

POOL_BYTES = 160 * 2**20
NODES_PER_TIMING = 4096  # a round repeats small rings until it has stepped this many nodes


class Ring:
    """One ring and the three things to time on it."""

    def __init__(self, n: int, columns: int) -> None:
        net = ring(n)
        x0, self.gradient = torch.randn(n, columns), torch.randn(n, columns)
        self.nodes = Nodes("decentlam", net, x0, momentum=0.9)
        self.dense = DenseMix(net)
        copies = max(2, -(-POOL_BYTES // x0.nbytes))
        pool = [torch.randn(n, columns) for _ in range(copies)]
        widths = column_blocks(x0)
        self.messages = itertools.cycle(pool)
        self.blocks = itertools.cycle(
            [[block.contiguous() for block in message.split(widths, 1)] for message in pool]
        )
        self.out = torch.empty(n, columns)
        self.repeats = max(1, NODES_PER_TIMING // n)

    def step(self) -> None:
        self.nodes.step(self.gradient, 0.01)

    def mix(self) -> None:
        for block in next(self.blocks):
            self.dense(block, 0, Reach.NEIGHBORS)

    def memory_pass(self) -> None:
        self.out.copy_(next(self.messages))


def milliseconds(task: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        task()
    return 1e3 * (time.perf_counter() - start) / repeats


def spread(values: list[float], digits: int = 2) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--columns", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()

    rings = {n: Ring(n, options.columns) for n in options.nodes}
    times: dict[tuple[int, str], list[float]] = {}
    for measured in range(-1, options.rounds):  # the first round warms up and is not counted
        # The three of one ring follow each other, so that they meet the same load of the machine.
        tasks = [
            (n, name)
            for n in random.sample(list(rings), len(rings))
            for name in random.sample(["step", "mix", "memory_pass"], 3)
        ]
        for n, name in tasks:
            taken = milliseconds(getattr(rings[n], name), rings[n].repeats)
            if measured >= 0:
                times.setdefault((n, name), []).append(taken)

    threads = torch.get_num_threads()
    print(f"DecentLaM on a ring, {options.columns:,} columns, float32, {threads} thread(s), ms")
    heads = ("nodes", "step", "mixing", "memory pass", "mixing/pass", "step/pass")
    print("{:>6}  {:<24} {:<21} {:<21} {:<20} {:<20}".format(*heads))
    for n in rings:
        step, mix, one_pass = (times[n, name] for name in ("step", "mix", "memory_pass"))
        cells = [spread(step), spread(mix), spread(one_pass)]
        cells += [
            spread([a / b for a, b in zip(task, one_pass, strict=True)]) for task in (mix, step)
        ]
        print("{:>6}  {:<24} {:<21} {:<21} {:<20} {:<20}".format(n, *cells))
    if len(rings) > 1:
        cost = [statistics.median(times[n, "step"]) for n in rings]
        slope = np.polyfit(np.log(list(rings)), np.log(cost), 1)[0]
        print(f"cost per step grows as nodes^{slope:.2f}")


if __name__ == "__main__":
    main()

"""What the benchmark would measure if the cost model were true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from decentlam.analysis.cost import Calibration
from decentlam.lab.calibration import Measurement

TRUTH = Calibration(2e-4, 1.08, 1.2, 1.5e-9, 3e-9, 0.012)


def benchmark(truth: Calibration, noise: float = 0.0, nodes=(4, 8)) -> list[Measurement]:
    """What the benchmark would measure if the model were true."""
    generator = np.random.default_rng(1)
    found = []
    for n in nodes:
        for bandwidth, size in ((1e9, 40_000_000), (1e8, 8_000_000), (None, 40_000_000)):
            for kind, peers, overlap, buckets in (
                ("all-reduce", 0, "backward", 2),
                ("all-reduce", 0, "backward", 40),
                ("neighbors", 1, "none", 1),
                ("neighbors", 2, "none", 4),
                ("neighbors", 1, "backward", 40),
                ("neighbors", 1, "forward", 40),
                ("neighbors", 1, "iteration", 1),
            ):
                for compute in ("real", "sleep"):
                    name = f"{kind} {peers} {overlap} {buckets} {n} {bandwidth} {compute}"
                    blank = Measurement(
                        name, n, bandwidth, size, compute, 0.3, [1.0], kind, peers, overlap,
                        buckets=buckets,
                    )  # fmt: skip
                    rounds = 1 + noise * generator.standard_normal(5)
                    found.append(replace(blank, seconds=list(blank.predicted(truth) * rounds)))
    return found

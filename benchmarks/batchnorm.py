"""Where the averaged model takes its batch norm statistics from: the table in docs/training.md.

    python benchmarks/batchnorm.py --out out/batchnorm          # 18 runs; called again, it goes on

The same nodes are trained twice, and evaluated once with the mean of the nodes' statistics and once
with statistics estimated for the averaged model. Printed is the top-1 of the averaged model, in
percent, after each epoch (mean over seeds), and the difference at the end by seed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from decentlam.lab.recipes import BATCH_NORMS, Recipe
from decentlam.lab.studies.sweep import name, sweep
from decentlam.lab.train.records import read

CASES = [("label-sorted:2", "decentlam"), ("label-sorted:2", "dmsgd"), ("iid", "decentlam")]


def recipe(shards: str, method: str, seed: int, batch_norm: str, epochs: int) -> Recipe:
    return Recipe(
        method=method,
        topology="ring",
        nodes=8,
        model="cnn",
        data="fashion-mnist",
        shards=shards,
        batch=2048,
        lr=0.1,
        epochs=epochs,
        seed=seed,
        batch_norm=batch_norm,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/batchnorm"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    for shards, method in CASES:
        curves: dict[str, list[list[float]]] = {}
        for kind in BATCH_NORMS:
            recipes = [
                recipe(shards, method, seed, kind, arguments.epochs)
                for seed in range(arguments.seeds)
            ]
            place = arguments.out / kind
            sweep(recipes, place)
            curves[kind] = [_curve(place / "runs" / name(r)) for r in recipes]
        means = {
            kind: ", ".join(f"{statistics.mean(values):.1f}" for values in zip(*found, strict=True))
            for kind, found in curves.items()
        }
        average, estimate = (curves[kind] for kind in ("average", "estimate"))
        apart = [f"{b[-1] - a[-1]:+.1f}" for a, b in zip(average, estimate, strict=True)]
        print(
            f"{shards:16s} {method:10s} {means}  estimate - average: {', '.join(apart)}", flush=True
        )


def _curve(place: Path) -> list[float]:
    return [100 * r["averaged_top1"] for r in read(place) if r["kind"] == "evaluation"]


if __name__ == "__main__":
    main()

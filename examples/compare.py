"""PmSGD, DmSGD and DecentLaM on 8 real processes, digits dealt by label, large batches.

    torchrun --nproc-per-node 8 examples/compare.py [DIRECTORY]

Prints a table and writes a report. A node sees two or three of the ten digits; momentum amplifies
what that makes of its model in DmSGD, and not in DecentLaM.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

import decentlam
from decentlam.lab import report
from decentlam.lab.recipes import Recipe
from decentlam.lab.train import train

METHODS = {
    "pmsgd": "PmSGD, all-reduce",
    "dmsgd": "DmSGD, one peer",
    "decentlam": "DecentLaM, one peer",
}


def sent_per_step(run: Path) -> float:
    """Return the kilobytes that a node sends per step, from the records of a run."""
    records = map(json.loads, (run / "records.jsonl").read_text().splitlines())
    sent = [record["bytes_sent"] for record in records if record["kind"] == "step"]
    return sum(sent) / len(sent) / 1e3


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "out/compare")
    decentlam.init()
    first = dist.get_rank() == 0
    rows = []
    for method, name in METHODS.items():
        recipe = Recipe(
            method=method,
            topology="bipartite-random-match",
            nodes=dist.get_world_size(),
            shards="label-sorted:2",
            batch=128 * dist.get_world_size(),
            epochs=100.0,
            warmup_epochs=20.0,
            lr=0.05,
            evaluate_every=10.0,
        )
        place = directory / method
        if first:
            print(f"{name}: {recipe.nodes} processes, batch {recipe.batch}", flush=True)
        end = train(recipe, place).evaluation
        if end is not None:  # process 0 has the numbers
            accuracies = (end["averaged_top1"], end["nodes_top1"], end["nodes_top1_min"])
            numbers = "".join(f"{value:>12.1%}" for value in accuracies)
            rows.append(f"{name:<22}{numbers}{sent_per_step(place):>12.0f}")
    if first:
        print(f"\n{'':<22}{'averaged':>12}{'node mean':>12}{'worst node':>12}{'KB per step':>12}")
        print(*rows, sep="\n")
        page = report.write([directory / method for method in METHODS], directory / "report.html")
        print(f"\nThe report with curves: {page}")


if __name__ == "__main__":
    main()

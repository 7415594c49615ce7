"""Two checkouts of decentlam timed against each other, alternating in one run.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before . step.py --models transformer-9.5M
    python benchmarks/versions.py ../before . network.py --bandwidth 1Gbit

Each round runs the benchmark once with either checkout, in an order that alternates. Printed is the
time of the second over the first for every contender that both have, relative to those that do not
run our code (local training, DDP, decent-dp and the like; their geometric mean) in the same run:
median and, in brackets, lowest and highest round. Below 1 the second is faster. The table is
printed anew after each round, so that a run which is cut short has told what it found.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

NOT_OURS = ("local only", "DDP", "raw exchange", "decent-dp")


def run_once(checkout: Path, benchmark: str, arguments: list[str]) -> dict[str, dict[str, float]]:
    """Return the seconds per iteration by model and contender, in one run of the benchmark."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "seconds.json"
        subprocess.run(
            [sys.executable, benchmark, "--rounds", "1", "--json", str(out), *arguments],
            cwd=checkout / "benchmarks",
            env={**os.environ, "PYTHONPATH": str(checkout.resolve() / "src")},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        found = json.loads(out.read_text())
    if benchmark == "network.py":
        timed = {r["contender"]: [r["seconds"]] for r in found["records"] if "seconds" in r}
        found = {"": timed}
    return {
        model: {name: statistics.median(values) for name, values in times.items()}
        for model, times in found.items()
    }


def compare(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the ratios of contenders in both, over the geometric mean of those not ours."""
    ratios = {name: after[name] / seconds for name, seconds in before.items() if name in after}
    base = statistics.geometric_mean(ratios[name] for name in ratios if name.startswith(NOT_OURS))
    return {name: ratio / base for name, ratio in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("benchmark", choices=["step.py", "network.py"])
    parser.add_argument("--alternations", type=int, default=5)
    arguments, rest = parser.parse_known_args()
    ratios: dict[str, list[float]] = {}
    for round in range(arguments.alternations):
        order = [arguments.before, arguments.after]
        found = {
            checkout: run_once(checkout, arguments.benchmark, rest)
            for checkout in (order if round % 2 else order[::-1])
        }
        for model, before in found[arguments.before].items():
            for name, ratio in compare(before, found[arguments.after][model]).items():
                ratios.setdefault(f"{model}: {name}".removeprefix(": "), []).append(ratio)
        report(ratios, round + 1)


def report(ratios: dict[str, list[float]], rounds: int) -> None:
    print(f"\nafter {rounds} rounds")
    for name, values in ratios.items():
        spread = f"({min(values):.2f}-{max(values):.2f})"
        print(f"  {name:52s} {statistics.median(values):5.2f} {spread}", flush=True)


if __name__ == "__main__":
    main()

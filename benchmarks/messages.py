"""What fewer bits do to accuracy: DecentLaM with whole and with shorter messages.

    python benchmarks/messages.py                              # Fashion-MNIST, 16 nodes, 3 seeds
    python benchmarks/messages.py --data cifar10 --data-path DIR --batch 1600 --steps 100
    python benchmarks/messages.py --topology bipartite-random-match --kinds whole float16 bfloat16

Simulated nodes train a perceptron with two hidden layers of 128 on label-sorted shards, two pieces
each. They see of each other what `message_dtype` would tell them: rounded messages, or differences
that the library's codecs wrote down, one reference for each step of the topology's period, as
neighbors have it on base-2 with a power of two nodes. (Blocks of a codec begin at other elements
than in an optimizer's buckets.) `int4` and `top-8` are codecs of this file: 4 bits per element, and
the eighth of the elements that has changed most.

Printed are bytes per parameter, and accuracy in percent of the averaged model and of the nodes' own
ones, by seed. Lines that are in --out already are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import decentlam
from decentlam.algorithms import Reach
from decentlam.exchange.codecs import BLOCK, CODECS, Codec
from decentlam.lab.data import Batches, load, split
from decentlam.lab.models import make_model
from decentlam.topology import Topology, resolve

LR, MOMENTUM = 0.05, 0.9
MEASURED = 1 << 20  # elements


class Int4(Codec):
    """Whole multiples, from -7 to 7, of a scale that half a block shares."""

    def packet_bytes(self, elements: int) -> int:
        return -(-elements // BLOCK) * (2 * 4 + BLOCK // 2)

    def encode(self, change: Tensor, packet: Tensor) -> None:
        blocks = F.pad(change.float(), (0, -len(change) % BLOCK)).view(-1, BLOCK // 2)
        scale = blocks.abs().amax(1, keepdim=True).div_(7).clamp_(min=1e-30)
        codes = blocks.div_(scale).round_().to(torch.int16).add_(8).to(torch.uint8)
        halves = codes[:, ::2] << 4 | codes[:, 1::2]
        packet.view(len(scale), -1).copy_(torch.cat([scale.view(torch.uint8), halves], 1))

    def decode(self, packet: Tensor, elements: int) -> Tensor:
        blocks = packet.view(-1, 4 + BLOCK // 4)
        scale, halves = blocks[:, :4].contiguous().view(torch.float32), blocks[:, 4:]
        codes = torch.stack([halves >> 4, halves & 15], 2).view(len(blocks), -1)
        return (codes.float() - 8).mul_(scale).view(-1)[:elements]


class Top(Codec):
    """The share of the elements that has changed most: their places, and 16 bits of each."""

    def __init__(self, share: int) -> None:
        self.share = share

    def packet_bytes(self, elements: int) -> int:
        return -(-elements // self.share) * (4 + 2)

    def encode(self, change: Tensor, packet: Tensor) -> None:
        count = -(-len(change) // self.share)
        places = change.abs().topk(count).indices
        packet[: 4 * count].view(torch.int32).copy_(places)
        packet[4 * count :].view(torch.bfloat16).copy_(change[places])

    def decode(self, packet: Tensor, elements: int) -> Tensor:
        count = len(packet) // 6
        change = torch.zeros(elements)
        places = packet[: 4 * count].view(torch.int32).long()
        change[places] = packet[4 * count :].view(torch.bfloat16).float()
        return change


KINDS: dict[str, torch.dtype | Codec | None] = {
    "whole": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": CODECS[torch.int8],
    "int4": Int4(),
    "top-8": Top(8),
}


class Told:
    """Mixes the messages of all nodes as they are told to each other."""

    def __init__(self, topology: Topology, kind: torch.dtype | Codec) -> None:
        self._topology, self._kind = topology, kind
        self._known: dict[tuple[int, int], Tensor] = {}
        self._step, self._place = -1, 0  # messages come in pieces, in the same order at each step

    def __call__(self, message: Tensor, index: int, reach: Reach) -> Tensor:
        self._place = self._place + 1 if index == self._step else 0
        self._step = index
        known = self._told(message, index % (self._topology.period or 1))
        weights = self._topology.weights(index).to(message.dtype)
        return message + (weights @ known - known)

    def _told(self, message: Tensor, phase: int) -> Tensor:
        if isinstance(self._kind, torch.dtype):
            return message.to(self._kind).to(message.dtype)
        known = self._known.get((self._place, phase))
        if known is None:
            known = self._known[self._place, phase] = message.clone()
            return known
        packet = torch.empty(self._kind.packet_bytes(message.shape[1]), dtype=torch.uint8)
        for row, z in zip(known, message, strict=True):
            self._kind.encode(z - row, packet)
            row += self._kind.decode(packet, len(row))
        return known


def train(kind: str, options: argparse.Namespace, seed: int) -> dict[str, object]:
    data, n = load(options.data, options.data_path), options.nodes
    batches = Batches(split(data.labels, n, options.shards, seed), options.batch // n, seed)
    model = make_model("mlp", data.shape, data.classes, seed)
    nodes = decentlam.SimulatedModule(
        model, "decentlam", resolve(options.topology, n), lr=LR, momentum=MOMENTUM, stable="auto"
    )
    told = KINDS[kind]
    if told is not None:
        nodes._nodes._mix = Told(nodes._nodes.topology, told)
    try:
        for step in range(options.steps):
            drawn = [
                data.train_batch(batches.indices(step, i), batches.generator(step, i))
                for i in range(n)
            ]
            inputs, labels = (torch.stack(part) for part in zip(*drawn, strict=True))
            lr = LR * min(1.0, (step + 1) / (options.steps / 10))
            nodes.step(F.cross_entropy, inputs, labels, lr=lr)
    except decentlam.NonFiniteError:
        return {"averaged": None, "own": None, "apart": None, "diverged": step}
    tests = list(data.test_batches(2000))
    own = statistics.mean(top1(nodes.node(i), tests) for i in range(0, n, -(-n // 8)))
    apart = nodes.consensus_distance()
    return {"averaged": top1(nodes.averaged(), tests), "own": own, "apart": apart}


@torch.no_grad()
def top1(model: nn.Module, tests: list[tuple[Tensor, Tensor]]) -> float:
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in tests)
    return 100 * right / sum(len(y) for _, y in tests)


def bytes_each(kind: str) -> float:
    told = KINDS[kind]
    if isinstance(told, Codec):
        return told.packet_bytes(MEASURED) / MEASURED
    return float((told or torch.float32).itemsize)


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
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--out", type=Path, default=Path("out/messages.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the steady form runs
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    records = [json.loads(line) for line in lines]
    setting = f"{options.data} {options.shards} {options.topology} {options.nodes}"
    setting += f" batch {options.batch} steps {options.steps}"
    for seed in range(options.seeds):
        for kind in options.kinds:
            key = {"setting": setting, "kind": kind, "seed": seed}
            if any(key.items() <= record.items() for record in records):
                continue
            records.append({**key, **train(kind, options, seed)})
            with options.out.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
    print(setting)
    for kind in options.kinds:
        mine = [r for r in records if (r["setting"], r["kind"]) == (setting, kind)]
        line = f"  {kind:9s} {bytes_each(kind):5.2f} bytes"
        for score in ("averaged", "own"):
            values = [r[score] for r in mine if r[score] is not None]
            shown = ", ".join(f"{value:.1f}" for value in values) or "diverges"
            line += f"  {score} {statistics.mean(values) if values else 0.0:.2f} ({shown})"
        print(line)


if __name__ == "__main__":
    main()

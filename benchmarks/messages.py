"""What fewer bits do to accuracy: DecentLaM with whole and with shorter messages.

    python benchmarks/messages.py                              # Fashion-MNIST, 16 nodes, 3 seeds
    python benchmarks/messages.py --data cifar10 --data-path DIR --batch 1600 --steps 100
    python benchmarks/messages.py --topology bipartite-random-match --kinds whole float16 bfloat16
    python benchmarks/messages.py --kinds top-4 top-16 rank-4 --gamma 1 0.5 0.2

Simulated nodes train a perceptron with two hidden layers of 128 on label-sorted shards, two pieces
each. They see of each other what `message_dtype` would tell them: rounded messages, or differences
that the library's codecs wrote down, one reference for each step of the topology's period, as
neighbors have it on base-2 with a power of two nodes. (Blocks of a codec begin at other elements
than in an optimizer's buckets.) Codes of this file are `int4`, 4 bits per element; `top-8`, or any
other number, the eighth of the elements that has changed most; and `rank-4`, or any other, of each
matrix the part of its change that four directions span. What a code leaves out is part of the next
change. With --gamma below 1, nodes go that share of the way to the average of what they were told,
as in CHOCO-SGD. None of this moves the average over all nodes.

Printed are bytes per parameter, and accuracy in percent of the averaged model and of the nodes' own
ones, by seed, or the steps after which it diverged. Lines that are in --out already are not run
again.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import decentlam
from decentlam.algorithms import Reach
from decentlam.exchange.codecs import BLOCK, CODECS, Codec
from decentlam.lab.data import Batches, Data, load, split
from decentlam.lab.models import make_model
from decentlam.topology import Topology, resolve

LR, MOMENTUM = 0.05, 0.9


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
        return -(-elements // self.share) * (2 + 2)  # a place needs 16 bits in pieces of 65,536

    def encode(self, change: Tensor, packet: Tensor) -> None:
        assert len(change) <= 1 << 16
        places = change.abs().topk(len(packet) // 4).indices
        halves = packet.view(2, -1)
        halves[0].view(torch.int16).copy_(places - (1 << 15))
        halves[1].view(torch.bfloat16).copy_(change[places])

    def decode(self, packet: Tensor, elements: int) -> Tensor:
        halves = packet.view(2, -1)
        change = torch.zeros(elements)
        places = halves[0].view(torch.int16).long() + (1 << 15)
        change[places] = halves[1].view(torch.bfloat16).float()
        return change


class LowRank:
    """The change of a matrix in the directions of most change, 16 bits per element (PowerSGD).

    One step of the power method at each message, from the directions of the message before.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def is_whole(self, shape: torch.Size) -> bool:
        return len(shape) < 2 or self.rank * sum(shape) >= shape.numel()

    def packet_bytes(self, shape: torch.Size) -> int:
        return 2 * (shape.numel() if self.is_whole(shape) else self.rank * sum(shape))

    def told(self, change: Tensor, right: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The changes (n, rows, columns) as the others read them, and where to go on from."""
        if self.is_whole(change.shape[1:]):
            return change.bfloat16().float(), None
        if right is None:
            draw = torch.Generator().manual_seed(0)
            right = torch.randn(len(change), change.shape[2], self.rank, generator=draw)
        left = torch.linalg.qr(change @ right).Q.bfloat16().float()
        right = (change.mT @ left).bfloat16().float()
        return left @ right.mT, right


Code = torch.dtype | Codec | LowRank | None
KINDS: dict[str, Code] = {
    "whole": None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": CODECS[torch.int8],
    "int4": Int4(),
}
FAMILIES: dict[str, Callable[[int], Code]] = {"top": Top, "rank": LowRank}


def code_of(kind: str) -> Code:
    if kind in KINDS:
        return KINDS[kind]
    family, _, number = kind.partition("-")
    if family not in FAMILIES or not number.isdecimal():
        raise ValueError(f"unknown kind {kind!r}; choose from {', '.join(KINDS)}, top-8, rank-4")
    return FAMILIES[family](int(number))


class Told:
    """Mixes the messages of all nodes as they are told to each other.

    Messages come in pieces of these shapes, in the same order at each step.
    """

    def __init__(
        self, topology: Topology, code: Code, gamma: float, shapes: list[torch.Size]
    ) -> None:
        self._topology, self._code, self._gamma, self._shapes = topology, code, gamma, shapes
        self._known: dict[tuple[int, int], Tensor] = {}
        self._right: dict[tuple[int, int], Tensor | None] = {}
        self._step, self._place = -1, 0

    def __call__(self, message: Tensor, index: int, reach: Reach) -> Tensor:
        self._place = self._place + 1 if index == self._step else 0
        self._step = index
        known = self._told(message, (self._place, index % (self._topology.period or 1)))
        weights = self._topology.weights(index).to(message.dtype)
        return message + self._gamma * (weights @ known - known)

    def _told(self, message: Tensor, place: tuple[int, int]) -> Tensor:
        if self._code is None or isinstance(self._code, torch.dtype):
            return message.to(self._code or message.dtype).to(message.dtype)
        known = self._known.get(place)
        if known is None:
            known = self._known[place] = message.clone()
            return known
        if isinstance(self._code, LowRank):
            change = (message - known).view(len(known), *self._shapes[self._place])
            change, self._right[place] = self._code.told(change, self._right.get(place))
            return known.add_(change.flatten(1))
        packet = torch.empty(self._code.packet_bytes(message.shape[1]), dtype=torch.uint8)
        for row, z in zip(known, message, strict=True):
            self._code.encode(z - row, packet)
            row += self._code.decode(packet, len(row))
        return known

    def bytes_each(self) -> float:
        """Per parameter, after the first messages."""
        elements = sum(shape.numel() for shape in self._shapes)
        if self._code is None or isinstance(self._code, torch.dtype):
            return float((self._code or torch.float32).itemsize)
        if isinstance(self._code, LowRank):
            return sum(map(self._code.packet_bytes, self._shapes)) / elements
        return self._code.packet_bytes(1 << 20) / (1 << 20)


def train(
    data: Data, code: Code, gamma: float, options: argparse.Namespace, seed: int
) -> dict[str, object]:
    n = options.nodes
    batches = Batches(split(data.labels, n, options.shards, seed), options.batch // n, seed)
    model = make_model("mlp", data.shape, data.classes, seed)
    nodes = decentlam.SimulatedModule(
        model, "decentlam", resolve(options.topology, n), lr=LR, momentum=MOMENTUM, stable="auto"
    )
    inner = nodes._nodes
    told = Told(inner.topology, code, gamma, [p.shape for p in model.parameters()])
    if code is not None or gamma != 1:
        inner._mix = told
    if isinstance(code, LowRank):  # a message for each matrix
        inner._pieces = inner.x.split([p.numel() for p in model.parameters()], dim=1)
        inner._states = [inner.algorithm.init(piece) for piece in inner._pieces]
        inner._adaptive = [True] * len(inner._pieces)
    found: dict[str, object] = {"bytes": told.bytes_each()}
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
        return found | {"averaged": None, "own": None, "apart": None, "diverged": step}
    tests = list(data.test_batches(2000))
    own = statistics.mean(top1(nodes.node(i), tests) for i in range(0, n, -(-n // 8)))
    apart = nodes.consensus_distance()
    return found | {"averaged": top1(nodes.averaged(), tests), "own": own, "apart": apart}


@torch.no_grad()
def top1(model: nn.Module, tests: list[tuple[Tensor, Tensor]]) -> float:
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in tests)
    return 100 * right / sum(len(y) for _, y in tests)


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
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--gamma", nargs="+", type=float, default=[1.0])
    parser.add_argument("--out", type=Path, default=Path("out/messages.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the steady form runs
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    records = [json.loads(line) for line in lines]
    setting = f"{options.data} {options.shards} {options.topology} {options.nodes}"
    setting += f" batch {options.batch} steps {options.steps}"
    kinds = {
        kind if gamma == 1 else f"{kind} gamma {gamma:g}": (code_of(kind), gamma)
        for kind in options.kinds
        for gamma in options.gamma
    }
    data = load(options.data, options.data_path)
    for seed in range(options.seeds):
        for name, (code, gamma) in kinds.items():
            key = {"setting": setting, "kind": name, "seed": seed}
            if any(key.items() <= record.items() for record in records):
                continue
            records.append({**key, **train(data, code, gamma, options, seed)})
            with options.out.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
    print(setting)
    for name in kinds:
        mine = [r for r in records if (r["setting"], r["kind"]) == (setting, name)]
        line = f"  {name:18s} {mine[0]['bytes']:5.2f} bytes"
        for score in ("averaged", "own"):
            values = [f"{r[score]:.1f}" if r[score] is not None else "-" for r in mine]
            line += f"  {score} {', '.join(values)}"
        diverged = [str(r["diverged"]) for r in mine if "diverged" in r]
        print(line + (f"  diverges after {', '.join(diverged)} steps" if diverged else ""))


if __name__ == "__main__":
    main()

"""The methods of the text study: how each moves n stacked models, and what a node sends for it.

A method is a generator. It is given the models x (n, d), which it changes in place, and then, step
by step, every node's gradient (n, d) and the learning rate; it answers with what a node sent, in
models of 32 bits. The inner optimizer is `torch.optim.AdamW` with its default coefficients.

All but the library's own AdamW are written here apart from the library, from their papers: DDP,
DiLoCo and NoLoCo as their authors run them are what it is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import accumulate, count, repeat
from typing import Any

import torch
from torch import Tensor

from decentlam.algorithms import Step, lr_ratio, make
from decentlam.algorithms.turns import TURNS, parts
from decentlam.topology import TOPOLOGIES, Topology

BETA1, BETA2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.01
Moves = Generator[float, tuple[Tensor, float], None]


class LocalAdamW:
    """AdamW on every row of x: the same numbers as `torch.optim.AdamW` on each node."""

    def __init__(self, x: Tensor) -> None:
        self.m, self.v, self.t = torch.zeros_like(x), torch.zeros_like(x), 0

    def update(self, g: Tensor, lr: float) -> Tensor:
        """Return what a step takes off x besides weight decay."""
        self.t += 1
        self.m.lerp_(g, 1 - BETA1)
        self.v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        denominator = self.v.div(1 - BETA2**self.t).sqrt_().add_(EPS)
        return self.m.mul(lr / (1 - BETA1**self.t)).div_(denominator)

    def step(self, x: Tensor, g: Tensor, lr: float) -> None:
        x.mul_(1 - lr * DECAY).sub_(self.update(g, lr))


def all_reduce(x: Tensor, network: Topology, layers: Sequence[slice], bf16: bool = False) -> Moves:
    """AdamW on the mean gradient; with `bf16` as DDP's hook has it, which adds up in 16 bits."""
    n, inner, sent = len(x), LocalAdamW(x[:1]), 0.0
    while True:
        g, lr = yield sent
        mean = reduce(torch.add, (g.bfloat16() / n).unbind(0)).float() if bf16 else g.mean(0)
        one = x[:1].clone()
        inner.step(one, mean[None], lr)
        x.copy_(one.expand_as(x))
        sent = 2 * (n - 1) / n * (0.5 if bf16 else 1)


def gossip(x: Tensor, network: Topology, layers: Sequence[slice]) -> Moves:
    """x+ = W (x - update): AdamW at each node, then the average with one peer."""
    inner, sent = LocalAdamW(x), 0.0
    for k in count():
        g, lr = yield sent
        inner.step(x, g, lr)
        x.copy_(mix(x, network, k))
        sent = messages(network, k)


def adapt_while_communicating(x: Tensor, network: Topology, layers: Sequence[slice]) -> Moves:
    """x+ = W x - update: the form of decent-dp, which averages what was there before the step."""
    inner, sent = LocalAdamW(x), 0.0
    for k in count():
        g, lr = yield sent
        update = inner.update(g, lr).add_(x, alpha=lr * DECAY)
        x.copy_(mix(x, network, k)).sub_(update)
        sent = messages(network, k)


def every_step(
    x: Tensor, network: Topology, layers: Sequence[slice], message_dtype: torch.dtype | None = None
) -> Moves:
    """The library's own AdamW; 16-bit messages are rounded as its exchange does it."""
    method, before, sent = make("adamw", BETA1), None, 0.0
    state = method.init(x)
    whole, second_dtype = slice(0, x.shape[1]), None if message_dtype is None else torch.bfloat16
    for k in count():
        g, lr = yield sent
        step = Step(
            index=k, lr=lr, lr_ratio=lr_ratio(lr, before), weight_decay=DECAY, gradients=k + 1
        )
        ahead, second = method.message(x, g, state, step)
        method.update(x, g, mix(ahead, network, k, message_dtype), state, step)
        for part in parts(layers, whole, k):
            state["exp_avg_sq"][:, part] = mix(second[:, part], network, k, second_dtype)
        before = lr
        sent = messages(network, k) * (1 + 1 / TURNS) * (1 if message_dtype is None else 0.5)


def local_steps(
    x: Tensor,
    network: Topology,
    layers: Sequence[slice],
    every: int | Sequence[int],
    kappa: float = 0.2,
) -> Moves:
    """AdamW at each node, x -= lr e; every so many steps x+ = W x, e += kappa (x - x+) / sum of lr,
    and the second moments are averaged through 8-bit logarithms. A sequence says how many steps
    there are before each average."""
    inner, e, taken, sent = LocalAdamW(x), torch.zeros_like(x), 0.0, 0.0
    ends = accumulate(repeat(every) if isinstance(every, int) else every)
    turn, end = 0, float(next(ends))
    for k in count(1):
        g, lr = yield sent
        inner.step(x, g, lr)
        x.sub_(e, alpha=lr)
        taken, sent = taken + lr, 0.0
        if k < end:
            continue
        mixed = mix(x, network, turn)
        if taken:
            e.add_(x - mixed, alpha=kappa / taken)
        x.copy_(mixed)
        own = network.weights(turn).diagonal().to(x.dtype)[:, None]
        told = in_8_bits(inner.v)
        inner.v.copy_(own * inner.v + mix(told, network, turn) - own * told)
        taken, sent = 0.0, 1.25 * messages(network, turn)
        turn, end = turn + 1, next(ends, math.inf)


def diloco(
    x: Tensor,
    network: Topology,
    layers: Sequence[slice],
    every: int,
    outer_lr: float = 0.7,
    momentum: float = 0.9,
) -> Moves:
    """AdamW at each node; every so many steps Nesterov's momentum on what all moved on average."""
    n, inner, start, m, sent = len(x), LocalAdamW(x), x[0].clone(), torch.zeros_like(x[0]), 0.0
    for k in count():
        g, lr = yield sent
        inner.step(x, g, lr)
        sent = 0.0
        if (k + 1) % every:
            continue
        moved = start - x.mean(0)
        m.mul_(momentum).add_(moved)
        start.sub_(moved + momentum * m, alpha=outer_lr)
        x.copy_(start.expand_as(x))
        sent = 2 * (n - 1) / n


def noloco(
    x: Tensor,
    network: Topology,
    layers: Sequence[slice],
    every: int,
    outer_lr: float = 0.7,
    momentum: float = 0.5,
) -> Moves:
    """d+ = momentum d + outer_lr (W x - start), start+ = start + d+: DecentLaM outside.

    Its published code sends two models where this recursion, which equals it, needs one; it is
    counted as published.
    """
    inner, start, d, sent = LocalAdamW(x), x.clone(), torch.zeros_like(x), 0.0
    for k in count():
        g, lr = yield sent
        inner.step(x, g, lr)
        sent = 0.0
        if (k + 1) % every:
            continue
        d.mul_(momentum).add_(mix(x, network, k // every) - start, alpha=outer_lr)
        x.copy_(start.add_(d))
        sent = 2 * messages(network, k // every)


def mix(z: Tensor, network: Topology, step: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return W z, or z + W r - r where r is z rounded to `dtype`: rounding moves no average."""
    w = network.weights(step).to(z.dtype)
    if dtype is None:
        return w @ z
    r = z.to(dtype).to(z.dtype)
    return w @ r - r + z


def messages(network: Topology, step: int) -> float:
    """Return the number of messages that a node sends, in the mean over the nodes."""
    return network.messages(step).double().mean().item()


def in_8_bits(v: Tensor) -> Tensor:
    """Return what is left of positive numbers in 8 bits: log2 in quarters, 2^-60 and less is 0."""
    code = v.log2().mul_(4).round_().clamp_(-240, 15)
    return torch.where(code > -240, torch.exp2(code / 4), torch.zeros_like(v))


@dataclass(frozen=True)
class Method:
    """A method of the study, and how its line is drawn."""

    title: str
    moves: Callable[..., Moves]
    color: str
    marker: str
    several_seeds: bool = False
    text: bool = True  # False: trained on the digits only
    topology: str = "bipartite-random-match"

    def start(self, x: Tensor, layers: Sequence[slice], seed: int) -> Moves:
        """Return the generator, ready for the first gradient."""
        moves = self.moves(x, TOPOLOGIES[self.topology](len(x), seed=seed), layers)
        next(moves)
        return moves


def _every(
    moves: Callable[..., Moves], title: str, every: int, color: str, marker: str, **more: Any
) -> Method:
    return Method(f"{title}, every {every}", partial(moves, every=every), color, marker, **more)


_LOCAL, _DILOCO, _NOLOCO = (
    partial(_every, moves, title)
    for moves, title in ((local_steps, "local steps"), (diloco, "DiLoCo"), (noloco, "NoLoCo"))
)
_HALF = partial(every_step, message_dtype=torch.float16)
METHODS: dict[str, Method] = {
    "all-reduce": Method("all-reduce AdamW (DDP)", all_reduce, "#000000", "s", several_seeds=True),
    "all-reduce-bf16": Method(
        "the same, bf16 gradients", partial(all_reduce, bf16=True), "#777777", "P"
    ),
    "decent-dp": Method("decent-dp's form", adapt_while_communicating, "#882255", "D"),
    "gossip": Method("gossip AdamW", gossip, "#CC6677", "^"),
    "adamw": Method("AdamW, one peer", every_step, "#88CCEE", "o", several_seeds=True),
    "adamw-16-bit": Method(
        *("AdamW, one peer, float16", _HALF, "#0077BB", "p"), several_seeds=True
    ),
    "adamw-two": Method(
        *("AdamW, two peers, float16", _HALF, "#332288", "h"),
        several_seeds=True,
        topology="two-random-matches",
    ),
    "local-4": _LOCAL(4, "#44AA99", "v", several_seeds=True),
    "local-16": _LOCAL(16, "#117733", "<", several_seeds=True),
    "local-64": _LOCAL(64, "#999933", ">"),
    "diloco-16": _DILOCO(16, "#DDAA33", "X", several_seeds=True),
    "noloco-16": _NOLOCO(16, "#AA4499", "d", several_seeds=True),
    "diloco-4": _DILOCO(4, "#DDAA33", "*", several_seeds=True, text=False),
    "noloco-4": _NOLOCO(4, "#AA4499", "1", several_seeds=True, text=False),
}

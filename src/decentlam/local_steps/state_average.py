"""The average of an inner optimizer's second moments with the neighbors', sent in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.optim import Optimizer

from decentlam.exchange.base import Pending
from decentlam.exchange.neighbors import Neighbors
from decentlam.network.network import Network
from decentlam.topology import Topology

_HEAD = 5  # bytes: the steps that were taken, and an octave
_USUAL = ("exp_avg_sq", "square_avg")  # of Adam and its kin, and of RMSprop
# Positive numbers in 8 bits: their logarithms in steps of a quarter octave, over 63 octaves.
STEPS = 4  # per octave: a factor of 2 ** 0.25 from one code to the next
HIGHEST = 254  # the code of the largest number; 0 is zero
ABSENT = 255  # the code of a number that is not there


class StateAverage:
    """Averages state tensors of an inner optimizer: V+ = sum over j of w_ij V_j.

    Nodes whose second moments differ scale the same gradient differently, and settle elsewhere.
    A message has one byte per number and name, the same on all nodes, after the steps that the node
    has taken and the octave of the largest value. Where a node has no state yet, its neighbors go
    on with their own.
    """

    def __init__(
        self, inner: Optimizer, names: Sequence[str] | None, timeout: timedelta, tag: int
    ) -> None:
        self._inner, self._names, self._timeout, self._tag = inner, names, timeout, tag
        self._exchange: Neighbors | None = None
        self._pending: Pending | None = None

    def find(self, network: Network | None, stepped: bool) -> bool:
        """Find the names once an inner optimizer, of any node, has `stepped`; return False if none
        has, because the gradients of all have overflowed. Refuse what cannot be sent.

        Without a network nobody else is asked.
        """
        held = {name for state in self._inner.state.values() for name in state}
        reports = [(stepped, list(held))]
        if network is not None:
            reports = network.gather(reports[0])
        if self._names is None and any(stepped for stepped, _ in reports):
            everyone = {name for _, names in reports for name in names}
            self._names = [name for name in _USUAL if name in everyone]
        for name in (self._names or ()) if stepped else ():
            having = [(p, state[name]) for p, state in self._inner.state.items() if name in state]
            alike = [isinstance(t, Tensor) and t.shape == p.shape for p, t in having]
            if not alike or not all(alike):
                raise ValueError(
                    f"average_state names {name!r}, which is no tensor of the parameter's shape in "
                    f"the state of {type(self._inner).__name__}; it has "
                    f"{', '.join(sorted(held)) or 'no state'}. Name second moments, or pass "
                    "average_state=() to average none"
                )
        return any(stepped for stepped, _ in reports)

    def send(self, network: Network, topology: Topology, step: int, taken: int | None) -> int:
        """Send the state, and how many steps were taken if that counts, to the neighbors; return
        the bytes."""
        self._pending = None
        slots = self._slots()
        size = _HEAD + sum(p.numel() for p, _ in slots)
        if network.num_nodes == 1 or (not slots and taken is None):
            return 0
        exchange = self._exchange
        if exchange is None or exchange.network is not network or len(exchange.buffers[0]) != size:
            codes = torch.empty(size, dtype=torch.uint8, device=network.device)
            exchange = Neighbors(network, topology, [codes], self._timeout, self._tag)
            self._exchange = exchange
        exchange.begin(step, [size])
        message = exchange.message(0, size)
        octave = octave_of(max((float(v.max()) for _, v in slots if v is not None), default=0.0))
        head = (taken or 0).to_bytes(_HEAD - 1, "little") + bytes([octave + 128])
        message[:_HEAD] = torch.tensor(list(head), dtype=torch.uint8)
        for (_, value), part in zip(slots, _cut(message, slots), strict=True):
            part.fill_(ABSENT) if value is None else encode(value.reshape(-1), octave, part)
        self._pending = exchange.send(0, message, step)
        return self._pending.bytes_sent

    def wait(self) -> list[int]:
        """Wait for what the neighbors sent; return how many steps each of them has taken."""
        _, *others = [] if self._pending is None else self._pending.wait()
        heads = [bytes(codes[: _HEAD - 1].tolist()) for _, codes in others]
        return [int.from_bytes(head, "little") for head in heads]

    def use(self, weights: Sequence[float] | None = None) -> None:
        """Average with what the neighbors sent, with these weights or the topology's."""
        if self._pending is None:
            return
        _, *others = self._pending.wait()
        if weights is not None:
            others = [(w, codes) for w, (_, codes) in zip(weights, others, strict=True)]
        self._pending, slots = None, self._slots()
        parts = [_cut(codes, slots) for _, codes in others]
        octaves = [int(codes[_HEAD - 1]) - 128 for _, codes in others]
        for k, (_, value) in enumerate(slots):
            if value is None:
                continue
            before = value.clone()
            for (weight, _), octave, part in zip(others, octaves, parts, strict=True):
                if int(part[k][0]) != ABSENT:
                    theirs = decode(part[k], octave, value.dtype).view(value.shape)
                    value.add_(theirs.sub_(before), alpha=weight)

    def drop(self) -> None:
        """Wait for what the neighbors sent, and use nothing of it."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def forget(self) -> None:
        """Leave the state as it is: the members of the run have changed."""
        self._pending = self._exchange = None

    def _slots(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return trained parameters, once per name, with what their state has by that name."""
        params = [p for group in self._inner.param_groups for p in group["params"]]
        trained = [p for p in params if p.requires_grad and p.numel()]
        state = self._inner.state
        return [(p, state.get(p, {}).get(name)) for name in self._names or () for p in trained]


def _cut(message: Tensor, slots: Sequence[tuple[Tensor, Tensor | None]]) -> Sequence[Tensor]:
    return message[_HEAD:].split([p.numel() for p, _ in slots])


def octave_of(largest: float) -> int:
    """Return the least power of two that is no smaller, as one byte holds it."""
    exponent = torch.tensor(largest, dtype=torch.float64).log2().ceil()
    return int(exponent.nan_to_num(0.0, 127.0, -128.0).clamp(-128, 127))


@torch.no_grad()
def encode(values: Tensor, octave: int, out: Tensor) -> None:
    """Fill `out` with the codes of flat values from 0 to 2 ** octave; tiny ones become 0."""
    codes = values.log2().sub_(octave).mul_(STEPS).add_(HIGHEST).round_()
    out.copy_(codes.nan_to_num_(HIGHEST, HIGHEST, 0.0).clamp_(0, HIGHEST))


@torch.no_grad()
def decode(codes: Tensor, octave: int, dtype: torch.dtype) -> Tensor:
    """Return the values that codes stand for."""
    values = codes.to(dtype).sub_(HIGHEST).div_(STEPS).add_(octave).exp2_()
    return values.masked_fill_(codes == 0, 0)

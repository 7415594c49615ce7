"""Mixing between processes over torch.distributed: one round trip per bucket, gloo or NCCL.

A round yields its terms, (weight, tensor) pairs whose weighted sum is the mix; none at all if
nobody takes part. The caller sums them chunk by chunk inside its update, so that each received
byte is read from memory once.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import Reach
from decentlam.errors import ExchangeError
from decentlam.exchange.clerk import Clerk
from decentlam.exchange.courier import Courier, Parcel
from decentlam.exchange.network import Network
from decentlam.exchange.outboxes import News
from decentlam.layout import CHUNK
from decentlam.topology import Topology

_PIECE_BYTES = (1 << 19, 1 << 20)  # least and most: every piece costs the CPU some calls
_PIECES = 4  # of a message, between these sizes

Terms = list[tuple[float, Tensor]]
Payloads = list[tuple[int, Tensor]]  # of or for which node
Works = list[tuple[str, dist.Work | Parcel | News | None]]  # with whom, and what is under way


@dataclass(eq=False)
class Round:
    """One bucket's exchange in flight."""

    terms: Terms
    place: str  # for errors: which step, which bucket, which node
    timeout: timedelta
    receives: Works = field(default_factory=list)
    sends: Works = field(default_factory=list)
    changes: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (what is known, to add)

    @classmethod
    def silent(cls) -> Round:
        """Nobody takes part: over before it began."""
        return cls([], "", timedelta(0))

    def wait(self) -> Terms:
        """Blocks until everything this node waits for has arrived."""
        _wait_all(self.receives, self.place, self.timeout)
        while self.changes:
            known, change = self.changes.pop()
            for k, c in zip(chunks(known), chunks(change), strict=True):
                k.add_(c)
        return self.terms

    def arrived(self) -> bool:
        """Whether `wait` would return at once; gloo knows it of collectives only."""
        return all(work is None or work.is_completed() for _, work in self.receives)

    def finish(self) -> None:
        """Blocks until the message may be overwritten."""
        _wait_all(self.sends, self.place, self.timeout)
        _under_way.discard(self)


# gloo breaks a connection when a buffer or work object in use is dropped, as happens when an
# optimizer is given up with messages under way (AWC's always are): rounds live until finished.
_under_way: set[Round] = set()


class NoExchange:
    """Every node keeps its own message: one node alone, or a run that measures head-room."""

    clerk: Clerk | None = None

    def open(self, slots: int, index: int, reach: Reach) -> list[Tensor]:
        return []

    def close(self) -> None:
        pass

    def expect(self, messages: Mapping[int, Tensor], index: int, reach: Reach) -> None:
        pass

    def start(
        self, slot: int, message: Tensor, index: int, reach: Reach, by_need: bool = False
    ) -> Round:
        return Round.silent()

    def silent(self, reach: Reach) -> bool:
        return True

    def bytes_sent(self, message_bytes: int, index: int, reach: Reach) -> int:
        return 0

    def memory_bytes(self) -> int:
        return 0

    def outbox_bytes(self) -> int:
        return 0


class ProcessGroupExchange:
    """Sends each bucket to the neighbors of this node and receives theirs."""

    def __init__(
        self, network: Network, topology: Topology, timeout_seconds: float, tag: int = 0
    ) -> None:
        self.network = network
        self.topology = topology
        self.timeout = timedelta(seconds=timeout_seconds)
        self.tag = tag  # buckets use tag, tag + 1, ...
        self._inbox: dict[tuple[int, int], Tensor] = {}  # (bucket, neighbor's place) -> buffer
        self._expected: dict[int, Round] = {}
        self._courier = Courier(self.timeout)
        # A GPU works beside the training anyway.
        self.clerk: Clerk | None = None if network.batched else Clerk()

    def open(self, slots: int, index: int, reach: Reach) -> list[Tensor]:
        """Begins a step; the buffers its messages must be formed in, none if any will do."""
        return []

    def close(self) -> None:
        """Ends a step: the messages of all neighbors have been used."""

    def expect(self, messages: Mapping[int, Tensor], index: int, reach: Reach) -> None:
        """Posts the receives of all buckets of a step, {bucket: message}, before anything is sent.

        With gloo a send moves no byte until its receive is posted, and a receive that is already
        there saves the round trip. Tags keep buckets apart in whatever order they are sent. The
        group's own `recv` and `send` are what dist.irecv and isend call, in a third of the time.
        NCCL has no tags and wants both in one batch, which `start` posts.
        """
        if reach is not Reach.NEIGHBORS or self.network.batched:
            return
        for slot, message in messages.items():
            tag, group = self.tag + slot, self.network.group
            assert group is not None
            round, incoming = self._round(slot, message, index)
            self._expected[slot] = round
            for j, buffer in incoming:
                place = self.network.place(j)
                with explained(round.place, f"node {j}", self.timeout):
                    works = [group.recv([piece], place, tag) for piece in _cut(buffer)]
                    round.receives += [(f"node {j}", work) for work in works]

    def silent(self, reach: Reach) -> bool:
        """Whether nothing is sent: the node's own message is the mix, and is never stored."""
        return reach is Reach.NOBODY

    def start(
        self, slot: int, message: Tensor, index: int, reach: Reach, by_need: bool = False
    ) -> Round:
        """Starts mixing bucket `slot`; the message must not change until the round is finished.

        `by_need` lets later buckets, which the next forward needs first, overtake earlier ones.
        """
        place = self._place(slot, index)
        if reach is Reach.EVERYONE:
            round = Round([(1.0 / self.network.num_nodes, message)], place, self.timeout)
            group = self.network.lane_group or self.network.group
            with explained(place, "everyone", self.timeout):
                work = dist.all_reduce(message, group=group, async_op=True)
            round.receives = [("everyone", work)]
            return round
        if self.network.batched:
            round, incoming = self._round(slot, message, index)
            outgoing = self._outgoing(slot, message, index, round)
            with explained(place, "its neighbors", self.timeout):
                round.receives = self._batch(incoming, outgoing)
            return round
        round = self._expected.pop(slot)
        outgoing = self._outgoing(slot, message, index, round)
        places = [self.network.place(j) for j, _ in outgoing]
        cuts = itertools.zip_longest(*(_cut(whole) for _, whole in outgoing))
        posts = [
            functools.partial(_post, self.network.group, places, pieces, self.tag + slot)
            for pieces in cuts
        ]
        whom = " or ".join(f"node {j}" for j, _ in outgoing)
        if by_need and posts:
            round.sends = [(whom, self._courier.hand(slot, posts))]
            return round
        for post in posts:
            with explained(place, whom, self.timeout):
                round.sends += [(whom, work) for work in post()]
        return round

    def _round(self, slot: int, message: Tensor, index: int) -> tuple[Round, Payloads]:
        """A round whose terms are still to arrive, the own one to be formed; and what comes from
        whom into which buffer."""
        row = self.topology.row(self.network.node, index)
        incoming = self._buffers(slot, message, index)
        terms = [(row.get(self.network.node, 0.0), message), *((row[j], z) for j, z in incoming)]
        return self._kept(Round(terms, self._place(slot, index), self.timeout)), incoming

    def _kept(self, round: Round) -> Round:
        _under_way.add(round)
        return round

    def _outgoing(self, slot: int, message: Tensor, index: int, round: Round) -> Payloads:
        """What goes to whom."""
        return [(j, message) for j in self.topology.listeners(self.network.node, index)]

    def _place(self, slot: int, index: int) -> str:
        return f"node {self.network.node}, step {index}, bucket {slot}"

    def bytes_sent(self, message_bytes: int, index: int, reach: Reach) -> int:
        """Bytes this node sends at a step for messages of that total size."""
        n = self.network.num_nodes
        if reach is Reach.NEIGHBORS:
            return message_bytes * len(self.topology.listeners(self.network.node, index))
        return message_bytes * 2 * (n - 1) // n if reach is Reach.EVERYONE else 0

    def memory_bytes(self) -> int:
        """Bytes of the receive buffers."""
        return sum(buffer.nbytes for buffer in list(self._inbox.values()))

    def outbox_bytes(self) -> int:
        """Bytes of the message buffers that are the exchange's own."""
        return 0

    def _batch(self, incoming: Payloads, outgoing: Payloads) -> Works:
        group, peer = self.network.group, self.network.peer
        batch = [dist.P2POp(dist.irecv, buffer, peer(j), group) for j, buffer in incoming]
        batch += [dist.P2POp(dist.isend, z, peer(j), group) for j, z in outgoing]
        return [("a neighbor", work) for work in dist.batch_isend_irecv(batch)] if batch else []

    def _buffers(self, slot: int, message: Tensor, index: int) -> Payloads:
        """Where the messages of this step's neighbors go; kept from step to step."""
        buffers = []
        for place, j in enumerate(self.topology.neighbors(self.network.node, index)):
            buffer = self._inbox.get((slot, place))
            if buffer is None or buffer.shape != message.shape:
                buffer = self._inbox[slot, place] = torch.empty_like(message)
            buffers.append((j, buffer))
        return buffers


def _post(
    group: dist.ProcessGroup | None,
    places: list[int],
    pieces: tuple[Tensor | None, ...],
    tag: int,
) -> list[dist.Work]:
    """Sends everybody the next piece; None to whom has all. (A method would keep its exchange alive
    for as long as the courier remembers.)"""
    assert group is not None
    to_all = zip(places, pieces, strict=True)
    return [group.send([piece], place, tag) for place, piece in to_all if piece is not None]


def chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Small enough for the cache: what is written can be read again at once."""
    return tensor.view(-1).split(CHUNK)


def _cut(message: Tensor) -> Sequence[Tensor]:
    """The pieces it is sent in, the same on both sides: one tag delivers them in their order. An
    urgent message has to wait for one piece of another, not for the whole of it."""
    return message.view(-1).split(piece_bytes(message.nbytes) // message.element_size())


def piece_bytes(message_bytes: int) -> int:
    least, most = _PIECE_BYTES
    return min(most, max(least, math.ceil(message_bytes / _PIECES)))


def _wait_all(works: Works, place: str, timeout: timedelta) -> None:
    while works:
        peer, work = works[0]
        with explained(place, peer, timeout):
            if work is not None:
                work.wait(timeout)
        works.pop(0)


@contextlib.contextmanager
def explained(place: str, peer: str, timeout: timedelta) -> Iterator[None]:
    """Turns the backend's error, of a wait or of a post that finds a closed connection, to ours."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise ExchangeError(
            f"{place}: the exchange with {peer} failed: {text}\nEither that process died or "
            f"stopped (see its log), or it was slower than {timeout.total_seconds():g} s; "
            "raise timeout_seconds if that is normal."
        ) from error

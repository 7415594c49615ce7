"""The interface of every exchange. In each step, for every bucket:

    exchange.begin(step)                                # once, before messages with a gradient
    message = exchange.message(bucket, payloads)        # form the message in this buffer
    exchange.receive(bucket, message, step)             # before any bucket is sent
    pending = exchange.send(bucket, message, step)      # the message is formed
    terms = pending.wait()                              # sum of weight * tensor is the mix
    pending.finish()                                    # the message may be overwritten
    exchange.end()                                      # once, when every mix was used

The caller sums the terms inside its update, chunk by chunk, so that each received byte is read from
memory once.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from decentlam.errors import ExchangeError
from decentlam.membership.watch import explain

Terms = list[tuple[float, Tensor]]


Work = Any  # torch's work objects, and what is waited for as they are


@dataclass(eq=False)
class Pending:
    """One bucket's exchange under way."""

    where: str = ""  # for errors: which node, step and bucket
    timeout: timedelta = timedelta(0)
    # With a timeout NCCL's wait would block the CPU; without one only the GPU waits, and the
    # process group's own timeout holds.
    is_nccl: bool = False
    terms: Terms = field(default_factory=list)
    receives: list[tuple[str, Work]] = field(default_factory=list)  # from whom
    sends: list[tuple[str, Work]] = field(default_factory=list)  # to whom
    decode: Callable[[], None] | None = None  # what came over the wire becomes the terms
    bytes_sent: int = 0

    def wait(self) -> Terms:
        """Blocks until everything this node waits for has arrived; the terms of the mix."""
        self._wait_for(self.receives)
        if self.decode is not None:
            self.decode()
            self.decode = None
        return self.terms

    def arrived(self) -> bool:
        """Whether `wait` would return at once; gloo knows it of collectives only."""
        return all(work.is_completed() for _, work in self.receives)

    def finish(self) -> None:
        """Blocks until the message has left and may be overwritten."""
        self._wait_for(self.sends)
        _unfinished.discard(self)

    def keep(self) -> None:
        """Keeps the buffers until `finish`, even if the optimizer is given up before.

        gloo breaks a connection when a buffer or work object in use is dropped, and AWC-DmSGD's
        messages are always under way.
        """
        _unfinished.add(self)

    def _wait_for(self, works: list[tuple[str, Work]]) -> None:
        while works:
            peer, work = works[0]
            with exchange_errors(self.where, peer, self.timeout):
                work.wait() if self.is_nccl else work.wait(self.timeout)
            works.pop(0)


_unfinished: set[Pending] = set()


def forget_unfinished() -> None:
    """The group that they were in is about to be left."""
    _unfinished.clear()


class Exchange(ABC):
    """Mixes the messages of one kind of step; nobody subclasses an implementation."""

    # Whether the bucket's own message is the mix: then no message is formed or stored.
    silent = False
    # Whether `receive` and `send` may be called from another thread than the training's. Not for
    # collectives: their order must be the same on all processes.
    threaded = False
    # Whether a message stays as it was formed until the mix was used.
    only_reads = False
    # Whether messages build on what neighbors were told before.
    remembers = False
    # Of the step that ended last: neighbors whose messages were left out, and how many steps the
    # others are ahead, which this node then skips.
    left_out: Sequence[int] = ()
    ahead = 0

    def begin(self, step: int) -> None:
        """A step begins: its message buffers are about to be written."""
        return

    def message(self, bucket: int, payloads: int) -> Tensor | None:
        """The buffer in which the message must be formed, (payloads, size); None: in any."""
        return None

    def receive(self, bucket: int, message: Tensor, step: int) -> None:
        """Posts the receives of a bucket, for messages of this shape."""
        return

    @abstractmethod
    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        """Starts to mix a message, which must not change until `finish`."""

    def end(self) -> None:
        """A step ends: the messages of others were used."""
        return

    def forget(self) -> None:
        """Between steps, on all nodes: neighbors know nothing any more."""
        return

    def close(self) -> None:
        """No step comes any more."""
        return

    def memory_bytes(self) -> dict[str, int]:
        """Bytes the exchange itself holds for "messages" and for what is "received"."""
        return {"messages": 0, "received": 0}


def combine(terms: Sequence[tuple[float, Tensor]], out: Tensor | None = None) -> Tensor:
    """The weighted sum, in as few operations as it takes, in `out` if there is one; it may be the
    first term itself."""
    (weight, first), rest = terms[0], list(terms[1:])
    if len(rest) == 1 and abs(weight + rest[0][0] - 1.0) < 1e-15:
        return torch.lerp(first, rest[0][1], rest[0][0], out=out)  # one operation instead of two
    if weight == 1.0 and rest:
        total, rest = torch.add(first, rest[0][1], alpha=rest[0][0], out=out), rest[1:]
    else:
        total = first if weight == 1.0 else torch.mul(first, weight, out=out)
    for weight, term in rest:
        total.add_(term, alpha=weight)
    return total


@contextlib.contextmanager
def exchange_errors(where: str, peer: str, timeout: timedelta | None = None) -> Iterator[None]:
    """Turns the backend's error, of a wait or of a post that finds a closed connection, to ours."""
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        cause = explain(peer, math.inf if timeout is None else timeout.total_seconds())
        if cause is None:
            limit = "the group's timeout" if timeout is None else f"{timeout.total_seconds():g} s"
            cause = (
                f"{(str(error).splitlines() or [repr(error)])[0]}\nEither that process died or "
                f"stopped (see its log), or it was slower than {limit}, or it was itself waiting "
                "for another. Every process must call averaged, save_checkpoint and the like: not "
                "behind `if rank == 0`. If long pauses are normal, raise timeout_seconds."
            )
        raise ExchangeError(f"{where}: the exchange with {peer} failed: {cause}") from error

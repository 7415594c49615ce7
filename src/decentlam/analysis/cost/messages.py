"""What messages should be like on a link that was measured: how long, whether 16 bits pay, and how
much may be ahead of the wire."""

from __future__ import annotations

import time

import torch

from decentlam.analysis.cost.values import Link
from decentlam.exchange.connections import USUAL_BYTES
from decentlam.exchange.network import Network

_CALLS_SECONDS = 5e-4  # of a message: to form, post and wait for it, by two threads
_SHARE = 0.05  # of a message's time on the wire that latency and calls may take
_LEAST = 1 << 18  # bytes of a message
_PARTS = 4  # at least; the first can leave when that much of backward is done
_MEASURED = 1 << 20  # elements
_PIECE_SECONDS = 1e-2  # on the wire, of a piece of a message
_PIECE_BYTES = (1 << 17, 1 << 21)  # least and most
_AHEAD_SECONDS = 1e-2  # that connections take ahead of a slow wire
_SHORT_SECONDS = 5e-2  # a wire is not slow that carries in this what connections usually take
_AHEAD_LATENCIES = 4  # at least: an acknowledgement takes two
_LEAST_AHEAD = 1 << 17  # bytes
_WORTH = 2.0  # times what rounding costs that it must save: a wire may be hidden, a CPU is not


def fitting_bucket_bytes(link: Link, model_bytes: int) -> int:
    """The shortest messages for which latency and calls are a small share of their time.

    >>> fitting_bucket_bytes(Link(1e-4, 1.25e8), 100_000_000)  # 1 Gbit/s
    1500000
    """
    seconds = (link.latency_seconds + _CALLS_SECONDS) / _SHARE
    most = max(model_bytes / _PARTS, _LEAST)
    return int(min(max(seconds * link.bytes_per_second, _LEAST), most))


def fitting_piece_bytes(link: Link) -> int:
    """Pieces so short that an urgent message does not wait long for one of another.

    >>> fitting_piece_bytes(Link(1e-4, 1.25e8)), fitting_piece_bytes(Link(1e-5, 3e9))
    (1250000, 2097152)
    """
    least, most = _PIECE_BYTES
    size = int(min(max(_PIECE_SECONDS * link.bytes_per_second, least), most))
    return size // 8 * 8  # whole elements of any type


def fitting_ahead_bytes(link: Link, connections: int = 1) -> int:
    """What a connection may take ahead of the wire, one of so many that share the link: enough to
    keep it busy, and otherwise 10 ms' worth. On a fast link as much as usual, which is soon over: a
    busy processor may be late to fill less.

    >>> fitting_ahead_bytes(Link(1e-4, 1.25e7)), fitting_ahead_bytes(Link(0.02, 1.25e7))
    (131072, 1000000)
    >>> fitting_ahead_bytes(Link(1e-4, 1.25e8))
    4194304
    """
    if connections * USUAL_BYTES / link.bytes_per_second < _SHORT_SECONDS:
        return USUAL_BYTES
    seconds = max(_AHEAD_SECONDS, _AHEAD_LATENCIES * link.latency_seconds)
    return max(int(seconds * link.bytes_per_second / connections), _LEAST_AHEAD)


def measure_rounding(network: Network) -> float:
    """Bytes of whole messages per second that every process can round and add; the same answer
    everywhere, asked of all together."""
    device = network.device
    whole = torch.ones(_MEASURED, device=device)
    half = torch.empty_like(whole, dtype=torch.float16)
    took = []
    for _ in range(4):  # the first one finds cold memory
        start = time.perf_counter()
        half.copy_(whole)
        whole.add_(half, alpha=0.5)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - start)
    return float(whole.nbytes / max(network.gather(min(took))))


def rounding_pays(link: Link, rounded_per_second: float) -> bool:
    """Whether 16 bits save more time on the wire than they cost the processors.

    >>> rounding_pays(Link(1e-4, 1.25e8), 2e9), rounding_pays(Link(1e-5, 3e9), 2e9)
    (True, False)
    """
    saved = 0.5 / link.bytes_per_second
    return saved > _WORTH / rounded_per_second

"""How long a training step takes on a network: one formula from bytes, latency and overlap.

    seconds = forward + backward + update + exposed
    wire    = bytes / bandwidth + rounds * latency                     of one bucket
    exposed = max over buckets k of (gradient of k is ready + wire of k and all later buckets)
              - backward,  and 0 at least

With a model of M bytes on n nodes a node sends per step

    all-reduce (DDP, PmSGD)    2 (n-1)/n M, each bucket in 2 (n-1) rounds
    p peers                    p M, each bucket in p rounds

in TCP frames of 1448 bytes and 66 of headers. Messages made of gradients hide behind backward, so
that all but the first bucket's gradient and the last bucket's message may overlap; messages without
gradients (AWC-DmSGD, decent-dp) hide behind forward and backward; without overlap nothing hides.

It knows nothing of processors; docs/predict.md says by how much measured steps take longer, and the
test of this file has the measured times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from decentlam.lab.values import Record
from decentlam.topology import resolve

FRAME = 1514 / 1448  # bytes of an Ethernet frame over the bytes of a message in it
FORWARD_SHARE = 1 / 3  # of compute; backward does twice the arithmetic
_DDP_FIRST_BUCKET, _DDP_BUCKET = 2**20, 25 * 2**20  # torch's defaults
_OUR_BUCKETS = 16  # of equal size, about what the optimizers make by default


@dataclass(frozen=True)
class Traffic:
    """The messages of a method in a step, and what they hide behind."""

    peers: int | None  # messages to so many peers; None: an all-reduce
    hides_behind: str = "backward"  # "nothing", "backward", or "step": forward and backward
    message_fraction: float = 1.0  # of the parameters' bytes; one half with 16 bits
    ddp_buckets: bool = False  # in the buckets of DistributedDataParallel

    def models_sent(self, nodes: int) -> float:
        """Return how many times the model's bytes a node sends."""
        models = 2 * (nodes - 1) / nodes if self.peers is None else self.peers
        return models * self.message_fraction

    def bucket_shares(self, model_bytes: int) -> list[float]:
        """Return the share of the model in each bucket, in the order of backward."""
        if not self.ddp_buckets:
            return [1 / _OUR_BUCKETS] * _OUR_BUCKETS
        first = min(_DDP_FIRST_BUCKET, model_bytes)
        full, last = divmod(model_bytes - first, _DDP_BUCKET)
        sizes = [first, *[_DDP_BUCKET] * full, *([last] if last else [])]
        return [size / model_bytes for size in sizes]


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a step."""

    compute: float  # forward, backward and update
    wire: float  # the link is busy
    exposed: float  # of that, what nothing hides

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def predict_step(
    traffic: Traffic,
    nodes: int,
    model_bytes: int,
    bandwidth: float | None,
    forward: float,
    backward: float,
    update: float = 0.0,
    latency_seconds: float = 0.0,
) -> StepTime:
    """Return the time of a step on links of `bandwidth` bits per second; None: no limit.

    >>> step = {"nodes": 8, "model_bytes": 10**9, "bandwidth": 8e9 * FRAME}
    >>> [predict_step(Traffic(p, "nothing"), forward=1, backward=2, **step).exposed
    ...  for p in (None, 1, 2)]
    [1.75, 1.0, 2.0]
    """
    shares = np.array(traffic.bucket_shares(model_bytes))
    rounds = 2 * (nodes - 1) if traffic.peers is None else traffic.peers
    bits = 8 * FRAME * traffic.models_sent(nodes) * model_bytes
    wire = shares * (bits / bandwidth if bandwidth else 0.0) + rounds * latency_seconds
    total = float(wire.sum())
    if traffic.hides_behind == "backward":
        ready = backward * np.cumsum(shares)
        exposed = float((ready + np.cumsum(wire[::-1])[::-1]).max()) - backward if total else 0.0
    else:
        exposed = total - {"nothing": 0.0, "step": forward + backward}[traffic.hides_behind]
    return StepTime(forward + backward + update, total, max(0.0, exposed))


def parameters_of(model: str) -> int:
    """Return the number of parameters of a model of the lab or of torchvision, for ImageNet."""
    import torch

    from decentlam.lab.models import MODELS

    with torch.device("meta"):
        if model in MODELS:
            built = MODELS[model]((3, 224, 224), 1000)
        else:
            from torchvision.models import get_model, list_models

            if model not in list_models():
                raise ValueError(
                    f"unknown model {model!r}; choose from {', '.join(MODELS)}, or any name of "
                    "torchvision.models.list_models(), or pass --parameters"
                )
            built = get_model(model, weights=None)
    return sum(p.numel() for p in built.parameters())


def table(
    nodes: int,
    parameters: int,
    bandwidth: float,
    compute_seconds: float,
    latency_seconds: float,
    overlap: str = "backward",
) -> list[Record]:
    """Return a row per way to train; DDP's all-reduce, which speed-ups refer to, is the first."""
    if nodes < 2:
        raise ValueError(f"--nodes must be 2 or more, got {nodes}: one node sends nothing")
    if parameters < 1:
        raise ValueError(f"--parameters must be above 0, got {parameters}")
    for name, value in (("compute-ms", compute_seconds), ("latency-us", latency_seconds)):
        if not 0 <= value < math.inf:
            raise ValueError(f"--{name} must be 0 or more and finite")
    if overlap not in ("none", "backward"):
        raise ValueError(f"unknown overlap {overlap!r}; choose from none, backward")
    behind, early = ("backward", "step") if overlap == "backward" else ("nothing", "nothing")
    ways = [
        ("DDP, pmsgd", "all-reduce", 32, Traffic(None, behind, ddp_buckets=True)),
        ("DDP, bf16 hook", "all-reduce", 16, Traffic(None, behind, 0.5, ddp_buckets=True)),
    ]
    for name in ("bipartite-random-match", "ring", "symmetric-exponential"):
        peers = int(resolve(name, nodes).messages(0).max())
        ways += [
            ("decentlam", name, 32, Traffic(peers, behind)),
            ("decentlam", name, 16, Traffic(peers, behind, 0.5)),
        ]
    ways.append(("awc-dmsgd", "one-peer-exponential", 32, Traffic(1, early)))
    forward = FORWARD_SHARE * compute_seconds
    rows: list[Record] = []
    for method, topology, bits, traffic in ways:
        step = predict_step(
            traffic,
            nodes,
            4 * parameters,
            bandwidth,
            forward,
            compute_seconds - forward,
            latency_seconds=latency_seconds,
        )
        rows.append(
            {
                "method": method,
                "topology": topology,
                "message_bits": bits,
                "sent_MB": 4e-6 * parameters * traffic.models_sent(nodes),
                "wire_ms": 1e3 * step.wire,
                "exposed_ms": 1e3 * step.exposed,
                "step_ms": 1e3 * step.seconds,
            }
        )
    reference = rows[0]["step_ms"]
    return [row | {"speed_up": reference / row["step_ms"]} for row in rows]

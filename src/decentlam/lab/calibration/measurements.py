"""Measured iterations, as a benchmark wrote them: what the model's constants are fitted to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from decentlam.algorithms import Reach
from decentlam.analysis.cost import Calibration, Compute, Job, Link
from decentlam.analysis.cost.model import Exchange, step_timeline
from decentlam.analysis.cost.values import OVERLAPS
from decentlam.lab.values import parse_json

KINDS = {"all-reduce": Reach.EVERYONE, "neighbors": Reach.NEIGHBORS, "none": Reach.NOBODY}


@dataclass(frozen=True)
class Measurement:
    """One contender of a benchmark: seconds per iteration, and what they must be explained by."""

    contender: str
    nodes: int
    bandwidth: float | None  # bits per second and way; None: loopback, where only copying counts
    model_bytes: int
    compute: str  # "real": the cores that compute also copy; "sleep": they are free
    compute_seconds: float  # of an iteration without exchange
    seconds: Sequence[float]  # per iteration, one per round; the median counts
    kind: str  # "all-reduce", "neighbors" or "none"
    peers: int = 0
    overlap: str = "none"
    straggler_seconds: float = 0.0  # what late nodes are expected to add
    latency: float | None = None  # seconds, one way
    # Equal messages per payload, or the bytes of each as backward completes them; None: by default.
    buckets: int | Sequence[int] | None = None
    forward_fraction: float = 1 / 3
    update_seconds: float = 0.0  # of compute_seconds, in the optimizer's step
    cores: int | None = None  # that all nodes share; None: each has its own
    message_fraction: float = 1.0  # of the model's bytes, to each peer

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown kind {self.kind!r}; choose from {', '.join(KINDS)}")
        if self.compute not in ("real", "sleep"):
            raise ValueError(f"unknown compute {self.compute!r}; choose from real, sleep")
        if self.overlap not in OVERLAPS:
            raise ValueError(f"unknown overlap {self.overlap!r}; choose from {', '.join(OVERLAPS)}")
        if not list(self.seconds) or not min(self.seconds) > 0:
            raise ValueError(f"{self.contender}: seconds must be above 0, got {self.seconds!r}")

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Measurement:
        """From one JSON object; fields that the model does not use are left out."""
        known = {k: v for k, v in record.items() if k in cls.__dataclass_fields__}
        if isinstance(known.get("seconds"), int | float):
            known["seconds"] = [known["seconds"]]
        if isinstance(known.get("compute"), str):
            known["compute"] = known["compute"].partition(":")[0]  # sleep:300 is sleep
        if known.get("forward_fraction", 1) is None:
            del known["forward_fraction"]
        try:
            return cls(**known)
        except TypeError as error:
            raise ValueError(f"cannot use the record {record!r}: {error}") from None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def predicted(self, calibration: Calibration) -> float:
        """What the model says this contender takes."""
        n = self.nodes
        link = Link(self.latency or 0.0, self.bandwidth / 8 if self.bandwidth else np.inf)
        compute = Compute.split(
            self.compute_seconds - self.update_seconds,
            self.forward_fraction,
            update_seconds_per_byte=self.update_seconds / self.model_bytes,
            shares_cpu=self.compute == "real",
        )
        reach, fraction = KINDS[self.kind], self.message_fraction
        exchange = Exchange(reach, n, self.peers, message_fraction=fraction)
        crowding = max(1.0, n / self.cores) if self.cores else 1.0
        found = step_timeline(
            exchange, link, compute, self._job, self.overlap, calibration, crowding
        )
        return found.seconds + self.straggler_seconds

    @property
    def about(self) -> str:
        """The cluster and the model, in a few words."""
        wire = f"{self.bandwidth / 1e9:g} Gbit/s" if self.bandwidth else "no limit"
        late = ", straggler" if self.straggler_seconds else ""
        size = f"{self.model_bytes / 1e6:.3g} MB"
        return f"n = {self.nodes}, {wire}, {size}, {self.compute}{late}"

    @property
    def _job(self) -> Job:
        if isinstance(self.buckets, Sequence):
            return Job(self.model_bytes, bucket_sizes=tuple(self.buckets))
        if self.buckets:
            return Job(self.model_bytes, -(-self.model_bytes // self.buckets))
        job = Job(self.model_bytes)
        return job.as_ddp() if self.kind == "all-reduce" else job


def load_measurements(*paths: str | Path) -> list[Measurement]:
    """From JSON: a list of records, an object that has it under "records", or a record per line.

    Records that differ by nothing but time are rounds of one measurement.
    """
    rounds: dict[str, list[Measurement]] = {}
    for path in paths:
        for record in _records(Path(path)):
            if "left_out" in record:  # a contender that refused to run
                continue
            found = Measurement.from_record(record)
            same = replace(found, seconds=[1.0], compute_seconds=0.0, update_seconds=0.0)
            if found.compute == "real":  # where forward's share is measured too
                same = replace(same, forward_fraction=0.0)
            rounds.setdefault(f"{path} {same!r}", []).append(found)
    return [_joined(same) for same in rounds.values()]


def _joined(rounds: Sequence[Measurement]) -> Measurement:
    middle = {
        name: statistics.median(getattr(m, name) for m in rounds)
        for name in ("compute_seconds", "update_seconds", "forward_fraction")
    }
    return replace(rounds[0], seconds=[s for m in rounds for s in m.seconds], **middle)


def _records(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    try:
        found = parse_json(text)
    except ValueError:
        found = [parse_json(line) for line in text.splitlines()]
    records = found.get("records") if isinstance(found, dict) else found
    if not isinstance(records, list):
        raise ValueError(f"{path} holds no list of records")
    return records

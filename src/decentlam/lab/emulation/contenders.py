"""The ways to train that are compared: how each is built, and what it sends and hides."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

import decentlam
from decentlam import algorithms
from decentlam.algorithms import Reach
from decentlam.analysis.cost import Delays, straggler_wait
from decentlam.analysis.cost.model import busiest, overlap_of
from decentlam.lab.emulation import training
from decentlam.lab.emulation.training import Build
from decentlam.topology import resolve

LOCAL, BASE = "local only (limit)", "DDP"  # what the others are compared with
WARM_UP = 3
_TRIAL = 35  # overlap="auto" tries both of its modes during its first 33 steps


@dataclass(frozen=True)
class Contender:
    """A way to train, and what the cost model must know of it."""

    build: Build
    reach: Reach
    overlap: str = "none"  # as in `decentlam.analysis.cost`
    topology: str = "ring"
    message_fraction: float = 1.0  # of the parameters' bytes
    warm_up: int = WARM_UP  # iterations that are not timed
    when_named: bool = False  # takes too long to be in every table

    def peers(self, nodes: int) -> int:
        return busiest(resolve(self.topology, nodes), 0) if self.reach is Reach.NEIGHBORS else 0

    def delay(self, nodes: int, late: float) -> float:
        """The seconds that an iteration is longer if one random node per step is `late`."""
        return straggler_wait(
            resolve(self.topology, nodes),
            Delays(late),
            reach=lambda step: self.reach,
            early=self.overlap == "iteration",
        )


_STEADY = {"stable": "auto", "momentum": 0.9}  # on which Algorithm 2 would be unstable
_ONE_PEER, _EXP = "one-peer-symmetric-exponential", "symmetric-exponential"
_DEFAULT = "bipartite-random-match"  # of the library


def _ddp(**options: Any) -> Contender:
    return Contender(training.ddp(**options), Reach.EVERYONE, "backward")


def _ours(
    cls: Any, topology: str, overlap: bool | str, options: dict[str, Any] | None = None, **rest: Any
) -> Contender:
    algorithm = getattr(algorithms, cls.__name__)()
    options = options or {}
    build = training.ours(cls, topology, overlap=overlap, **options)
    if "message_dtype" in options:
        rest["message_fraction"] = options["message_dtype"].itemsize / torch.float32.itemsize
    return Contender(build, algorithm.reach(0), overlap_of(algorithm, overlap), topology, **rest)


def _lam(topology: str, overlap: bool | str, **rest: Any) -> Contender:
    return _ours(decentlam.DecentLaM, topology, overlap, **rest)


def _decent_dp(topology: str) -> Contender:
    """One peer that changes, also on what it calls a ring; averages with the model of before."""
    return Contender(training.decent_dp(topology), Reach.NEIGHBORS, "iteration", _ONE_PEER)


CONTENDERS: dict[str, Contender] = {
    LOCAL: Contender(training.local_only, Reach.NOBODY),
    BASE: _ddp(),
    "DDP, bucket views": _ddp(gradient_as_bucket_view=True),
    "DDP, 1 MB buckets": _ddp(bucket_cap_mb=1),
    "raw exchange, 1 peer": Contender(
        training.raw_exchange(1), Reach.NEIGHBORS, topology=_ONE_PEER
    ),
    "raw exchange, 2 peers": Contender(training.raw_exchange(2), Reach.NEIGHBORS),
    "bare buckets, 1 peer": Contender(
        training.bare_exchange(_ONE_PEER, early=False), Reach.NEIGHBORS, "backward", _ONE_PEER
    ),
    "bare buckets, 1 peer, AWC": Contender(
        training.bare_exchange(_ONE_PEER, early=True), Reach.NEIGHBORS, "iteration", _ONE_PEER
    ),
    "PmSGD": _ours(decentlam.PmSGD, "ring", overlap=True),
    "DmSGD ring": _ours(decentlam.DmSGD, "ring", overlap=True),
    "DecentLaM ring, no overlap": _lam("ring", overlap=False),
    "DecentLaM ring, overlap": _lam("ring", overlap=True),
    "DecentLaM ring, into forward": _lam("ring", overlap="forward"),
    "DecentLaM one-peer, no overlap": _lam(_ONE_PEER, overlap=False),
    "DecentLaM one-peer, overlap": _lam(_ONE_PEER, overlap=True),
    "DecentLaM one-peer, into forward": _lam(_ONE_PEER, overlap="forward"),
    "DecentLaM one-peer, no overlap, sent": _lam(
        _ONE_PEER, overlap=False, options={"shared_memory": False}, when_named=True
    ),
    "DecentLaM one-peer, overlap, 16 bits": _lam(
        _ONE_PEER, overlap=True, options={"message_dtype": torch.bfloat16}, when_named=True
    ),
    "DecentLaM one-peer, into forward, 16 bits": _lam(
        _ONE_PEER, overlap="forward", options={"message_dtype": torch.bfloat16}, when_named=True
    ),
    "DecentLaM one-peer, overlap, float16": _lam(
        _ONE_PEER, overlap=True, options={"message_dtype": torch.float16}, when_named=True
    ),
    "DecentLaM one-peer, overlap, 8 bits": _lam(
        _ONE_PEER, overlap=True, options={"message_dtype": torch.int8}, when_named=True
    ),
    "DecentLaM one-peer, steady form": _lam(
        _ONE_PEER, overlap=True, options=_STEADY, when_named=True
    ),
    "DecentLaM one-peer, steady form, into forward": _lam(
        _ONE_PEER, overlap="forward", options=_STEADY, when_named=True
    ),
    "DecentLaM one-peer, steady form, float16": _lam(
        _ONE_PEER, True, options={**_STEADY, "message_dtype": torch.float16}, when_named=True
    ),
    "DecentLaM as it comes": Contender(  # every option left out, the topology, too
        training.as_it_comes, Reach.NEIGHBORS, "backward", _DEFAULT, warm_up=_TRIAL, when_named=True
    ),
    "DecentLaM one-peer, auto": _lam(_ONE_PEER, "auto", warm_up=_TRIAL, when_named=True),
    "DecentLaM sym. exponential, no overlap": _lam(_EXP, overlap=False),
    "DecentLaM sym. exponential, overlap": _lam(_EXP, overlap=True),
    "AWC-DmSGD one-peer": _ours(decentlam.AWCDmSGD, "one-peer-exponential", overlap=True),
}
RIVALS: dict[str, Contender] = {
    "decent-dp ring (1 peer)": _decent_dp("ring"),
    "decent-dp one-peer-exp": _decent_dp("one-peer-exp"),
}


def have_rivals() -> bool:
    return importlib.util.find_spec("decent_dp") is not None


def contenders(with_decent_dp: bool) -> dict[str, Contender]:
    return CONTENDERS | (RIVALS if with_decent_dp else {})


def choose(only: tuple[str, ...]) -> dict[str, Contender]:
    """The named ones and the two that all are compared with; without names, nearly all."""
    known = contenders(have_rivals())
    for name in only:
        if name not in known:
            missing = " (decent-dp is not installed)" if name in RIVALS else ""
            raise ValueError(f"unknown contender {name!r}{missing}; choose from {'; '.join(known)}")
    usual = [name for name, contender in known.items() if not contender.when_named]
    wanted = {LOCAL, BASE, *(only or usual)}
    return {name: contender for name, contender in known.items() if name in wanted}

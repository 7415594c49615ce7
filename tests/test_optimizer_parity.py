"""Every method on real gloo processes takes the simulator's steps, to 1e-12 in float64."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import runs
import torch

import decentlam

SMALL = 100  # bytes: nearly every parameter is a bucket of its own
LARGE = 2**20
EVERYONE = ("pmsgd", "pmsgd-lars")  # never in shared memory


@dataclass(frozen=True)
class Case:
    """One run: a method on a topology with its options."""

    nodes: int
    method: str
    topology: str
    overlap: bool | str = True
    bucket_bytes: int = SMALL
    weight_decay: float = 0.0
    hyper: dict[str, Any] = field(default_factory=dict)
    sent: bool = False  # small buckets too, instead of read in shared memory

    @property
    def name(self) -> str:
        more = [f"{k}={v}" for k, v in self.hyper.items()]
        when = {True: "overlap", False: "afterwards"}.get(self.overlap, self.overlap)
        buckets = "buckets" if self.bucket_bytes == SMALL else "one bucket"
        way = ["sent"] if self.sent else []
        return " ".join([str(self.nodes), self.method, self.topology, when, buckets, *way, *more])

    def run(self) -> list[torch.Tensor]:
        options = {
            "topology": self.topology,
            "overlap": self.overlap,
            "bucket_bytes": self.bucket_bytes,
            "weight_decay": self.weight_decay,
            "timeout_seconds": runs.HANG_SECONDS,
            "stable": "ignore",  # as in the simulator
            "shared_memory": self.bucket_bytes == SMALL and not self.sent,
            **({"lars": True} if self.method == "pmsgd-lars" else {}),
        }
        return runs.train_quadratic(self.method, runs.STEPS, {**options, **self.hyper})

    def simulate(self) -> list[torch.Tensor]:
        return runs.simulate_quadratic(
            self.method,
            self.topology,
            self.nodes,
            runs.STEPS,
            weight_decay=self.weight_decay,
            **self.hyper,
        )


def slowmo(**hyper: Any) -> dict[str, Any]:
    return {"momentum": 0.3, "tau": 5, "inner_momentum": "average", **hyper}


FAST, SLOW = {"momentum": 0.8}, {"momentum": 0.3}  # changing weights let momentum grow: keep it low
AHEAD = {"momentum": 0.3, "nesterov": True}
FOUR = [
    # All methods: a static network in overlapped buckets, a changing one after backward.
    Case(4, "pmsgd", "mesh", True, SMALL, 0.01, FAST),
    Case(4, "pmsgd", "ring", False, LARGE, 0.0, AHEAD),
    Case(4, "pmsgd-lars", "star", True, SMALL, 0.01, FAST),
    Case(4, "pmsgd-lars", "mesh", False, LARGE, 0.01, {**AHEAD, "trust": 0.01}),
    Case(4, "dsgd", "star", True, SMALL, 0.01),
    Case(4, "dsgd", "one-peer-exponential", False, LARGE, 0.01),
    Case(4, "dmsgd", "ring", True, SMALL, 0.01, FAST),
    Case(4, "dmsgd", "bipartite-random-match", False, SMALL, 0.0, AHEAD),
    Case(4, "dmsgd", "one-peer-exponential", True, LARGE, 0.01, SLOW),
    Case(4, "da-dmsgd", "mesh", True, SMALL, 0.01, FAST),
    Case(4, "da-dmsgd", "one-peer-exponential", False, SMALL, 0.0, AHEAD),
    Case(4, "awc-dmsgd", "star", True, SMALL, 0.01, FAST),
    Case(4, "awc-dmsgd", "bipartite-random-match", True, LARGE, 0.0, AHEAD),
    Case(4, "awc-dmsgd", "one-peer-exponential", False, SMALL, 0.01, SLOW),
    Case(4, "awc-dmsgd", "ring", True, SMALL, 0.01, {**SLOW, "heavy_ball": True}),
    Case(4, "slowmo", "mesh", True, SMALL, 0.01, slowmo()),
    Case(4, "slowmo", "one-peer-exponential", False, SMALL, 0.01, slowmo(inner_momentum="keep")),
    Case(4, "slowmo", "ring", True, LARGE, 0.0, slowmo(base="local", inner_momentum="reset")),
    Case(4, "slowmo", "ring", True, SMALL, 0.0, slowmo(tau=1)),
    Case(4, "qg-dmsgd", "mesh", True, SMALL, 0.01, FAST),
    Case(4, "qg-dmsgd", "one-peer-exponential", False, SMALL, 0.0, {**AHEAD, "mu": 0.5}),
    Case(4, "d2-dmsgd", "ring", True, SMALL, 0.01, FAST),
    Case(4, "d2-dmsgd", "bipartite-random-match", False, SMALL, 0.0, AHEAD),
    Case(4, "decentlam", "mesh", True, SMALL, 0.01, FAST),
    Case(4, "decentlam", "star", False, LARGE, 0.01, {"momentum": 0.8, "nesterov": True}),
    Case(4, "decentlam", "bipartite-random-match", True, SMALL, 0.0, SLOW),
    Case(4, "decentlam", "one-peer-symmetric-exponential", False, SMALL, 0.01, AHEAD),
    Case(4, "decentlam-steady", "bipartite-random-match", True, SMALL, 0.01, FAST),
    Case(4, "decentlam-steady", "ring", False, LARGE, 0.0, AHEAD),
    Case(4, "gt-dmsgd", "one-peer-exponential", True, SMALL, 0.01, FAST),
    Case(4, "gt-dmsgd", "mesh", False, LARGE, 0.0, AHEAD),
]
FORWARD = [  # parameters arrive in the next forward
    Case(4, "pmsgd", "mesh", "forward", SMALL, 0.01, FAST),
    Case(4, "pmsgd-lars", "star", "forward", SMALL, 0.01, FAST),
    Case(4, "dsgd", "one-peer-exponential", "forward", SMALL, 0.01),
    Case(4, "dmsgd", "bipartite-random-match", "forward", SMALL, 0.01, AHEAD),
    Case(4, "da-dmsgd", "one-peer-exponential", "forward", SMALL, 0.0, AHEAD),
    Case(4, "awc-dmsgd", "ring", "forward", SMALL, 0.01, FAST),
    Case(4, "slowmo", "ring", "forward", SMALL, 0.0, slowmo(base="local", inner_momentum="reset")),
    Case(4, "qg-dmsgd", "mesh", "forward", LARGE, 0.01, FAST),
    Case(4, "d2-dmsgd", "ring", "forward", SMALL, 0.01, FAST),
    Case(4, "decentlam", "star", "forward", SMALL, 0.01, {"momentum": 0.8, "nesterov": True}),
    Case(4, "decentlam", "one-peer-symmetric-exponential", "forward", SMALL, 0.01, SLOW),
    Case(4, "decentlam-steady", "bipartite-random-match", "forward", SMALL, 0.01, FAST),
    Case(4, "gt-dmsgd", "one-peer-exponential", "forward", SMALL, 0.01, FAST),
    Case(5, "decentlam", "bipartite-random-match", "forward", SMALL, 0.01, SLOW),
    Case(8, "decentlam", "mesh", "forward", SMALL, 0.01, FAST),
]
FIVE = [  # an odd number: somebody rests at every step of a matching
    Case(5, "dmsgd", "bipartite-random-match", True, SMALL, 0.01, SLOW),
    Case(5, "da-dmsgd", "one-peer-exponential", True, SMALL, 0.01, SLOW),
    Case(5, "awc-dmsgd", "bipartite-random-match", True, SMALL, 0.01, SLOW),
    Case(5, "slowmo", "one-peer-symmetric-exponential", False, SMALL, 0.0, slowmo(tau=4)),
    Case(5, "decentlam", "one-peer-symmetric-exponential", True, SMALL, 0.01, SLOW),
    Case(5, "decentlam", "mesh", False, SMALL, 0.01, FAST),
    Case(5, "pmsgd", "star", True, SMALL, 0.01, FAST),
]
EIGHT = [
    Case(8, "pmsgd", "mesh", True, LARGE, 0.01, FAST),
    Case(8, "pmsgd-lars", "mesh", False, LARGE, 0.01, FAST),
    Case(8, "dsgd", "bipartite-random-match", True, SMALL, 0.01),
    Case(8, "dmsgd", "mesh", True, SMALL, 0.01, FAST),
    Case(8, "da-dmsgd", "bipartite-random-match", True, SMALL, 0.0, AHEAD),
    Case(8, "awc-dmsgd", "one-peer-exponential", True, SMALL, 0.01, SLOW),
    Case(8, "slowmo", "one-peer-symmetric-exponential", True, LARGE, 0.01, slowmo()),
    Case(8, "qg-dmsgd", "one-peer-exponential", True, SMALL, 0.01, SLOW),
    Case(8, "d2-dmsgd", "mesh", False, SMALL, 0.01, FAST),
    Case(8, "decentlam", "mesh", True, SMALL, 0.01, FAST),
    Case(8, "decentlam", "star", False, LARGE, 0.0, AHEAD),
    Case(8, "decentlam", "one-peer-symmetric-exponential", True, SMALL, 0.01, SLOW),
    Case(8, "decentlam-steady", "bipartite-random-match", True, SMALL, 0.01, FAST),
    Case(8, "gt-dmsgd", "bipartite-random-match", True, SMALL, 0.01, FAST),
]
SENT = [replace(case, sent=True) for case in (*FORWARD, *FIVE) if case.method not in EVERYONE]
CASES = FOUR + FORWARD + FIVE + EIGHT + SENT
# Methods that differ in kind: the others are slow where they only repeat what one of these shows.
KINDS = ("decentlam", "da-dmsgd", "awc-dmsgd", "slowmo", "pmsgd")


def is_slow(case: Case) -> bool:
    return (case in EIGHT or case in SENT) and case.method not in KINDS


@cache
def everyone(nodes: int, slow: bool) -> list[dict[str, Any]]:
    """All cases of that many nodes, one after the other in one group of processes."""
    cases = [case for case in CASES if case.nodes == nodes and is_slow(case) == slow]
    scenarios = [(case.name, case.run, {}) for case in cases]
    return runs.run_processes(runs.run_scenarios, nodes, (scenarios,))


@pytest.mark.parametrize(
    "case", [runs.slow_if(is_slow(case), case) for case in CASES], ids=lambda case: case.name
)
def test_processes_equal_simulator(case: Case) -> None:
    trajectories = runs.outcomes(everyone(case.nodes, is_slow(case)), case.name)
    runs.assert_equal(trajectories, case.simulate())


def test_every_method_runs_on_four_and_eight_processes() -> None:
    for cases in (FOUR, EIGHT):
        assert {case.method for case in cases} == set(decentlam.ALGORITHMS)

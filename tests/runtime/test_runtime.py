"""Every method on real processes takes the simulator's steps, however messages travel.

One table: method x topology x exchange x overlap, in float64 and to 1e-12.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import decentlam
from decentlam.algorithms import Reach, make, reaches
from tests.helpers.processes import HANG_SECONDS, Group, Scenarios, message_of
from tests.helpers.quadratic import (
    CLASSES,
    LR,
    Quadratic,
    assert_equal,
    build,
    flat,
    node_loss,
    quadratic_loss,
    simulate,
    start,
    train,
)
from tests.helpers.scripts import run_script

# Warm-up from zero, two zeros in a row, a jump, and a decay.
RATES = (0.0, 0.025, 0.05, 0.0, 0.0, 0.05, 0.015)
STEPS = len(RATES)
AVERAGED = ("pmsgd", "pmsgd-lars", "pmadamw")  # exactly, by everyone: there are no neighbors
TOPOLOGIES = ("ring", "bipartite-random-match", "one-peer-exponential")
# What the exchange is given: processes, processes of a node, and options.
EXCHANGES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "shared memory": (4, 1, {"shared_memory": True}),
    "gloo": (4, 1, {"shared_memory": False}),
    "float16": (4, 1, {"shared_memory": False, "message_dtype": torch.float16}),
    "nodes of two": (6, 2, {"processes_per_node": 2}),
    "one rests": (5, 1, {"shared_memory": False}),
}
EXACT = [exchange for exchange in EXCHANGES if exchange != "float16"]
VARIANTS: list[tuple[str, str, dict[str, Any]]] = [
    ("awc-dmsgd", "ring", {"heavy_ball": True}),
    ("slowmo", "ring", {"tau": 1}),
    ("slowmo", "ring", {"base": "local", "inner_momentum": "reset"}),
    ("slowmo", "one-peer-exponential", {"inner_momentum": "average"}),
    ("qg-dmsgd", "one-peer-exponential", {"mu": 0.5}),
    ("pmsgd-lars", "ring", {"trust": 0.01}),
]


@dataclass(frozen=True)
class Case:
    """One run, in processes and simulated."""

    method: str
    topology: str
    exchange: str
    overlap: str
    hyper: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = [f"{k}={v}" for k, v in self.hyper.items()]
        return ", ".join([self.method, self.topology, self.exchange, self.overlap, *more])

    @property
    def shared(self) -> dict[str, Any]:
        """Hyper-parameters of both; changing weights let momentum grow, so it is low there."""
        nesterov = {} if self.method == "dsgd" else {"nesterov": self.exchange == "gloo"}
        return {"momentum": 0.8 if self.topology == "ring" else 0.3, **nesterov, **self.hyper}

    @property
    def weight_decay(self) -> float:
        return 0.01 if self.topology == "ring" else 0.0

    def run(self) -> list[Tensor]:
        """Return the trajectory of this process, (steps, d)."""
        rank, options = dist.get_rank(), {**EXCHANGES[self.exchange][2], **self.shared}
        if self.method == "dsgd":
            del options["momentum"]
        model = Quadratic(seed=rank)  # different on purpose: the optimizer must make them equal
        optimizer = build(
            self.method,
            model,
            None,
            topology=self.topology,
            overlap=self.overlap,
            weight_decay=self.weight_decay,
            bucket_bytes=2**20 if self.overlap == "none" and self.exchange == "gloo" else 100,
            **options,
        )
        trajectory = []
        for step, lr in enumerate(RATES):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad(set_to_none=step % 3 != 0)
            quadratic_loss(model, rank, step).backward()
            optimizer.step()
            trajectory.append(flat(model))
        return trajectory

    def simulate(self) -> list[Tensor]:
        processes, per_node, _ = EXCHANGES[self.exchange]
        per_node = 1 if self.method in AVERAGED else per_node  # every process is a node then
        return simulate(
            self.method,
            processes // per_node,
            STEPS,
            loss=node_loss(per_node),
            topology=self.topology,
            lr=RATES.__getitem__,
            weight_decay=self.weight_decay,
            **self.shared,
        )


def possible(method: str, topology: str, exchange: str) -> bool:
    if method in AVERAGED:
        return topology == "ring"
    if topology == "one-peer-exponential":  # directed
        return not make(method).needs_symmetric
    return exchange != "one rests" or topology == "bipartite-random-match"


def cases() -> Iterator[Case]:
    """Every method with every exchange and overlap, on its topologies in turn; where only the
    number of processes or the way of a message is another, with one of the overlaps."""
    for number, method in enumerate(decentlam.ALGORITHMS):
        for turn, exchange in enumerate(EXACT):
            topologies = [t for t in TOPOLOGIES if possible(method, t, exchange)]
            for more, overlap in enumerate(("none", "backward")):
                if exchange in ("gloo", "nodes of two") or (number + turn + more) % 2:
                    topology = topologies[(turn + more) % len(topologies)]
                    yield Case(method, topology, exchange, overlap)


TABLE = list(cases())
TABLE += [
    Case(method, topology, exchange, "backward", hyper)
    for method, topology, hyper in VARIANTS
    for exchange in ("shared memory", "gloo")
]
TABLE.append(Case("adamw", "ring", "float16", "backward"))  # second moments are sent, too


@cache
def scenarios(processes: int) -> Scenarios:
    """All cases of that many processes, one after the other in one group."""
    listed = Scenarios(processes, own_group=False)
    for case in TABLE:
        if EXCHANGES[case.exchange][0] == processes:
            listed.add(str(case), case.run)
    return listed


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_processes_equal_simulator(case: Case) -> None:
    trajectories = scenarios(EXCHANGES[case.exchange][0]).outcomes(str(case))
    # test_rounded.py has the steps of 16 bits to 1e-12; here they are near those of all bits.
    tolerance = 0.05 if case.exchange == "float16" else 1e-12
    assert_equal(trajectories, case.simulate(), tolerance)


def test_every_method_is_in_the_table_with_every_exchange() -> None:
    for exchange in EXACT:
        assert {case.method for case in TABLE if case.exchange == exchange} == set(CLASSES)
    for method in set(CLASSES) - set(AVERAGED):
        directed = not make(method).needs_symmetric
        assert len({case.topology for case in TABLE if case.method == method}) == 2 + directed
    assert {Reach.EVERYONE} == reaches(make("pmsgd"))


LAST = """
import time, torch, decentlam

decentlam.init()
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(400, 400)
optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, topology="ring", overlap="backward")
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(1, 400)).sum().backward()
    time.sleep(0.3 * rank)
    optimizer.step()
"""


def test_a_script_that_init_joined_may_end_with_step(tmp_path: Path) -> None:
    """The group is left at exit; the last messages must be out before."""
    (tmp_path / "script.py").write_text(LAST)
    assert run_script(tmp_path / "script.py", tmp_path, nodes=2) == ""


# A step that does not come to its end -----------------------------------------------------------


own = Scenarios(4)


class Struck(decentlam.algorithms.DecentLaM):
    """DecentLaM whose update of the last bucket is interrupted once."""

    calls = 0

    def update(self, x: Tensor, g: Tensor, mixed: Tensor, state: Any, step: Any) -> None:
        Struck.calls += 1
        if Struck.calls == 14:  # of five buckets in each step
            raise KeyboardInterrupt
        super().update(x, g, mixed, state, step)


def interrupted(process_group: Group, overlap: str) -> tuple[list[Tensor], list[int]]:
    """Ctrl-C strikes in the midst of the updates of step 2; the script saves and goes on."""
    models, steps = [], []
    for algorithm in (decentlam.algorithms.DecentLaM(0.6), Struck(0.6)):
        node = dist.get_rank(process_group)
        model = Quadratic()
        Struck.calls = 0
        optimizer = decentlam.DecentralizedOptimizer(
            model.parameters(),
            algorithm,
            LR,
            topology="ring",
            overlap=overlap,
            bucket_bytes=1,
            process_group=process_group,
            timeout_seconds=HANG_SECONDS,
        )
        train(optimizer, model, node, range(2))
        try:
            train(optimizer, model, node, range(2, 3))
        except KeyboardInterrupt:
            steps.append(optimizer.state_dict()["param_groups"][0]["step"])
        train(optimizer, model, node, range(3, 5))
        models.append(flat(model))
    return models, steps


@own.run(interrupted, [{"overlap": "none"}, {"overlap": "backward"}])
def test_an_interrupted_step_is_completed_and_counted(results: Any) -> None:
    for (expected, found), steps in results:
        assert steps == [3] and torch.equal(expected, found)


def one_is_late_for_ever(process_group: Group) -> tuple[str, bool]:
    """Process 1 does not take step 3. What the others say, and whether their models stay."""
    node, model, optimizer = start(process_group, "decentlam", timeout_seconds=2.0)
    train(optimizer, model, node, range(3))
    before = flat(model)
    if node == 1:
        return "", True
    said = message_of(lambda: train(optimizer, model, node, range(3, 4)))
    return said, torch.equal(flat(model), before)


@own.run(one_is_late_for_ever)
def test_a_step_that_failed_has_changed_nothing(results: list[tuple[str, bool]]) -> None:
    for node, (said, unchanged) in enumerate(results):
        if node in (0, 2):  # its neighbors on the ring
            assert said.startswith("ExchangeError") and "step 3" in said, said
            assert unchanged


# What a step has sent, and how long it has waited -------------------------------------------------


def statistics(process_group: Group, method: str, topology: str, overlap: bool) -> dict[str, Any]:
    node, model, optimizer = start(process_group, method, topology=topology, overlap=overlap)
    sent = []
    for step in range(4):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        optimizer.step()
        sent.append(optimizer.statistics.bytes_sent)
    s = optimizer.statistics
    return {
        "sent": sent,
        "total": s.total_bytes_sent,
        "step": s.step,
        "wait": s.wait_seconds,
        "total wait": s.total_wait_seconds,
        "exchange": s.exchange_seconds,
        "overlap": s.overlap,
        "skipped": s.skipped,
    }


def slow_neighbor(process_group: Group) -> tuple[float, float]:
    """What node 0 has waited in one step, and in all. Node 3 takes its time for each, until that
    was longer than what else node 0 may have to wait for on a busy machine."""
    node, model, optimizer = start(process_group, "decentlam", overlap=False)
    waited = torch.zeros(2, dtype=torch.float64)
    while waited[0] <= 0.2:
        optimizer.zero_grad()
        quadratic_loss(model, node, 0).backward()
        time.sleep(0.5 if node == 3 else 0.0)
        optimizer.step()
        s = optimizer.statistics
        waited = torch.tensor([s.wait_seconds, s.total_wait_seconds], dtype=torch.float64)
        dist.broadcast(waited, 0)
    return waited[0].item(), waited[1].item()


SIZE = 8 * sum(Quadratic.SIZES)  # bytes


SENT: dict[tuple[str, str, bool], list[int]] = {
    ("decentlam", "ring", True): [2 * SIZE] * 4,
    ("decentlam", "ring", False): [2 * SIZE] * 4,
    ("dmsgd", "one-peer-exponential", True): [SIZE] * 4,
    ("da-dmsgd", "one-peer-exponential", True): [2 * SIZE] * 4,
    ("awc-dmsgd", "one-peer-symmetric-exponential", True): [SIZE] * 4,
    ("pmsgd", "ring", True): [SIZE * 3 // 2] * 4,
    ("slowmo", "ring", True): [2 * SIZE, 2 * SIZE, SIZE * 3 // 2, 2 * SIZE],
}
NAMES = ("method", "topology", "overlap")


@own.run(statistics, [dict(zip(NAMES, case, strict=True)) for case in SENT])
def test_statistics(results: list[Any], method: str, topology: str, overlap: bool) -> None:
    sent = SENT[method, topology, overlap]
    for r in results:
        assert r["sent"] == sent and r["total"] == sum(sent)
        assert r["step"] == 3 and not r["skipped"]
        assert 0 <= r["wait"] <= r["exchange"] and r["wait"] <= r["total wait"]
        assert 0 <= r["overlap"] <= 1


@own.run(slow_neighbor)
def test_waiting_for_a_slow_neighbor_is_counted(results: list[tuple[float, float]]) -> None:
    assert all(total >= wait > 0.2 for wait, total in results)

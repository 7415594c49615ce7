"""What a step has sent and how long it has waited."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.processes import Group, Scenarios
from tests.helpers.quadratic import Quadratic, quadratic_loss, start

scenarios = Scenarios(4)


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


@scenarios.run(statistics, [dict(zip(NAMES, case, strict=True)) for case in SENT])
def test_statistics(results: list[Any], method: str, topology: str, overlap: bool) -> None:
    sent = SENT[method, topology, overlap]
    for r in results:
        assert r["sent"] == sent and r["total"] == sum(sent)
        assert r["step"] == 3 and not r["skipped"]
        assert 0 <= r["wait"] <= r["exchange"] and r["wait"] <= r["total wait"]
        assert 0 <= r["overlap"] <= 1


@scenarios.run(slow_neighbor)
def test_waiting_for_a_slow_neighbor_is_counted(results: list[tuple[float, float]]) -> None:
    assert all(total >= wait > 0.2 for wait, total in results)

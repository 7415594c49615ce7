"""What timings say: splits, ratios to DDP, and what was left out."""

from __future__ import annotations

from typing import Any

import pytest

from decentlam.lab.network.contenders import BASE, LOCAL
from decentlam.lab.network.results import left_out, limits, split, summary

ONE_PEER = "DecentLaM one-peer, overlap"


def record(contender: str, number: int, seconds: float, step: float, wait: float) -> dict[str, Any]:
    spent = {"seconds": seconds, "step_seconds": step, "wait_seconds": wait, "bytes_sent": 4e6}
    spent |= {"cpu_seconds": 0.05}
    return {"round": number, "contender": contender, **spent}


def test_times_are_split_and_compared_round_by_round() -> None:
    local = [record(LOCAL, k, 0.10, 0.02, 0.0) for k in range(3)]
    ddp = [record(BASE, k, s, 0.02, 0.0) for k, s in enumerate((0.20, 0.30, 0.40))]
    mine = [record(ONE_PEER, k, s, 0.07, 0.04) for k, s in enumerate((0.20, 0.15, 0.16))]
    # Compute 0.10 - 0.02, update 0.07 - 0.04, the rest is exposed.
    found = split(mine[0], local[0])
    assert found == pytest.approx({"compute": 0.08, "update": 0.03, "exposed": 0.09})
    gone = {"round": 0, "contender": "x", "left_out": "no such overlap"}
    rows = {row["contender"]: row for row in summary([*local, *ddp, *mine, gone])}
    assert list(rows) == [LOCAL, BASE, ONE_PEER]
    ours = rows[ONE_PEER]  # 1, 0.5 and 0.4 of DDP
    assert (ours["of_DDP"], ours["lowest"], ours["highest"]) == pytest.approx((0.5, 0.4, 1.0))
    assert ours["speed_up"] == pytest.approx(2) and ours["MB_sent"] == 4
    assert ours["cpu_ms"] == pytest.approx(50)
    assert left_out([*local, gone]) == ["Left out: x: no such overlap"]
    assert "1.75 models of 40 MB" in limits(8, 10**7)

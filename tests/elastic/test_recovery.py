"""Elastic runs are refused where members could not change; what they had in common begins anew."""

from __future__ import annotations

import pytest
import torch

import decentlam
from decentlam.elastic.recovery import begin_anew, check_network
from tests.runtime.test_build import BOTH, network_of


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", BOTH])
def test_elastic_runs_on_gpus_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"gloo backend and parameters on the CPU.*cuda:0"):
        check_network(network_of(backend, "cuda:0", monkeypatch), None)


@pytest.mark.parametrize("name", ["decentlam-exact", "d2-dmsgd", "gt-dmsgd"])
def test_who_is_left_finds_its_own_optimum(name: str) -> None:
    """The corrections of 8 nodes have no sum; those of 7 of them have one, and would pull."""
    targets = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start = torch.zeros(8, 3, dtype=torch.float64)
    eight, ends = decentlam.Nodes(name, "complete", start, 0.5), []
    for _ in range(60):
        eight.step(eight.x - targets, 0.1)
    for clear in (True, False):
        saved = eight.state_dict()
        left = {key: value[1:].clone() for key, value in saved["state"].items()}
        seven = decentlam.Nodes(name, "complete", start[1:], 0.5)
        if clear:
            begin_anew(seven.algorithm, [left])
        seven.load_state_dict(saved | {"x": saved["x"][1:].clone(), "state": left})
        for _ in range(300):
            seven.step(seven.x - targets[1:], 0.1)
        ends.append((seven.x - targets[1:].mean(0)).abs().max().item())
    assert ends[0] < 1e-6 < 1e-2 < ends[1]

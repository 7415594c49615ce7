"""What a benchmark may ask for, and what becomes of its records."""

from __future__ import annotations

import os
from typing import Any

import pytest

from decentlam.lab.network.timing import Benchmark, measure


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": "alexnet"}, "unknown model 'alexnet'; choose from convnet"),
        ({"compute": "sleep"}, "real or sleep:MILLISECONDS"),
        ({"parameters": 10**6}, "needs sleeping compute"),
        ({"only": ("SGP",)}, "unknown contender 'SGP'; choose from local only"),
        ({"rounds": 0}, "1 or more"),
        ({"straggler_ms": -1.0}, "0 ms or more"),
    ],
)
def test_benchmarks_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Benchmark(**wrong)


def test_fewer_than_two_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="2 nodes or more"):
        measure(Benchmark(), 1, None)


@pytest.mark.system
def test_without_root_the_reason_and_the_way_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(ValueError, match=r"no emulated network: .*--loopback"):
        measure(Benchmark(), 2, "1Gbit")

"""Elastic runs are refused where their members could not change."""

from __future__ import annotations

import pytest

from decentlam.elastic.recovery import check_network
from tests.runtime.test_build import BOTH, network_of


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:gloo", BOTH])
def test_elastic_runs_on_gpus_are_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"gloo backend and parameters on the CPU.*cuda:0"):
        check_network(network_of(backend, "cuda:0", monkeypatch), None)

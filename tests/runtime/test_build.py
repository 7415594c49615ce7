"""What a run is built of is refused where it cannot work."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from decentlam.network import network
from decentlam.runtime import build

BOTH = "cpu:gloo,cuda:nccl"


def network_of(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> network.Network:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backend)
    return network.Network(object(), 0, 2, device=torch.device(device))  # type: ignore[arg-type]


def test_messages_from_a_gpu_by_gloo_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo = "cpu:gloo,cuda:gloo"
    with pytest.raises(ValueError, match=r"on cuda:1, but .* gloo.*init\('nccl'\).*model\.cpu"):
        build.check_device(network_of(gloo, "cuda:1", monkeypatch))
    build.check_device(network_of(gloo, "cpu", monkeypatch))
    build.check_device(network_of(BOTH, "cuda:1", monkeypatch))

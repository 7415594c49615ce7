"""What all processes tell each other arrives as it was said, and is never unpickled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import decentlam
from decentlam.network.network import Network, _backend, connect
from tests.helpers.processes import run_processes

# JSON of as many bytes as go along with their length, of one more and one less, and of many more.
LENGTHS = (1013, 1014, 1015, 5000)


def gathered() -> list[list[Any]]:
    rank, network = dist.get_rank(), connect()
    values: list[Any] = [None, True, rank, {"rank": rank}, "ä" * rank]
    values += ["x" * length for length in LENGTHS]
    values += [["y" * 3000] if rank == 1 else "short"]  # one alone has more to say
    return [network.gather(value) for value in values]


def test_everyone_gets_what_everyone_said():
    everyone = run_processes(gathered, 3, ())
    expected: list[Any] = [[None] * 3, [True] * 3, [0, 1, 2], [{"rank": k} for k in range(3)]]
    expected += [["", "ä", "ää"], *([["x" * length] * 3 for length in LENGTHS])]
    expected += [["short", ["y" * 3000], "short"]]
    for found in everyone:
        assert found == expected


def test_a_process_alone_hears_itself():
    assert connect().gather({"a": (1, 2)}) == [{"a": (1, 2)}]


def test_nothing_that_arrives_from_another_process_is_unpickled() -> None:
    root = Path(decentlam.__file__).parent
    wrong = re.compile(r"\b(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?\(")
    assert not [file for file in root.rglob("*.py") if wrong.search(file.read_text())]


def test_a_cpu_run_in_a_group_with_two_backends_is_not_taken_for_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    group = object()
    assert not Network(group, 0, 2).is_nccl  # type: ignore[arg-type]
    on_gpu = Network(group, 0, 2, device=torch.device("cuda", 0))  # type: ignore[arg-type]
    assert on_gpu.is_nccl and on_gpu.control_device.type == "cpu"
    assert _backend(group, torch.device("cuda")) == "nccl"  # type: ignore[arg-type]

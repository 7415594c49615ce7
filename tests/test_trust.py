"""What others on the network can do: docs/launch.md promises it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import decentlam
from decentlam.membership.spare import open_store
from decentlam.runtime.agreement import facts_of


def test_nothing_that_arrives_from_another_process_is_unpickled() -> None:
    root = Path(decentlam.__file__).parent
    wrong = re.compile(r"\b(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?\(")
    assert not [file for file in root.rglob("*.py") if wrong.search(file.read_text())]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_the_store_of_a_local_run_listens_on_loopback_only() -> None:
    store = open_store("127.0.0.1")
    store.set("key", "value")
    assert store.get("key") == b"value"
    rows = [
        row.split()[1:4]
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    listening = [local for local, _, state in rows if state == "0A"]
    assert [local for local in listening if local.endswith(f":{store.port:04X}")] == [
        f"0100007F:{store.port:04X}"
    ]


def test_processes_compare_versions_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = decentlam.DecentLaM([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    given = (optimizer.method, decentlam.options.Options(), optimizer.param_groups)
    before = facts_of(*given)
    monkeypatch.setattr(decentlam, "__version__", "0.0.7")
    monkeypatch.setattr(torch, "__version__", "1.0")
    after = facts_of(*given)
    assert {name for name in before if before[name] != after[name]} == {
        "decentlam version",
        "torch version",
    }
    assert "unknown" not in str(before["code of the algorithm"])

"""The store that a run is in, found among those that it was in before."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from decentlam.elastic import spare_stores as spare
from decentlam.elastic.generation import Change, Generation
from decentlam.network.store import address_of, open_store


def in_use(generation: int, run: str = "ours") -> dist.TCPStore:
    store = open_store("127.0.0.1")
    inner = dist.PrefixStore(spare.PREFIX, store)
    its = Generation(generation, (0,), 0, 0, (), (Change(0, 1),), ("",), 1, run=run)
    inner.set(f"generation/{generation}", its.as_json())
    inner.set("latest", str(generation))
    return store


def address(store: dist.Store) -> str:
    found = address_of(store)
    assert found is not None
    return found


def test_the_run_is_in_the_store_with_the_latest_generation() -> None:
    unused, before, now = open_store("127.0.0.1"), in_use(3), in_use(5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"127.0.0.1:{closed.getsockname()[1]}"
    places = [nobody, "no such host:1", address(unused), address(before), address(now)]
    found = spare.find((), places, None, 20.0)
    assert found is not None and found[:2] == (5, address(now))
    found = spare.find([nobody], [address(unused)], "ours", 20.0)
    assert found is not None and found[:2] == (-1, address(unused))
    assert spare.find([], [nobody], None, 20.0) is None
    assert spare.find_run([nobody], 20.0) is None
    run = spare.find_run([address(unused), address(before)], 20.0)
    assert run is not None and address(run) == address(before)


def test_a_store_of_another_run_is_not_found() -> None:
    """Where a store of this run was somebody may have started another run, or is about to."""
    unused, ours, theirs = open_store("127.0.0.1"), in_use(3), in_use(5, "theirs")
    places = [address(unused), address(theirs), address(ours)]
    found = spare.find(places, [], "ours", 20.0)
    assert found is not None and found[:2] == (3, address(ours))
    assert spare.find(places[:2], [], "ours", 20.0) is None
    assert spare.find_run([address(theirs)], 20.0, "ours") is None
    run = spare.find_run([address(theirs)], 20.0)
    assert run is not None and address(run) == address(theirs)


def test_stores_are_named_in_the_variable_or_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spare.read_addresses("") == ([], None)
    assert spare.read_addresses("a:1, b:2") == (["a:1", "b:2"], None)
    file = tmp_path / "run.stores"
    assert spare.read_addresses(str(file)) == ([], None)
    spare.write_addresses(file, ["a:1", "::1:2"], "f00d")
    assert spare.read_addresses(str(file)) == (["a:1", "::1:2"], "f00d")
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.chdir(tmp_path)
    assert spare.read_addresses("run.stores") == (["a:1", "::1:2"], "f00d")


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

"""The store that a run is in, found among those that it was in before."""

from __future__ import annotations

import socket
from pathlib import Path

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


def test_stores_are_named_in_a_file(tmp_path: Path) -> None:
    assert spare.read_addresses(None) == ([], None)
    file = tmp_path / "run.stores"
    assert spare.read_addresses(file) == ([], None)
    spare.write_addresses(file, ["a:1", "::1:2"], "f00d")
    assert spare.read_addresses(file) == (["a:1", "::1:2"], "f00d")
    assert list(tmp_path.iterdir()) == [file]

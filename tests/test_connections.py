"""What connections take ahead of the wire, and which of them belong to a run."""

from __future__ import annotations

import socket
import sys
import threading

import pytest
import runs
import torch
import torch.distributed as dist

from decentlam.exchange.connections import (
    UNSENT_BYTES,
    between_processes,
    limit_ahead,
    limit_unsent,
    of_this_process,
    restore,
)
from decentlam.exchange.network import connect

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells and sets them")
AHEAD = 1 << 17


def unsent(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


def ahead(connection: socket.socket) -> int:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def send_through(client: socket.socket, other: socket.socket, size: int) -> None:
    """All of a message arrives."""
    sending = threading.Thread(target=client.sendall, args=(bytes(size),))
    sending.start()
    received = 0
    while received < size:
        received += len(other.recv(1 << 20))
    sending.join()


def test_connections_take_little_ahead_of_the_wire_until_they_are_let_go() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as other,
        socket.socket(socket.AF_UNIX),
    ):
        before = unsent(client)
        files = of_this_process().values()
        assert {client.fileno(), other.fileno()} <= set(files)
        assert server.fileno() not in files  # it listens, and sends nothing
        both = [client.fileno(), other.fileno()]
        socket.setdefaulttimeout(7.0)
        try:
            assert limit_unsent(both) == limit_ahead(both, AHEAD) == 2
        finally:
            socket.setdefaulttimeout(None)
        assert unsent(client) == unsent(other) == UNSENT_BYTES
        assert ahead(client) == ahead(other) == AHEAD
        assert client.getblocking() and client.gettimeout() is None
        send_through(client, other, 8 * UNSENT_BYTES)
        assert ahead(client) == AHEAD
        restore(both)
        assert unsent(client) == before
        send_through(client, other, 64 * UNSENT_BYTES)
        assert ahead(client) > AHEAD  # Linux lets it grow again


def test_what_is_usual_or_cannot_be_had_is_not_asked_for() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        before = ahead(client)
        assert limit_ahead([client.fileno()], 1 << 22) == 0
        assert ahead(client) == before


def connected(address: tuple[str, int]) -> tuple[bool, int]:
    """Whether a script's own connection is seen, and how many are between machines."""
    peer = 1 - dist.get_rank()
    works = [dist.irecv(torch.empty(1), peer), dist.isend(torch.zeros(1), peer)]
    for work in works:
        assert work is not None
        work.wait()
    with socket.create_connection(address) as own:
        files = of_this_process().values()
        found = between_processes(connect())
        dist.barrier()
        return own.fileno() in files and len(files) > 1, len(found)


def test_connections_of_one_machine_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcomes = runs.run_processes(connected, 2, (server.getsockname(),))
    assert outcomes == [(True, 0)] * 2

"""Joining the process group that a launcher described."""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from decentlam import late
from decentlam.launch.place import find_place, in_batch_script, meeting_point

log = logging.getLogger(__name__)

_ELSEWHERE = "203.0.113.1"  # reserved for documentation (RFC 5737); nothing is ever sent to it
_SIOCGIFADDR = 0x8915


def init(backend: str | None = None, timeout_seconds: float = 1800.0) -> None:
    """Joins the process group that the launcher described; does nothing if already joined.

    The backend is NCCL when the process has a GPU, else gloo. mpirun and srun do not say where
    process 0 listens: MASTER_ADDR and MASTER_PORT are read, or worked out for one host and for
    SLURM. Between hosts gloo uses the network that leads to MASTER_ADDR, unless
    GLOO_SOCKET_IFNAME names another. The group is left when the process ends.
    """
    if dist.is_initialized():
        return
    place = find_place()
    if place is None:
        raise RuntimeError(
            "no launcher found: neither torchrun (RANK, WORLD_SIZE), mpirun nor srun set the "
            "environment. Start with `python -m decentlam.launch -n 4 script.py`, with torchrun, "
            "or from Python with decentlam.launch(fn, nodes=4)."
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "nccl" in backend:
        use_device(place.local_rank)
    host, port = meeting_point(place)
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))
    choose_interface(host, place.one_host)
    try:
        dist.init_process_group(
            backend,
            rank=place.rank,
            world_size=place.num_processes,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"process {place.rank} of {place.num_processes}, started by {place.launcher}, could "
            f"not join the others at {host}:{port} (MASTER_ADDR:MASTER_PORT; process 0 listens "
            f"there): {error}"
        ) from error
    atexit.register(_leave)


def init_if_launched(device: torch.device) -> None:
    """Joins the launcher's process group if the script did not: nobody trains alone unawares."""
    if not dist.is_available() or dist.is_initialized():
        return
    place = find_place()
    if place is None and in_batch_script(os.environ) and os.environ.get("SLURM_NTASKS", "1") != "1":
        log.warning(
            "running as one node: the job has %s tasks, but this process was not started by srun",
            os.environ["SLURM_NTASKS"],
        )
    if place is None or place.num_processes == 1:
        return
    log.info("joining %d processes started by %s", place.num_processes, place.launcher)
    init("nccl" if device.type == "cuda" else "gloo")


def _leave() -> None:
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            late.finish_all()  # neighbors may still wait for this process's last messages
        dist.destroy_process_group()


def use_device(local_rank: int) -> None:
    """Gives each process of a host its own GPU, in turn."""
    if not torch.cuda.device_count():
        raise RuntimeError("the nccl backend needs a GPU, and torch sees none; use backend='gloo'")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())


def choose_interface(host: str, one_host: bool | None) -> None:
    """Tells gloo which network to use, if the user did not.

    Left alone, gloo listens at the address the machine's own name stands for. Where that is
    127.0.0.1 or 127.0.1.1, as in many /etc/hosts, no other machine can reach it.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = _address_towards(host)
    if address is not None and ipaddress.ip_address(address).is_loopback and one_host is False:
        address = _address_towards(_ELSEWHERE)  # the name of process 0's host, on that very host
    name = None if address is None else _interface_of(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_towards(host: str) -> str | None:
    """This machine's address on the way to `host`; connecting a UDP socket sends nothing."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interface_of(address: str) -> str | None:
    """The network interface that has this address; None if that cannot be found out."""
    if not sys.platform.startswith("linux"):
        return None
    if ":" in address:
        wanted = ipaddress.IPv6Address(address.partition("%")[0]).exploded.replace(":", "")
        rows = Path("/proc/net/if_inet6").read_text().splitlines()
        return next((row.split()[-1] for row in rows if row.split()[0] == wanted), None)
    import fcntl  # not on every platform

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None

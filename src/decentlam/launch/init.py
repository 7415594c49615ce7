"""Joining the process group that a launcher described."""

from __future__ import annotations

import atexit
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

from decentlam.elastic import membership, spare_stores
from decentlam.elastic.membership import Membership
from decentlam.errors import LaunchError, RunOverError
from decentlam.launch.environment import (
    LAUNCHED,
    LOOPBACK,
    LaunchedProcess,
    in_batch_script,
    launched_process,
    meeting_point,
)
from decentlam.network import groups, heartbeat
from decentlam.network.network import can_form_lazily, exchange_errors
from decentlam.network.store import ask, open_store, within

log = logging.getLogger(__name__)

_NO_GPU = "none"
_ELSEWHERE = "203.0.113.1"  # reserved for documentation (RFC 5737); nothing is ever sent to it
_GRACE_SECONDS = 5.0  # for torch to give up by itself
_FORM_SECONDS = 60.0  # to connect processes that are all there
_SIOCGIFADDR = 0x8915
BOTH = "cpu:gloo,cuda:nccl"  # each tensor travels by what fits the process where it is
_CURES = {
    "EADDRINUSE": "Set another MASTER_PORT, or end what listens on this one",
    "Unable to find address for": "GLOO_SOCKET_IFNAME must name an interface of this host",
}


def init(
    backend: str | None = None,
    timeout_seconds: float = 1800.0,
    *,
    join_seconds: float = 300.0,
    elastic: bool = False,
) -> None:
    """Join the process group of torchrun, mpirun or srun. Does nothing if already joined.

    The backend is `cpu:gloo,cuda:nccl` if every process has its own GPU, and gloo otherwise.
    Process 0 listens at MASTER_ADDR and MASTER_PORT, which have defaults for mpirun on one host and
    for SLURM. Between hosts gloo uses the network that leads to MASTER_ADDR, unless
    GLOO_SOCKET_IFNAME names another. The process leaves the group when Python exits. Call `leave`
    before `os._exit`.

    `timeout_seconds` is the limit of the group's collectives. `join_seconds`, if shorter, is the
    limit for reaching process 0 and for the last process to join.

    With `elastic` (gloo only) a process may also start while the others train, and joins them. An
    optimizer with `elastic=True` then rebuilds the group in `step()` whenever members change.
    """
    if not dist.is_initialized():
        _join(backend, None, timeout_seconds, join_seconds, elastic)


def _join(
    backend: str | None,
    device: torch.device | None,
    timeout_seconds: float = 1800.0,
    join_seconds: float = 300.0,
    elastic: bool = False,
) -> None:
    """Do as `init`; `device` is the GPU of this process, if that is known already."""
    process = launched_process()
    if process is None:
        raise RuntimeError(
            "no launcher found: neither torchrun (RANK, WORLD_SIZE), mpirun nor srun set the "
            "environment. Start with `torchrun --nproc-per-node 4 script.py`, or from Python with "
            "decentlam.launch(fn, nodes=4)."
        )
    if elastic:
        backend = backend or "gloo"
        if backend != "gloo":
            raise ValueError(f"elastic runs need the gloo backend, got {backend!r}")
    if backend is not None and "nccl" in backend and not torch.cuda.device_count():
        raise RuntimeError("the nccl backend needs a GPU, and torch sees none; use backend='gloo'")
    device = device or _own_device(process)
    host, port = meeting_point(process)
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))
    _choose_interface(host, process.one_host)
    wait = min(timeout_seconds, join_seconds)
    try:
        if elastic:
            _enter(process, host, timeout_seconds, wait)
        else:
            _form(backend, device, process, timeout_seconds, wait)
    except RunOverError:
        raise
    except RuntimeError as error:
        cure = "".join(f". {text}" for words, text in _CURES.items() if words in str(error))
        raise LaunchError(
            f"process {process.rank} of {process.num_processes}, started by {process.launcher}, "
            f"could not join the others at {host}:{port} (MASTER_ADDR:MASTER_PORT; process 0 or "
            f"the launcher listens there): {error}{cure}"
        ) from error
    atexit.register(leave)


def _store(process: LaunchedProcess, wait: float) -> dist.Store:
    """Return the launcher's store, or that of process 0. torch's own limit does not hold
    when the link goes down, or whoever listens is stopped, after the connection was made."""
    # Told their number, process 0 would wait in torch until all have connected, and notice nobody's
    # end meanwhile. The heartbeat waits for them instead.
    where = f"env://?rank={process.rank}&world_size=-1"

    def rendezvous() -> dist.Store:
        store: dist.Store | None = _own_store(process, wait)
        if store is not None:
            return store
        store, *_ = next(iter(dist.rendezvous(where, timeout=timedelta(seconds=wait))))
        return store

    store = within(wait + _GRACE_SECONDS, ask(rendezvous), "whoever listens there")
    # torchrun's store still has what the processes said before it started them again.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return store if attempt == "0" else dist.PrefixStore(f"attempt {attempt}", store)


def _own_store(process: LaunchedProcess, wait: float) -> dist.Store | None:
    """Open the store of process 0, at MASTER_ADDR only: torch's listens everywhere. Return None if
    torch is to open it.

    A host's name may stand for another address on other hosts, and MASTER_ADDR for one that only
    leads here.
    """
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if process.rank != 0 or by_launcher:
        return None
    try:
        address = ipaddress.ip_address(LOOPBACK if host == "localhost" else host)
        store = open_store(str(address), int(port))
    except (ValueError, OSError):  # a name; not of this machine, or in use, as torch will say
        return None
    store.set_timeout(timedelta(seconds=wait))
    return store


def _enter(process: LaunchedProcess, host: str, timeout_seconds: float, wait: float) -> None:
    """Join an elastic run: that which DECENTLAM_STORES leads to, if its members can be reached."""
    notes, address = None, None
    if LAUNCHED not in os.environ:  # else all end with the store, and the shell's is of another run
        notes, address = os.environ.get("DECENTLAM_STORES"), own_address(host, process.one_host)
    file = Path(notes) if notes else None
    addresses, run = spare_stores.read_addresses(file)
    store = spare_stores.find_run(addresses, wait, run) or _store(process, wait)
    size = process.num_processes
    member = Membership(store, process.rank, size, timeout_seconds, wait, address, file)
    membership.begin(member)


def _own_device(process: LaunchedProcess) -> torch.device | None:
    """Return the GPU of this process: those of a host are dealt one after the other."""
    count = torch.cuda.device_count()
    return torch.device("cuda", process.local_rank % count) if count else None


def _usual_backend(store: dist.Store, device: torch.device | None, process: LaunchedProcess) -> str:
    """Return the same on all processes. NCCL needs a GPU for each of them, and launchers may show
    every process one GPU, its own or the same one: only the GPUs' own numbers tell."""
    mine = _NO_GPU if device is None else str(torch.cuda.get_device_properties(device).uuid)
    store = dist.PrefixStore("decentlam gpu", store)
    store.set(str(process.rank), mine)
    if device is None:
        return "gloo"
    ranks = [str(rank) for rank in range(process.num_processes)]
    with exchange_errors(f"process {process.rank}, at the start", "everyone"):
        store.wait(ranks)
        gpus = {gpu.decode() for gpu in store.multi_get(ranks)}
    if len(gpus) == len(ranks) and _NO_GPU not in gpus:
        return BOTH
    log.info("backend gloo, for CPUs: NCCL needs a GPU for each process")
    return "gloo"


def _form(
    backend: str | None,
    device: torch.device | None,
    process: LaunchedProcess,
    timeout_seconds: float,
    wait: float,
) -> None:
    """Form the group of all processes. Once a process has found the store, the others
    notice if it is lost."""
    store = _store(process, wait)
    inner = dist.PrefixStore("decentlam start", store)
    watching = heartbeat.start(inner, process.rank, range(process.num_processes))
    watching.wait_until_all_are_seen(wait)
    backend = backend or _usual_backend(store, device, process)
    if "nccl" in backend:
        assert device is not None
        torch.cuda.set_device(device)
    # Left alone, NCCL takes its GPU by LOCAL_RANK, which mpirun and srun do not set. Before torch
    # could form groups lazily it took that of the tensors, and a group with a GPU of its own would
    # be split by all processes whenever some of them form another.
    bound = device if "nccl" in backend and can_form_lazily() else None
    is_gloo = backend == "gloo"
    if is_gloo:  # threads of NCCL use the store, without Python's lock
        store = watching.group_store("group")
    limit = min(timeout_seconds, _FORM_SECONDS) if is_gloo else timeout_seconds
    with exchange_errors(f"process {process.rank}, at the start", "everyone"):
        dist.init_process_group(
            backend,
            store=store,
            rank=process.rank,
            world_size=process.num_processes,
            timeout=timedelta(seconds=limit),
            device_id=bound,
        )
    if is_gloo:
        assert dist.group.WORLD is not None
        groups.set_timeout(dist.group.WORLD, timeout_seconds)
    heartbeat.watches_default_group(watching)


def init_if_launched(device: torch.device, elastic: bool = False) -> None:
    """Join the launcher's process group if the script did not: nobody trains alone unawares."""
    if not dist.is_available() or dist.is_initialized():
        return
    process = launched_process()
    if (
        process is None
        and in_batch_script(os.environ)
        and os.environ.get("SLURM_NTASKS", "1") != "1"
    ):
        log.warning(
            "running as one node: the job has %s tasks, but this process was not started by srun",
            os.environ["SLURM_NTASKS"],
        )
    if process is None or process.num_processes == 1:
        return
    log.info("joining %d processes started by %s", process.num_processes, process.launcher)
    on_gpu = device.type == "cuda" and not elastic
    _join(BOTH if on_gpu else "gloo", device if on_gpu else None, elastic=elastic)


def leave() -> None:
    """Leave the group, so that the others do not report this process as lost.

    Python does so when it exits. Call it before `os._exit`.
    """
    # An error has ended the script, or somebody is gone: NCCL would wait for all of them.
    alone = hasattr(sys, "last_value") or heartbeat.interrupted()
    heartbeat.stop()
    groups.destroy_default_group(alone)


def _choose_interface(host: str, one_host: bool | None) -> None:
    """Tell gloo which network to use, if the user did not.

    Left alone, gloo listens at the address the machine's own name stands for. Where that is
    127.0.0.1 or 127.0.1.1, as in many /etc/hosts, no other machine can reach it.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = own_address(host, one_host)
    name = None if address is None else _interface_of(address)
    if name is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def own_address(host: str, one_host: bool | None) -> str | None:
    """Return this machine's address, as the others reach it."""
    address = _address_towards(host)
    if address is not None and ipaddress.ip_address(address).is_loopback and one_host is False:
        return _address_towards(_ELSEWHERE)  # the name of process 0's host, on that very host
    return address


def _address_towards(host: str) -> str | None:
    """Return this machine's address towards `host`; connecting a UDP socket sends nothing."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _interface_of(address: str) -> str | None:
    """Return the network interface that has this IPv4 address; None if that cannot be found out."""
    if not sys.platform.startswith("linux"):
        return None
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

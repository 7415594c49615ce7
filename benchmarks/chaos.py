"""Elastic runs under faults: processes are killed and stopped, links are cut, newcomers join.

    python benchmarks/chaos.py                      # one run of 8 processes
    python benchmarks/chaos.py --runs 100 --out out/chaos.json   # goes on where it was stopped

Each run has a seed, from which its faults (kind, rank, step, phase) follow. In every third run
process 0 has the store, and whoever has it may be killed, stopped or cut off, too; in every fifth a
process is killed while it builds its optimizer. Every few steps all do something together: they
measure their distance, average or save. With root and `ip` every process is in a network namespace
and links can be cut; else all are on loopback. At the end of a run: nobody hangs, those who are
left are near the solution, their parameters are those of a simulation with the same members and the
same interrupted steps, no sample was lost but those of the batch that a process was lost with, and
nobody stood still for more than two heartbeats but who was stopped or cut off itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import decentlam
from decentlam.data import Change, Deal, Place
from decentlam.elastic.membership import current
from decentlam.errors import ExchangeError, LaunchError, MinorityError, RunOverError
from decentlam.lab.network.hosts import INTERFACE, Host, hosts, unavailable

Note = Callable[..., None]
TOGETHER = "in something that all do together"
BUILDS = "while its optimizer is built"
PHASES = ("before backward", "in backward", "before step", "in the exchange")
SIZES = (6, 5, 4, 3, 2)  # of the parameters
SAMPLES, BATCH, LR, MOMENTUM = 400, 4, 0.02, 0.8
TOGETHER_STEPS = 5  # between two things that all do together
COLLECTIVES = 5  # of those in which an optimizer is built one is the last of a victim
PACE_SECONDS = 0.03  # a step takes at least this long: who comes back should find the others
BACK_SECONDS = 4.0  # after which a process that was stopped or cut off is let go on
STORE_BACK_SECONDS = 14.0  # the same where it may have the store, which may be silent for longer
COME_SECONDS = 10.0  # in which a process that is started again must have found the others
ANYONE = -1  # the rank of a fault that strikes whoever has the store
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_SLAVE = 0x20000, 4096, 16384, 1 << 19  # of Linux


@dataclass(frozen=True)
class Fault:
    kind: str  # kill, stop, cut, store
    rank: int
    step: int  # of BUILDS: -1 - the number of collectives before
    phase: str


def in_member(seed: int) -> bool:
    """Whether the store is in process 0, as under srun, and not in one that does not train."""
    return seed % 3 == 1


def schedule(seed: int, nodes: int, steps: int, faults: int, cuts: bool) -> list[Fault]:
    """One fault for each of some ranks, far enough apart to be told apart."""
    draw = random.Random(seed)
    kinds = ["kill", "kill", "stop", *(["cut"] if cuts else [])]
    kinds += ["store"] * len(kinds) if in_member(seed) else []
    gap, found = steps // (faults + 1), []
    for k, rank in enumerate(draw.sample(range(nodes), faults)):
        kind, step = draw.choice(kinds), (k + 1) * gap + draw.randrange(gap // 2)
        found.append(Fault(kind, ANYONE if kind == "store" else rank, step, draw.choice(PHASES)))
    more = random.Random(f"{seed} more")
    found = [replace(f, phase=TOGETHER) if more.random() < 0.25 else f for f in found]
    if seed % 5 == 4:
        rest = sorted(set(range(nodes)) - {f.rank for f in found})
        found.append(Fault("kill", more.choice(rest), -1 - more.randrange(COLLECTIVES), BUILDS))
    return found


# The problem: least squares -----------------------------------------------------------------------


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    a = torch.randn(SAMPLES, sum(SIZES), generator=generator, dtype=torch.float64)
    x = torch.randn(sum(SIZES), generator=generator, dtype=torch.float64)
    return a, a @ x + 0.1 * torch.randn(SAMPLES, generator=generator, dtype=torch.float64)


class Pieces(nn.Module):
    """A vector in several parameters, so that there are several messages."""

    def __init__(self) -> None:
        super().__init__()
        zeros = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        self.pieces = nn.ParameterList(zeros)
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, a: Tensor, y: Tensor) -> Tensor:
        self.batches += 1
        return 0.5 * (a @ torch.cat(list(self.pieces)) - y).square().mean()

    def flat(self) -> Tensor:
        return torch.cat([p.detach().clone() for p in self.pieces])


# One process --------------------------------------------------------------------------------------


def node(
    rank: int, size: int, meeting: dict[str, str], namespace: str | None, out: str, steps: int,
    faults: dict[int, Fault], options: dict[str, Any],
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    if namespace is not None:
        _enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(size if namespace is None else 1), **meeting,
    }  # fmt: skip
    log = open(out, "a", buffering=1)  # noqa: SIM115
    sys.stderr = log

    def note(event: str, **values: Any) -> None:
        line = {"event": event, "rank": rank, "at": time.monotonic(), **values}
        log.write(json.dumps(line) + "\n")

    note("started")
    try:
        train(Path(out).parent / "checkpoint", steps, faults, options, note)
    except (RunOverError, MinorityError, LaunchError) as error:
        note("late", kind=type(error).__name__, why=str(error))


def train(
    saves: Path, steps: int, faults: dict[int, Fault], options: dict[str, Any], note: Note
) -> None:
    decentlam.init(timeout_seconds=120.0, join_seconds=60.0, elastic=True)
    for fault in faults.values():
        if fault.phase == BUILDS:
            _die_in_collective(-1 - fault.step, partial(_suffer, fault, note))
    a, y = data()
    model, deal = Pieces(), Deal(SAMPLES, BATCH)
    optimizer = decentlam.DecentLaM(
        model.parameters(), lr=LR, momentum=MOMENTUM, elastic=True, model=model, bucket_bytes=48,
        timeout_seconds=120.0, **options,
    )  # fmt: skip
    run = current()
    assert run is not None
    generation = run.generation.number
    noticed, formed = run.changed_at
    note("began", id=run.me, generation=run.generation.as_json(), noticed=noticed, formed=formed)
    waiting: Fault | None = None  # for the next thing that all do together
    while (step := optimizer.runtime.index) < steps:
        place = optimizer.place
        indices = deal.indices(place)
        position = deal.position(place)
        number = len(place.history) - 1
        note("step", id=run.me, step=step, position=position, generation=number)
        fault = faults.get(step)
        if fault is not None and fault.kind == "store" and not run.hosts_store:
            fault = None
        optimizer.zero_grad()
        loss = model(a[indices], y[indices])
        if fault is not None:
            _strike(fault, model, note)
        loss.backward()
        if fault is not None and fault.phase == "before step":
            _suffer(fault, note)
        if fault is not None and fault.phase == "in the exchange":
            threading.Timer(0.001, _suffer, (fault, note)).start()
        if fault is not None and fault.phase == TOGETHER:
            waiting = fault
        single = optimizer.network.num_nodes == 1
        optimizer.step()
        time.sleep(PACE_SECONDS)
        note("stepped", id=run.me, step=step, alone=single or optimizer.statistics.alone)
        if run.generation.number != generation:
            generation = run.generation.number
            noticed, formed = run.changed_at
            note("changed", id=run.me, generation=run.generation.as_json(), noticed=noticed,
                 formed=formed, step=optimizer.runtime.index)  # fmt: skip
        number, rest = divmod(optimizer.place.step, TOGETHER_STEPS)
        if rest == 0:
            if waiting is not None:
                threading.Timer(0.001, _suffer, (waiting, note)).start()
                waiting = None
            done = "left out"
            with contextlib.suppress(ExchangeError):
                done = together(number, saves, model, optimizer)
            note("together", id=run.me, step=optimizer.place.step, done=done)
    note("ended", id=run.me, x=model.flat().tolist(), step=optimizer.runtime.index,
         batches=int(model.batches))  # fmt: skip


def together(
    number: int, saves: Path, model: Pieces, optimizer: decentlam.DecentralizedOptimizer
) -> str:
    """Does what all members do, one after the other of three things."""
    if number % 3 == 0:
        decentlam.save_checkpoint(saves, model=model, optimizer=optimizer)
        return "saved"
    if number % 3 == 1:
        optimizer.consensus_distance()
        return "measured"
    with optimizer.averaged(model):
        return "averaged"


def _die_in_collective(number: int, die: Callable[[], None]) -> None:
    """At the end of so many gathers of all members."""
    gather, left = dist.all_gather, number

    def all_gather(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if left == 0:
            die()
        left -= 1
        return gather(*arguments, **options)

    dist.all_gather = all_gather


def _enter(namespace: str) -> None:
    """As `ip netns exec` does: the network, and the names that the host knows."""
    libc = ctypes.CDLL(None, use_errno=True)

    def done(code: int) -> None:
        if code != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")

    with open(f"/var/run/netns/{namespace}") as file:
        done(libc.setns(file.fileno(), 0))
    done(libc.unshare(_CLONE_NEWNS))
    done(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None))
    for name in ("hosts", "resolv.conf"):
        its = f"/etc/netns/{namespace}/{name}".encode()
        done(libc.mount(its, f"/etc/{name}".encode(), None, _MS_BIND, None))


def _strike(fault: Fault, model: Pieces, note: Note) -> None:
    if fault.phase == "before backward":
        _suffer(fault, note)
    if fault.phase == "in backward":

        def strike(p: Tensor) -> None:
            handle.remove()
            _suffer(fault, note)

        handle = model.pieces[2].register_post_accumulate_grad_hook(strike)


def _suffer(fault: Fault, note: Note) -> None:
    run = current()
    assert run is not None
    note("fault", id=run.me, kind=fault.kind, step=fault.step, phase=fault.phase)
    if fault.kind != "cut":  # the link is cut by who reads this
        os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)


def _serve(namespace: str | None, pipe: Any, only_port: bool) -> None:
    """The store of the run; or a free port, where a process that trains will open it."""
    if namespace is not None:
        _enter(namespace)
    if only_port:
        with socket.create_server(("0.0.0.0", 0)) as free:
            pipe.send(free.getsockname()[1])
        return
    store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        time.sleep(60)


# One run ------------------------------------------------------------------------------------------


def run(
    seed: int, nodes: int, steps: int, faults: list[Fault], places: list[Host] | None,
    options: dict[str, Any], limit: float = 400.0,
) -> dict[str, Any]:  # fmt: skip
    """Starts the processes, lets the faults happen, restarts who was killed; what they wrote."""
    context = multiprocessing.get_context("fork")
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    store = places[0 if in_member(seed) else -1] if places else None
    here, there = context.Pipe(duplex=False)
    server = context.Process(
        target=_serve, args=(store.namespace if store else None, there, in_member(seed))
    )
    server.start()
    meeting = {"MASTER_ADDR": store.address if store else "127.0.0.1"}
    meeting |= {"MASTER_PORT": str(here.recv())}
    meeting |= {} if in_member(seed) else {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with tempfile.TemporaryDirectory() as directory:
        outs = [Path(directory) / f"{rank}.jsonl" for rank in range(nodes)]
        meeting["DECENTLAM_STORES"] = f"{directory}/stores"

        def start(rank: int, its: dict[int, Fault]) -> BaseProcess:
            space = places[rank].namespace if places else None
            arguments = (rank, nodes, meeting, space, str(outs[rank]), steps, its, options)
            process = context.Process(target=node, args=arguments)
            process.start()
            return process

        anyones = {f.step: f for f in faults if f.rank == ANYONE}
        living = [
            start(r, anyones | {f.step: f for f in faults if f.rank == r}) for r in range(nodes)
        ]
        everyone = list(living)
        began, waiting, seen = time.monotonic(), list[tuple[float, Any]](), set[Any]()
        codes: list[int | None] = []
        try:
            while (
                waiting or any(p.is_alive() for p in living)
            ) and time.monotonic() < began + limit:
                time.sleep(0.1)
                for event in _events(outs):
                    if event["event"] == "fault" and event["at"] not in seen:
                        seen.add(event["at"])
                        back = STORE_BACK_SECONDS if in_member(seed) else BACK_SECONDS
                        waiting += _answer(event, living, places, back)
                for due, act in [w for w in waiting if w[0] < time.monotonic()]:
                    waiting.remove((due, act))
                    if isinstance(act, int):  # a process to start again
                        living[act] = start(act, anyones)
                        everyone.append(living[act])
                    else:
                        act()
            codes = [p.exitcode for p in living]
        finally:
            for process in [*everyone, server]:
                process.kill()
                process.join()
        texts = [out.read_text() for out in outs]
        events = sorted(_events(outs), key=lambda event: event["at"])
    left = (set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()) - before
    pids = {str(process.pid) for process in everyone}  # others use this directory, too
    left = {name for name in left if pids & set(re.findall(r"\d+", name))}
    errors = [line for text in texts for line in text.splitlines() if not line.startswith("{")]
    return {
        "seed": seed,
        "events": events,
        "codes": codes,
        "errors": errors,
        "memory": sorted(left),
    }


def _answer(
    event: dict[str, Any], living: list[BaseProcess], places: list[Host] | None, back: float
) -> list[tuple[float, Any]]:
    rank, now = event["rank"], time.monotonic()
    if event["kind"] in ("kill", "store"):
        return [(now + 0.3, rank)]
    if event["kind"] == "stop":
        pid = living[rank].pid
        assert pid is not None
        return [(now + back, lambda: os.kill(pid, signal.SIGCONT))]
    assert places is not None
    _link(places[rank], "down")
    return [(now + back, lambda: _link(places[rank], "up"))]


def _link(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.namespace, "link", "set", INTERFACE, state], check=True)


def _events(outs: list[Path]) -> list[dict[str, Any]]:
    found = []
    for out in outs:
        for line in out.read_text().splitlines() if out.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [event for event in found if isinstance(event, dict)]


# Checks -------------------------------------------------------------------------------------------


def check(result: dict[str, Any], steps: int, heartbeat: float) -> list[str]:
    """What is wrong with a run; nothing, if it survived."""
    events = result["events"]
    ended = {
        e["id"]: torch.tensor(e["x"], dtype=torch.float64) for e in events if e["event"] == "ended"
    }
    wrong = [f"exit codes {result['codes']}"] if any(c != 0 for c in result["codes"]) else []
    wrong += [f"left in /dev/shm: {result['memory']}"] if result["memory"] else []
    struck = {e["rank"] for e in events if e["event"] == "fault"}
    end = min((e["at"] for e in events if e["event"] == "ended"), default=0.0)
    started = {e["rank"]: e["at"] for e in events if e["event"] == "started"}
    for e in (e for e in events if e["event"] == "late"):  # the others must have ended before
        late = e["kind"] != "LaunchError" or started[e["rank"]] > end - COME_SECONDS
        if e["rank"] not in struck or e["at"] < end or not late:
            wrong.append(f"process {e['rank']} gave up: {e['why']}")
    if len(ended) < 2:
        return [*wrong, f"only {len(ended)} came to the end"]
    simulated = simulate(events, steps)
    worst = max((ended[m] - simulated[m]).abs().max().item() for m in ended)
    if not worst < 1e-9:
        wrong.append(f"parameters differ by {worst:.2e} from the simulation")
    a, y = data()
    best = torch.linalg.lstsq(a, y[:, None]).solution[:, 0]
    for member, x in ended.items():
        if (x - best).norm() > 0.3:
            wrong.append(f"process {member} is {(x - best).norm():.3f} from the solution")
    lost = lost_samples(events)
    if lost:
        wrong.append(f"batches lost: {lost}")
    if (longest := pause(events)) > 2 * heartbeat:
        wrong.append(f"somebody stood still for {longest:.1f} s")
    return wrong


def pause(events: list[dict[str, Any]]) -> float:
    """The longest time between two steps of a process that nothing has befallen meanwhile."""
    longest, last, struck = 0.0, dict[int, float](), set[int]()
    for e in events:
        if e["event"] == "fault":
            struck.add(e["id"])
        elif e["event"] == "stepped" and e["id"] not in struck:
            longest = max(longest, e["at"] - last.get(e["id"], e["at"]))
        if e["event"] == "changed":  # it is back
            struck.discard(e["id"])
        if e["event"] in ("began", "stepped", "changed"):
            last[e["id"]] = e["at"]
    return longest


def generations_of(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    texts = [e["generation"] for e in events if e["event"] in ("began", "changed")]
    return {g["number"]: g for g in map(json.loads, texts)}


def simulate(events: list[dict[str, Any]], steps: int) -> dict[int, Tensor]:
    """The parameters of every member, from who took part in which step, and alone or not."""
    a, y = data()
    deal = Deal(SAMPLES, BATCH)
    generations = generations_of(events)
    took = {(e["id"], e["step"]): e for e in events if e["event"] == "step"}
    alone = {(e["id"], e["step"]): e["alone"] for e in events if e["event"] == "stepped"}
    zero = torch.zeros(sum(SIZES), dtype=torch.float64)
    first = generations[min(generations)]  # the others were interrupted before a step
    state = {m: (zero.clone(), zero.clone()) for m in first["members"]}
    for step in range(steps + 1):  # somebody may join when all have ended
        for g in generations.values():
            if g["number"] > first["number"] and g["step"] == step:
                for taker in g["takers"]:
                    state[taker] = tuple(t.clone() for t in state[g["source"]])  # type: ignore[assignment]
        messages = {}
        for (member, k), event in took.items():
            if k == step and member in state:
                rows = deal.batch_at(event["position"])
                x, _ = state[member]
                g = a[rows].T @ (a[rows] @ x - y[rows]) / BATCH
                messages[member] = x - LR * g
        for member in list(messages):
            if (member, step) not in alone:
                continue
            x, v = state[member]
            members = generations[took[member, step]["generation"]]["members"]
            mixed = messages[member].clone()
            if not alone[member, step]:
                row = decentlam.topology.ring(len(members)).row(members.index(member), step)
                mixed = sum(w * messages[members[j]] for j, w in row.items())  # type: ignore[assignment]
            v.mul_(MOMENTUM).add_(x - mixed)
            x.sub_(v)
    return {m: x for m, (x, _) in state.items()}


def lost_samples(events: list[dict[str, Any]]) -> list[int]:
    """Return the batches that nobody finished, except those in which a process was lost and those
    that somebody skipped just when the run ended: there was no step left in which to deal them."""
    begun = {e["position"] for e in events if e["event"] == "step"}
    done = {(e["id"], e["step"]) for e in events if e["event"] == "stepped"}
    finished = {
        e["position"] for e in events if e["event"] == "step" and (e["id"], e["step"]) in done
    }
    last = _last_steps(events)
    end = min(e["position"] for e in last)
    generations = generations_of(events)
    final = generations[max(generations)]
    skipped = [step for step, _ in final["history"][-1]["skipped"]]
    if skipped and final["step"] > last[0]["step"]:
        before = [e for e in events if e["event"] == "step" and e["step"] == min(skipped) - 1]
        end = min(end, BATCH + max(e["position"] for e in before))
    return [p for p in range(0, end, BATCH) if p not in begun | finished]


def _last_steps(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    taken = [e for e in events if e["event"] == "step"]
    last = max(e["step"] for e in taken)
    return [e for e in taken if e["step"] == last]


def repeated(events: list[dict[str, Any]]) -> int:
    """Steps that a process finished more than once."""
    done = [(e["id"], e["step"]) for e in events if e["event"] == "stepped"]
    return len(done) - len(set(done))


def times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For every fault: when the first of the others noticed, and when the last went on."""
    found = []
    for fault in (e for e in events if e["event"] == "fault"):
        victim = fault["id"]
        after = [
            e for e in events
            if e["event"] in ("began", "changed") and e["noticed"] > fault["at"]
            and victim not in json.loads(e["generation"])["members"]
        ]  # fmt: skip
        if after:
            first = min(json.loads(e["generation"])["number"] for e in after)
            changed = [e for e in after if json.loads(e["generation"])["number"] == first]
            skipped = json.loads(changed[0]["generation"])["history"][-1]["skipped"]
            found.append({
                "kind": fault["kind"], "phase": fault["phase"],
                "noticed": min(e["noticed"] for e in changed) - fault["at"],
                "went on": max(e["formed"] for e in changed) - fault["at"],
                "skipped": len(skipped),
            })  # fmt: skip
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--heartbeat", type=float, default=3.0, help="seconds (default 3)")
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no cut links")
    parser.add_argument("--out", type=Path, help="a JSON file; seeds that it has are skipped")
    arguments = parser.parse_args(words)
    prepare()
    why = "asked for" if arguments.loopback else unavailable()
    if why is not None:
        print(f"on loopback ({why}): no links are cut", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())
    known = {row["seed"] for row in rows}
    seeds = range(arguments.seed, arguments.seed + arguments.runs)
    with contextlib.ExitStack() as stack:
        places = None if why is not None else stack.enter_context(hosts(arguments.nodes + 1))
        for seed in (s for s in seeds if s not in known):
            faults = schedule(
                seed, arguments.nodes, arguments.steps, arguments.faults, places is not None
            )
            options = {"topology": "ring", "overlap": seed % 2 == 0,
                       "shared_memory": places is None and seed % 4 < 2,
                       "heartbeat_seconds": arguments.heartbeat}  # fmt: skip
            result = run(seed, arguments.nodes, arguments.steps, faults, places, options)
            try:
                wrong = check(result, arguments.steps, arguments.heartbeat)
            except Exception as error:
                wrong = [f"could not be checked: {error!r}"]
            row = {"seed": seed, "wrong": wrong, "faults": times(result["events"])}
            left_out = sum(e.get("done") == "left out" for e in result["events"])
            rows.append(row | {
                "repeated": repeated(result["events"]), "pause": pause(result["events"]),
                "left out": left_out, "load": os.getloadavg()[0],
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
            for line in result["errors"] if wrong else ():
                print("   ", line, flush=True)
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                draft = arguments.out.with_suffix(".new")
                draft.write_text(json.dumps(rows, indent=1))
                draft.replace(arguments.out)
                if wrong:
                    events = arguments.out.with_suffix(f".{seed}.json")
                    events.write_text(json.dumps(result["events"]))
    table(rows)
    bad = sum(bool(row["wrong"]) for row in rows)
    print(f"{len(rows) - bad} of {len(rows)} runs passed")
    return 1 if bad else 0


def table(rows: list[dict[str, Any]]) -> None:
    by_kind = collections.defaultdict(list)
    for row in rows:
        for fault in row["faults"]:
            by_kind[fault["kind"]].append(fault)
    print("kind  faults  noticed after s (median, most)  went on after s  steps skipped (sum)")
    for kind, faults in sorted(by_kind.items()):
        columns = []
        for key in ("noticed", "went on"):
            values = sorted(f[key] for f in faults)
            columns.append(f"{values[len(values) // 2]:.2f} {values[-1]:.2f}")
        skipped = sum(f["skipped"] for f in faults)
        print(f"{kind:5} {len(faults):6}  {columns[0]:>30}  {columns[1]:>15}  {skipped:>17}")
    loads = sorted(row["load"] for row in rows)
    print(f"steps repeated: {sum(row['repeated'] for row in rows)}; ", end="")
    print(f"calls left out: {sum(row['left out'] for row in rows)}; ", end="")
    print(f"longest pause: {max(row['pause'] for row in rows):.1f} s; ", end="")
    print(
        f"load of the machine: {loads[len(loads) // 2]:.0f} in the middle, {loads[-1]:.0f} at most"
    )


def prepare() -> None:
    """What takes a process seconds to import is imported before any is forked."""
    import torch._dynamo  # noqa: F401

    decentlam.DecentLaM(Pieces().parameters(), lr=LR)
    place = Place(0, 0, (Change(0, 1),))
    assert len(Deal(SAMPLES, BATCH).indices(place)) == BATCH


if __name__ == "__main__":
    sys.exit(main())

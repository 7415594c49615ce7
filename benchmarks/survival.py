"""The same kills for an elastic run and for DDP under torchrun, which starts everybody again.

    python benchmarks/survival.py                  # 4 processes, 600 steps, 3 of them killed
    python benchmarks/survival.py --named 20       # without elastic: is process 0 named?

Real processes train the perceptron 784-128-128-10 on Fashion-MNIST, four times: DecentLaM on a ring
with elastic=True and DDP, each undisturbed and with processes that are killed (kill -9) when they
come to certain steps for the first time; which ones follows from a seed. DDP runs under
`torchrun --max-restarts`; process 0 saves a checkpoint every few steps, and after a restart all go
on from it. A sleep stands for the rest of a step's computation. Printed are loss and accuracy on
the test set at the end (of the averaged model; DDP has one), seconds from the start of the command
to its end, steps that were taken again, and batches of one process that nobody trained on when the
last step was taken.

With --named process 0, which has the store of a run that is not elastic, is killed (kill -9) at a
random moment, that many times: printed is how many of the others name it in their errors, and the
seconds after which they have ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import decentlam
from decentlam.data import Deal, Place
from decentlam.elastic.membership import Change
from decentlam.errors import ExchangeError
from decentlam.lab.data import load
from decentlam.lab.models import make_model

LR, MOMENTUM, BATCH = 0.05, 0.9, 32


@dataclass(frozen=True)
class Plan:
    nodes: int
    steps: int
    pace: float  # seconds that a step takes besides
    save_every: int  # steps, for DDP
    kills: tuple[tuple[int, int], ...]  # step and rank
    directory: str


class Part:
    """What all kinds of run have in common in one process."""

    def __init__(self, plan: Plan) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.plan, self.data = plan, load("fashion-mnist")
        self.model = make_model("mlp", self.data.shape, self.data.classes, 0)
        self.deal = Deal(len(self.data.labels), BATCH)
        self._log = open(f"{plan.directory}/{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115

    def backward(self, model: nn.Module, place: Place) -> None:
        """A batch; or the end, if this process is to be killed here."""
        generator = torch.Generator().manual_seed(self.deal.position(place))
        x, y = self.data.train_batch(self.deal.indices(place), generator)
        F.cross_entropy(model(x), y).backward()
        time.sleep(self.plan.pace)
        killed = Path(self.plan.directory) / f"killed at {place.step}"
        if (place.step, int(os.environ["RANK"])) in self.plan.kills and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def note(self, **values: Any) -> None:
        self._log.write(json.dumps(values) + "\n")

    @torch.no_grad()
    def score(self) -> None:
        self.model.eval()
        loss, hits = 0.0, 0
        for x, y in self.data.test_batches(2000):
            outputs = self.model(x)
            loss += F.cross_entropy(outputs, y, reduction="sum").item()
            hits += int((outputs.argmax(1) == y).sum())
        self.note(loss=loss / self.data.num_test, accuracy=100 * hits / self.data.num_test)


def elastic(plan: Plan) -> None:
    part = Part(plan)
    optimizer = decentlam.DecentLaM(
        part.model.parameters(), lr=LR, momentum=MOMENTUM, topology="ring", elastic=True,
        model=part.model,
    )  # fmt: skip
    while (place := optimizer.place).step < plan.steps:
        optimizer.zero_grad()
        part.backward(part.model, place)
        optimizer.step()
        part.note(step=place.step, position=part.deal.position(place), node=place.node)
    with optimizer.averaged(part.model):
        if optimizer.network.node == 0:
            part.score()


def ddp(plan: Plan) -> None:
    # torchrun's store keeps the addresses of processes that are gone: each attempt needs its own.
    store, rank, size = next(iter(dist.rendezvous("env://")))
    store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    part = Part(plan)
    model = DistributedDataParallel(part.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    saved, step = Path(plan.directory) / "checkpoint.pt", 0
    if saved.exists():
        content = torch.load(saved, weights_only=True)
        part.model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        step = content["step"]
    while step < plan.steps:
        place = Place(step, rank, (Change(0, plan.nodes),))
        optimizer.zero_grad()
        part.backward(model, place)
        optimizer.step()
        part.note(step=step, position=part.deal.position(place), node=rank)
        step += 1
        if rank == 0 and step % plan.save_every == 0:
            draft = saved.with_suffix(".new")
            content = {"model": part.model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**content, "step": step}, draft)
            draft.replace(saved)
    if rank == 0:
        part.score()
    dist.destroy_process_group()


def run(kind: str, plan: Plan) -> dict[str, Any]:
    """Seconds of the whole command, and what its processes noted."""
    begun = time.monotonic()
    command = [sys.executable]
    if kind == "ddp":
        command += ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "10"]
        command += ["--nproc-per-node", str(plan.nodes)]
    command += [__file__, "--part", kind, "--plan", json.dumps(asdict(plan))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-5000:]}")
    seconds = time.monotonic() - begun
    files = Path(plan.directory).glob("*.jsonl")
    notes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    (last,) = [n for n in notes if "loss" in n]
    taken = [n for n in notes if "step" in n]
    steps = [n["step"] for n in taken if n["node"] == 0]
    seen = {n["position"] for n in taken}
    begun_last = [n["position"] for n in taken if n["step"] == plan.steps - 1]
    missing = [p for p in range(0, min(begun_last), BATCH) if p not in seen]
    return {
        **last,
        "seconds": seconds,
        "repeated": len(steps) - len(set(steps)),
        "batches": len(taken),
        "missing": len(missing),
    }


def train_for_ever(rank: int, nodes: int, port: int, out: str) -> None:
    """Train without elastic, until an error, which is written down."""
    place = {"RANK": rank, "WORLD_SIZE": nodes, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    decentlam.init("gloo")
    model = nn.Linear(20, 5)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=LR, topology="ring")
    try:
        while True:
            optimizer.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.step()
            time.sleep(0.01)
            if optimizer.place.step == 3:
                Path(out).write_text("trains")
    except ExchangeError as error:
        Path(out).write_text(str(error))


def kill_process_0(nodes: int, moment: float) -> tuple[int, list[float]]:
    """Return how many of the others named it, and when each had ended after the kill."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        outs = [Path(directory) / str(rank) for rank in range(nodes)]
        first, *others = processes = [
            context.Process(target=train_for_ever, args=(rank, nodes, port, str(out)))
            for rank, out in enumerate(outs)
        ]
        for process in processes:
            process.start()
        try:
            while not all(out.exists() for out in outs):
                time.sleep(0.05)
            time.sleep(moment)
            first.kill()
            killed, ended = time.monotonic(), list[float]()
            for process in others:
                process.join(120.0)
                ended.append(time.monotonic() - killed)
        finally:
            for process in processes:
                process.kill()
                process.join()
        named = sum(f"process 0 (pid {first.pid} on " in out.read_text() for out in outs[1:])
    return named, ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that every step sleeps")
    parser.add_argument("--save-every", type=int, default=100, help="steps, for DDP")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--named", type=int, metavar="RUNS", help="kill process 0 in each")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is not None:
        words = json.loads(given.plan)
        plan = Plan(**{**words, "kills": tuple(map(tuple, words["kills"]))})
        if given.part == "ddp":
            ddp(plan)
        else:
            decentlam.launch(elastic, plan.nodes, (plan,), elastic=True)
        return
    if given.named is not None:
        moments, runs = random.Random(given.seed), []
        decentlam.DSGD(nn.Linear(1, 1).parameters())  # imports what takes seconds before any fork
        for number in range(given.named):
            runs.append(kill_process_0(given.nodes, moments.random()))
            print(f"run {number}: named by {runs[-1][0]}", flush=True)
        seconds = sorted(s for _, its in runs for s in its)
        every = sum(named == given.nodes - 1 for named, _ in runs)
        print(
            f"process 0 was named by all {given.nodes - 1} others in {every} of {len(runs)} runs; "
            f"they had ended after {seconds[len(seconds) // 2]:.1f} s (median), "
            f"{seconds[-1]:.1f} s (most)"
        )
        sys.exit(every < len(runs))
    draw, gap = random.Random(given.seed), given.steps // (given.kills + 1)
    kills = tuple(
        ((k + 1) * gap + draw.randrange(gap // 2), draw.randrange(given.nodes))
        for k in range(given.kills)
    )
    print("killed:", ", ".join(f"process {rank} at step {step}" for step, rank in kills))
    names = "run | killed | loss | accuracy | seconds | steps repeated | batches | missing"
    print(f"| {names} |", f"|{'---|' * 8}", sep="\n", flush=True)
    for disturbed in ((), kills):
        for kind in ("elastic", "ddp"):
            with tempfile.TemporaryDirectory() as directory:
                plan = Plan(
                    given.nodes, given.steps, given.pace, given.save_every, disturbed, directory
                )
                found = run(kind, plan)
            print(
                f"| {kind} | {len(disturbed)} | {found['loss']:.3f} | {found['accuracy']:.1f} % | "
                f"{found['seconds']:.0f} | {found['repeated']} | {found['batches']} | "
                f"{found['missing']} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""What the heartbeat costs: CPU time of training with and without it, and the load of the store.

    python benchmarks/heartbeat.py                   # 4 processes that train
    python benchmarks/heartbeat.py --store 8 64 256  # that many clients of one store, no training

Training is timed in turns with and without a watch in the same processes, in CPU seconds of all of
them. The clients of a store do what a watch does, once a second.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import decentlam
from decentlam.lab.network.contenders import LR, MOMENTUM
from decentlam.lab.network.models import make_model
from decentlam.network import heartbeat

CLIENTS_EACH = 32  # of a process that stands for many
SECONDS = 10.0
BEAT = {
    "pid": 12345, "host": "host-a.example", "count": 1000, "left": False,
    "machine": ["0d0d0d0d-1111-2222-3333-444455556666", "pid:[4026531836]"],
    "net": ["0d0d0d0d-1111-2222-3333-444455556666", "net:[4026531840]"],
}  # fmt: skip


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def train(model_name: str, rounds: int, steps: int) -> list[float]:
    """CPU seconds with a heartbeat over those without, one ratio per round."""
    torch.set_num_threads(1)
    model, loss = make_model(model_name)
    optimizer = decentlam.DecentLaM(model.parameters(), lr=LR, momentum=MOMENTUM, topology="ring")
    store = dist.distributed_c10d._get_default_store()
    ratios = []
    for number in range(rounds):
        spent = {}
        for beats in (True, False) if number % 2 else (False, True):
            heartbeat.stop()
            dist.barrier()
            if beats:
                prefixed = dist.PrefixStore(f"round {number}", store)
                heartbeat.start(prefixed, dist.get_rank(), range(dist.get_world_size()))
            begun = cpu_seconds()
            for _ in range(steps):
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
            used = torch.tensor(cpu_seconds() - begun)
            dist.all_reduce(used)
            spent[beats] = used.item()
        ratios.append(spent[True] / spent[False])
    return ratios


def serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
    pipe.send(cpu_seconds())


def beat(port: int, everyone: int, mine: Sequence[int], pipe: Any) -> None:
    keys = [f"beat/{k}" for k in range(everyone)]
    stores = {k: dist.TCPStore("127.0.0.1", port, is_master=False) for k in mine}
    for k, store in stores.items():
        store.set(f"beat/{k}", json.dumps(BEAT))
    pipe.send("ready")
    pipe.recv()
    begun, used, waits, rounds = time.monotonic(), cpu_seconds(), list[float](), 0
    while time.monotonic() < begun + SECONDS:
        now = time.monotonic()
        for k, store in stores.items():
            asked = time.monotonic()
            store.set(f"beat/{k}", json.dumps(BEAT))
            store.check(["trouble/0"])
            assert len([json.loads(text) for text in store.multi_get(keys)]) == everyone
            waits.append(time.monotonic() - asked)
        rounds += 1
        time.sleep(max(0.0, now + 1.0 - time.monotonic()))
    pipe.send(((cpu_seconds() - used) / rounds, statistics.median(waits)))


def load(everyone: int) -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    server = context.Process(target=serve, args=(there,))
    server.start()
    port, groups = here.recv(), max(1, everyone // CLIENTS_EACH)
    pipes, processes = [], []
    for number in range(groups):
        mine, its = context.Pipe()
        arguments = (port, everyone, range(number, everyone, groups), its)
        processes.append(context.Process(target=beat, args=arguments))
        processes[-1].start()
        pipes.append(mine)
    for word in ("ready", "go"):
        for pipe in pipes:
            pipe.recv() if word == "ready" else pipe.send(word)
    found = [pipe.recv() for pipe in pipes]
    here.send("end")
    share = here.recv() / SECONDS
    for process in [*processes, server]:
        process.join()
    each = sum(cpu for cpu, _ in found) / everyone
    wait = statistics.median(median for _, median in found)
    print(f"{everyone} processes: the store takes {100 * share:.1f} % of a core; a beat takes "
          f"{1e3 * each:.2f} ms of CPU and {1e3 * wait:.1f} ms", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=int, nargs="+", help="numbers of clients")
    parser.add_argument("--model", default="convnet-0.2M")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    for everyone in given.store or ():
        load(everyone)
    if not given.store:
        ratios = decentlam.launch(train, 4, (given.model, given.rounds, given.steps))[0]
        spread = f"({min(ratios):.3f}-{max(ratios):.3f})"
        print(
            f"CPU time with a heartbeat over that without: {statistics.median(ratios):.3f} {spread}"
        )


if __name__ == "__main__":
    main()

"""What only a GPU can show: one process per GPU, with NCCL; any number of them from two on.

    torchrun --nproc-per-node 4 benchmarks/gpu.py parity   # every method against the simulator
    torchrun --nproc-per-node 4 benchmarks/gpu.py waits    # what the host waits for in a step
    torchrun --nproc-per-node 4 benchmarks/gpu.py speed    # a step beside DDP's, interleaved

Nodes of two processes are tried where there are four processes or another even number above.
`--device cpu` runs the same on gloo, to try the script itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import decentlam

METHODS = {
    "pmsgd": decentlam.PmSGD,
    "dsgd": decentlam.DSGD,
    "dmsgd": decentlam.DmSGD,
    "da-dmsgd": decentlam.DADmSGD,
    "awc-dmsgd": decentlam.AWCDmSGD,
    "slowmo": decentlam.SlowMo,
    "qg-dmsgd": decentlam.QGDmSGD,
    "d2-dmsgd": decentlam.D2DmSGD,
    "decentlam": decentlam.DecentLaM,
    "decentlam-steady": decentlam.SteadyDecentLaM,
    "gt-dmsgd": decentlam.GTDmSGD,
}
PAIRS = "bipartite-random-match"  # the default
DIRECTED = "one-peer-exponential"
SYMMETRIC = ("d2-dmsgd", "decentlam", "decentlam-steady")  # what they need
LR, SIZE, STEPS = 0.05, 1000, 20
Case = tuple[str, torch.dtype, str, int, dict[str, Any], float]


def cases() -> Iterator[Case]:
    """Method, precision, topology, processes per node, options, and the difference that is allowed.

    GPUs have other kernels for float32. With 16 bits nodes agree to within a rounding of x.
    """
    for method in METHODS:
        for topology in ("ring", PAIRS, DIRECTED):
            if topology == DIRECTED and method in SYMMETRIC:
                continue
            yield method, torch.float64, topology, 1, {}, 1e-12
            yield method, torch.float32, topology, 1, {}, 1e-5
        if has_nodes_of_two():
            yield method, torch.float64, PAIRS, 2, {}, 1e-12
        if method != "pmsgd":  # which averages exactly
            for dtype, allowed in ((torch.float16, 0.005), (torch.bfloat16, 0.04)):
                yield method, torch.float32, PAIRS, 1, {"message_dtype": dtype}, allowed


def has_nodes_of_two() -> bool:
    return dist.get_world_size() >= 4 and dist.get_world_size() % 2 == 0


def parity(device: torch.device) -> None:
    """The largest difference to simulated nodes; the process fails if one is too large."""
    good = [_parity(device, *case) for case in cases()]
    say(f"{sum(good)} of {len(good)} are as they should be")
    if not has_nodes_of_two():
        say("nodes of two processes: not tried with this number of processes")
    if not all(good):
        sys.exit(1)


def _parity(
    device: torch.device,
    method: str,
    dtype: torch.dtype,
    topology: str,
    per_node: int,
    options: dict[str, Any],
    allowed: float,
) -> bool:
    rank, processes = dist.get_rank(), dist.get_world_size()
    hyper: Any = {} if method == "dsgd" else {"momentum": 0.3}
    hyper |= {"tau": 4} if method == "slowmo" else {}
    targets = torch.randn(processes, SIZE, dtype=dtype, generator=torch.manual_seed(0))
    parameters = [
        nn.Parameter(torch.zeros(SIZE // 4, dtype=dtype, device=device)) for _ in range(4)
    ]
    optimizer = METHODS[method](
        parameters,
        lr=LR,
        topology=topology,
        processes_per_node=per_node,
        bucket_bytes=1,
        stable="ignore",
        **hyper,
        **options,
    )
    aims = targets[rank].to(device).split(SIZE // 4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        pairs = zip(parameters, aims, strict=True)
        sum((p - a).square().sum() for p, a in pairs).div(2).backward()
        optimizer.step()
    together = targets.unflatten(0, (-1, per_node)).mean(1)  # the mean gradient of a node
    x = decentlam.simulate(
        method,
        decentlam.TOPOLOGIES[topology](len(together)),
        torch.zeros_like(together),
        lambda x, step: x - together,
        LR,
        STEPS,
        **hyper,
    )
    own = torch.cat([p.detach().cpu() for p in parameters])
    largest = (own - x[rank // per_node]).abs().max().to(device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    good = largest.item() <= allowed  # not with NaN
    what = f"{per_node} per node" if per_node > 1 else str(options.get("message_dtype", ""))
    verdict = "" if good else f"   TOO LARGE, should be at most {allowed:g}"
    say(f"{dtype!s:13} {method:17} {topology:23} {what:14} {largest.item():.1e}{verdict}")
    return good


def model_on(device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    width, layers = (2048, 12) if device.type == "cuda" else (256, 4)
    model = nn.Sequential()
    for _ in range(layers):
        model.append(nn.Linear(width, width)).append(nn.ReLU())
    torch.manual_seed(dist.get_rank())  # every node has data of its own
    return model.to(device), torch.randn(64, width).to(device)


def contenders(device: torch.device) -> dict[str, Callable[[], None]]:
    """One training step of each, by name."""
    steps: dict[str, Callable[[], None]] = {}

    def add(name: str, model: nn.Module, data: Tensor, optimizer: torch.optim.Optimizer) -> None:
        def step() -> None:
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()

        steps[name] = step

    model, data = model_on(device)
    ddp = DistributedDataParallel(model)
    add("DDP", ddp, data, torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9))
    configurations: dict[str, tuple[str, dict[str, Any]]] = {
        "DecentLaM": ("decentlam", {}),
        "DecentLaM, no overlap": ("decentlam", {"overlap": "none"}),
        "DecentLaM, ring": ("decentlam", {"topology": "ring"}),
        "DecentLaM, float16": ("decentlam", {"message_dtype": torch.float16}),
        "DecentLaM, clipped": ("decentlam", {"overlap": "none", "max_grad_norm": 1.0}),
        "AWC-DmSGD": ("awc-dmsgd", {}),
    }
    if has_nodes_of_two():
        configurations["DecentLaM, nodes of 2"] = ("decentlam", {"processes_per_node": 2})
        configurations["AWC-DmSGD, nodes of 2"] = ("awc-dmsgd", {"processes_per_node": 2})
    for name, (method, options) in configurations.items():
        model, data = model_on(device)
        optimizer = METHODS[method](model.parameters(), lr=0.01, **options)
        add(name, model, data, optimizer)
    return steps


def speed(device: torch.device, rounds: int = 7, iterations: int = 20) -> None:
    """Time of a step over DDP's: median, least and most over the rounds."""
    steps = contenders(device)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            synchronize(device)
            begun = time.perf_counter()
            for _ in range(iterations):
                step()
            synchronize(device)
            if number:  # the first round warms up
                seconds[name].append((time.perf_counter() - begun) / iterations)
    for name, mine in seconds.items():
        ratios = [a / b for a, b in zip(mine, seconds["DDP"], strict=True)]
        median = statistics.median(ratios)
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        say(f"{name:25} {1e3 * statistics.median(mine):8.2f} ms   {median:.2f} {spread}")


def waits(device: torch.device) -> None:
    """Calls per step in which the host waits: one event, of the step before, on a GPU. DDP's are
    what torch itself needs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for name, step in contenders(device).items():
        for _ in range(5):  # the first steps look whether all nodes have the same data
            step()
        synchronize(device)
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(10):
                step()
        found = {
            event.key: event.count / 10
            for event in profile.key_averages()
            if "Synchronize" in event.key or event.key in ("aten::item", "cudaMemcpy")
        }
        say(f"{name:25} {found or 'nothing'}")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["parity", "waits", "speed"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU here; --device cpu tries the script on gloo")
    decentlam.init("gloo" if arguments.device == "cpu" else None)
    if dist.get_world_size() < 2:
        parser.error("this needs two processes at least; see the commands above")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    {"parity": parity, "waits": waits, "speed": speed}[arguments.what](device)


if __name__ == "__main__":
    main()

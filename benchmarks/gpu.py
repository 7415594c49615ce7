"""What only a GPU can show: one process per GPU, with NCCL.

    torchrun --nproc-per-node 4 benchmarks/gpu.py parity   # every method against the simulator
    torchrun --nproc-per-node 4 benchmarks/gpu.py waits    # what the host waits for in a step
    torchrun --nproc-per-node 4 benchmarks/gpu.py speed    # a step beside DDP's, interleaved

`--device cpu` runs the same on gloo, to try the script itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
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
TOPOLOGIES = ("ring", "one-peer-hypercube")  # static and changing
LR, SIZE, STEPS = 0.05, 1000, 10


def parity(device: torch.device) -> None:
    """The largest difference to simulated nodes; it should be below 1e-12 in float64, and below
    1e-5 in float32, for which GPUs have other kernels."""
    for dtype in (torch.float64, torch.float32):
        _parity(device, dtype)


def _parity(device: torch.device, dtype: torch.dtype) -> None:
    rank, nodes = dist.get_rank(), dist.get_world_size()
    targets = torch.randn(nodes, SIZE, dtype=dtype, generator=torch.manual_seed(0))
    for method, optimizer_class in METHODS.items():
        for topology in TOPOLOGIES:
            more: Any = {} if method == "dsgd" else {"momentum": 0.3}
            parameters = [
                nn.Parameter(torch.zeros(SIZE // 4, dtype=dtype, device=device)) for _ in range(4)
            ]
            optimizer = optimizer_class(
                parameters, lr=LR, topology=topology, bucket_bytes=1, stable="ignore", **more
            )
            aims = targets[rank].to(device).split(SIZE // 4)
            for _ in range(STEPS):
                optimizer.zero_grad()
                pairs = zip(parameters, aims, strict=True)
                sum((p - a).square().sum() for p, a in pairs).div(2).backward()
                optimizer.step()
            optimizer.finish()
            x = decentlam.simulate(
                method,
                decentlam.TOPOLOGIES[topology](nodes),
                torch.zeros_like(targets),
                lambda x, step: x - targets,
                LR,
                STEPS,
                **more,
            )
            difference = (torch.cat([p.detach().cpu() for p in parameters]) - x[rank]).abs().max()
            largest = difference.to(device)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            say(f"{dtype!s:13} {method:17} {topology:19} {largest.item():.1e}")


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
    for overlap in ("none", "backward"):
        for topology in TOPOLOGIES:
            model, data = model_on(device)
            optimizer = decentlam.DecentLaM(
                model.parameters(), lr=0.01, topology=topology, overlap=overlap
            )
            add(f"DecentLaM {topology} {overlap}", model, data, optimizer)
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
        say(f"{name:40} {1e3 * statistics.median(mine):8.2f} ms   {median:.2f} {spread}")


def waits(device: torch.device) -> None:
    """Calls per step in which the host waits; DDP's are what torch itself needs."""
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
        say(f"{name:40} {found or 'nothing'}")


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
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    {"parity": parity, "waits": waits, "speed": speed}[arguments.what](device)


if __name__ == "__main__":
    main()

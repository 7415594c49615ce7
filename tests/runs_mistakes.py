"""What processes do in tests/test_mistakes.py: things that would go wrong without a word."""

from __future__ import annotations

import copy
import logging
import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
from runs import Quadratic, flat
from runs_steps import LR, Group, build, message_of, quadratic_loss, start, train
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import decentlam
from decentlam.membership import watch


def in_ddp(process_group: Group, overlap: str) -> str:
    """The wrapper was left around the model."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    wrapped = DistributedDataParallel(model, process_group=process_group)
    quadratic_loss(wrapped, node, 0).backward()
    return message_of(optimizer.step)


def same_data(process_group: Group, method: str, own: bool) -> list[str]:
    """What is said when every node trains on the same data, and when each has its own."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("decentlam.runtime.mistakes")
    log.addHandler(handler)
    node, model, optimizer = start(process_group, method)
    for step in range(4):
        optimizer.zero_grad()
        quadratic_loss(model, node if own else 0, step).backward()
        optimizer.step()
    log.removeHandler(handler)
    return said


def frozen(process_group: Group, overlap: str) -> tuple[bool, bool, bool]:
    """A layer is frozen after some steps: whether it stays, others move, and it moves again."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    train(optimizer, model, node, range(3))
    weight, other = model.weights[2], model.weights[1]
    weight.requires_grad_(False)
    before, others = weight.detach().clone(), other.detach().clone()
    train(optimizer, model, node, range(3, 6))
    stays, moves = torch.equal(weight, before), not torch.equal(other, others)
    weight.requires_grad_(True)
    train(optimizer, model, node, range(6, 8))
    return stays, moves, not torch.equal(weight, before)


def moved(process_group: Group, method: str, overlap: str) -> list[list[Tensor]]:
    """Parameters and gradients get memory of their own before some steps, as trainers do it."""
    found = []
    for moves in (False, True):
        node, model, optimizer = start(process_group, method, overlap=overlap)
        trajectory = []
        for step in range(6):
            if moves and step % 2:
                model.to("cpu:0")
            optimizer.zero_grad()
            quadratic_loss(model, node, step).backward()
            optimizer.step()
            trajectory.append(flat(model))
        found.append(trajectory)
    return found


def replaced_in_flight(process_group: Group) -> str:
    """A parameter gets another value after its message has left."""
    node, model, optimizer = start(process_group, "decentlam", overlap="backward")
    quadratic_loss(model, node, 0).backward()
    model.weights[0].data = model.weights[0].data + 1
    return message_of(optimizer.step)


def copied_alone(process_group: Group, method: str) -> tuple[list[list[Tensor]], str]:
    """All copy an optimizer, then one process alone, which must not wait for others, then all. What
    is said of the last copy, whose messages would not meet; a new optimizer can be built."""
    node, model, optimizer = start(process_group, method)
    train(optimizer, model, node, range(2))
    twin, theirs = copy.deepcopy((model, optimizer))
    assert theirs.network is optimizer.network
    if node == 1:
        copy.deepcopy((model, optimizer))
        pickle.loads(pickle.dumps((model, optimizer)))
    apart, late = copy.deepcopy((model, optimizer))
    _, fresh, new = start(process_group, method)
    train(new, fresh, node, range(2))
    found = [
        train(optimizer, model, node, range(2, 5)),
        train(theirs, twin, node, range(2, 5)),
    ]
    return found, message_of(lambda: train(late, apart, node, range(1)))


def unpickled_subgroup(process_group: Group) -> str:
    """A pickled optimizer of a group of fewer processes cannot find its group again."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    _, model, optimizer = start(mine, "decentlam")
    data = pickle.dumps(optimizer)
    optimizer.runtime.close()
    del optimizer, model
    decentlam.exchange.network._connected.clear()  # as in another process
    return message_of(lambda: pickle.loads(data))


def layerwise_parts(process_group: Group) -> str:
    class Layerwise(decentlam.algorithms.DmSGD):
        layerwise = True  # type: ignore[assignment]

    parameters = Quadratic().parameters()
    return message_of(
        lambda: decentlam.DecentralizedOptimizer(
            parameters, Layerwise(), LR, processes_per_node=2, process_group=process_group
        )
    )


def restored(process_group: Group) -> bool:
    """Averaging fails on every process, because one of them cannot take part."""
    node, model, optimizer = start(process_group, "decentlam")
    train(optimizer, model, node, range(2))
    before = flat(model)
    dist.barrier()

    class Broken:
        """Stands for a process group whose members are gone."""

    real, averages = dist.all_reduce, []

    def fails_at_the_third(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        averages.append(tensor)
        if len(averages) == 3:
            raise RuntimeError("Connection closed by peer")
        return real(tensor, *args, **kwargs)

    dist.all_reduce = fails_at_the_third
    watching, watch._current = watch._current, None  # as over MPI: it would look for a cause
    try:
        model.register_buffer("statistics", torch.ones(3, dtype=torch.float64))
        model.register_buffer("more", torch.ones(3, dtype=torch.float64))
        model.register_buffer("most", torch.ones(3, dtype=torch.float64))

        def average() -> None:
            with optimizer.averaged(model):
                raise AssertionError("not reached")

        error = message_of(average)
    finally:
        dist.all_reduce, watch._current = real, watching
    assert "Connection closed" in error, error
    return torch.equal(flat(model), before)


def compiled_in_place(process_group: Group) -> list[list[Tensor]]:
    """model.compile() with overlap="forward" in shared memory."""
    found = []
    for compiles in (False, True):
        node = dist.get_rank(process_group)
        model = Quadratic(seed=0)
        optimizer = build("decentlam", model, process_group, overlap="forward", shared_memory=True)
        if compiles:
            model.compile(backend="eager")
        found.append(train(optimizer, model, node, range(3)))
    return found


def after_a_death(process_group: Group) -> tuple[str, list[Tensor]]:
    """With overlap, a neighbor's death ends the step; the others go on with another network."""
    node, model, optimizer = start(
        process_group, "decentlam", overlap="backward", shared_memory=False
    )
    train(optimizer, model, node, range(2))
    survivors = dist.new_group([0, 1, 2])
    if node == 3:
        os._exit(0)
    error = message_of(lambda: train(optimizer, model, node, range(2, 20)))
    network = decentlam.exchange.connect(survivors)
    optimizer.use_network(network, "ring")
    return error, train(optimizer, model, node, range(20, 23))


# Found by a review --------------------------------------------------------------------------------


def modes_of_auto(process_group: Group) -> list[str]:
    """A plain model whose biases share a bucket, and a script that touches no gradient."""
    torch.manual_seed(dist.get_rank(process_group))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = decentlam.DecentLaM(
        model.parameters(), lr=0.01, topology="ring", process_group=process_group
    )
    modes = []
    for _ in range(34):
        modes.append(optimizer.runtime.overlap.mode)
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    return modes


def averaged_after_a_move(process_group: Group) -> tuple[list[Tensor], float, Tensor]:
    """Parameters are given memory of their own, then averaged, measured and merged."""
    node, model, optimizer = start(process_group, "decentlam")
    train(optimizer, model, node, range(3))
    for p in model.parameters():
        p.data = p.data.clone()
    distance = optimizer.consensus_distance()
    with optimizer.averaged(model):
        inside = flat(model)
    for p in model.parameters():
        p.data = p.data.clone()
    optimizer.merge(model)
    return [inside, flat(model)], distance, flat(model)


class FromHere(decentlam.algorithms.DmSGD):
    """Remembers where the run began."""

    def init(self, x: Tensor) -> dict[str, Tensor]:
        return {**super().init(x), "start": x.clone()}


def state_from_x(process_group: Group) -> float:
    """Processes start from different parameters, which the optimizer makes equal."""
    model = Quadratic(seed=dist.get_rank(process_group))
    optimizer = decentlam.DecentralizedOptimizer(
        model.parameters(), FromHere(0.6), LR, topology="ring", process_group=process_group
    )
    starts = [optimizer.state[p]["start"] for p in model.parameters()]
    pairs = zip(starts, model.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def state_after_a_checkpoint(process_group: Group, directory: str) -> tuple[bool, bool]:
    """Whether what `init` remembered comes back, and was something else before."""
    runs = []
    for seed in (0, 1):
        model = Quadratic(seed=seed)
        optimizer = decentlam.DecentralizedOptimizer(
            model.parameters(), FromHere(0.6), LR, topology="ring", process_group=process_group
        )
        runs.append((model, optimizer))
    (model, optimizer), (other, resumed) = runs
    train(optimizer, model, dist.get_rank(process_group), range(3))
    decentlam.save_checkpoint(directory, model=model, optimizer=optimizer)

    def starts() -> list[Tensor]:
        pairs = ((model, optimizer), (other, resumed))
        return [torch.cat([o.state[p]["start"].ravel() for p in m.parameters()]) for m, o in pairs]

    before = torch.equal(*starts())
    decentlam.load_checkpoint(directory, model=other, optimizer=resumed)
    return before, torch.equal(*starts())


def stable_form(process_group: Group) -> list[tuple[str, str]]:
    """What was asked for and what runs: at first, with one more group, and in a copy."""
    node, model, optimizer = start(
        process_group, "decentlam", topology="one-peer-hypercube", stable="auto"
    )
    train(optimizer, model, node, range(2))
    found = [optimizer]
    optimizer.add_param_group({"params": [("one more", nn.Parameter(torch.ones(2)))]})
    found += [optimizer, copy.deepcopy(optimizer)]
    return [(type(o.method).__name__, type(o.algorithm).__name__) for o in found]


def replaced_gradient(process_group: Group) -> list[Tensor]:
    """AWC-DmSGD's message needs no gradient: "auto" lets a script replace it."""
    found = []
    for overlap in ("none", "auto"):
        node, model, optimizer = start(process_group, "awc-dmsgd", overlap=overlap)
        for step in range(4):
            optimizer.zero_grad()
            quadratic_loss(model, node, step).backward()
            for p in model.parameters():
                p.grad = 0.5 * p.grad
            optimizer.step()
        found.append(flat(model))
    return found


def interrupted(process_group: Group, overlap: str) -> tuple[list[Tensor], list[int]]:
    """Ctrl-C strikes in the midst of the updates of step 2; the script saves and goes on."""
    found, steps = [], []
    for strikes in (False, True):
        node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
        train(optimizer, model, node, range(2))
        if strikes:
            last = optimizer.runtime.rounds[-1]
            original = last.update

            def strike(plan: Any, last: Any = last, original: Any = original) -> float:
                last.update = original
                raise KeyboardInterrupt

            last.update = strike
        try:
            train(optimizer, model, node, range(2, 3))
        except KeyboardInterrupt:
            steps.append(optimizer.state_dict()["param_groups"][0]["step"])
            optimizer.runtime.check_between_steps("save a checkpoint")
        train(optimizer, model, node, range(3, 5))
        found.append(flat(model))
    return found, steps


def not_finite(process_group: Group) -> list[str]:
    """What is raised in backward is raised again by step(), not something else."""
    node, model, optimizer = start(
        process_group, "decentlam", overlap="backward", shared_memory=True
    )
    loss = quadratic_loss(model, node, 0) * torch.nan
    return [message_of(loss.backward), message_of(optimizer.step)]


def not_finite_and_on(process_group: Group) -> list[str]:
    """A script that goes on after the error is told that it cannot, and why."""
    node, model, optimizer = start(process_group, "decentlam", overlap="none")
    said = []
    for scale in (torch.nan, 1.0):
        optimizer.zero_grad()
        (quadratic_loss(model, node, 0) * scale).backward()
        said.append(message_of(optimizer.step))
    return said


def not_finite_alone(process_group: Group) -> tuple[str, Tensor]:
    """A step that sends nothing is refused, too: what it leaves is averaged later."""
    node, model, optimizer = start(process_group, "slowmo", base="local", tau=4)
    train(optimizer, model, node, range(1))
    (quadratic_loss(model, node, 1) * (torch.nan if node == 1 else 1.0)).backward()
    said = message_of(optimizer.step)
    return said, flat(model)


def frozen_with_gaps(process_group: Group) -> Tensor:
    """A frozen parameter that is a part of a larger tensor; that is what others start with."""
    node = dist.get_rank(process_group)
    large = torch.full((4, 4), float(node))
    part = nn.Parameter(large[:, :2], requires_grad=False)
    parameters = [nn.Parameter(torch.ones(3)), part]
    decentlam.DmSGD(parameters, LR, process_group=process_group)
    return large


def written_through_data(process_group: Group, first: int) -> str:
    """From that step on, gradients are written to through `.data`."""
    node, model, optimizer = start(process_group, "dmsgd", overlap="backward")

    def go() -> None:
        for step in range(first + 1):
            optimizer.zero_grad()
            quadratic_loss(model, node, step).backward()
            if step == first:
                for p in model.parameters():
                    p.grad.data.mul_(2)
            optimizer.step()

    return message_of(go)


def gradient_data(
    process_group: Group, overlap: str, replaces: bool = False
) -> tuple[str, str, Tensor]:
    """Gradients are clipped through `.data`, which torch does not count as a write."""
    node, model, optimizer = start(process_group, "dmsgd", overlap=overlap)

    def go() -> None:
        for step in range(8):
            optimizer.zero_grad()
            quadratic_loss(model, node, step).backward()
            for p in model.parameters():
                if replaces:
                    p.grad.data = p.grad.data.clamp(-0.01, 0.01)
                else:
                    p.grad.data.clamp_(-0.01, 0.01)
            optimizer.step()

    return message_of(go), optimizer.runtime.overlap.mode, flat(model)


def parameter_data(process_group: Group) -> str:
    """Parameters are clipped through `.data` while AWC-DmSGD's messages are under way."""
    node, model, optimizer = start(process_group, "awc-dmsgd", overlap="backward")

    def go() -> None:
        for step in range(3):
            optimizer.zero_grad()
            quadratic_loss(model, node, step).backward()
            optimizer.step()
            for p in model.parameters():
                p.data.clamp_(-0.01, 0.01)

    return message_of(go)


def averaged_half(process_group: Group) -> tuple[float, float]:
    """The mean of float16 numbers whose sum is infinite."""
    _, model, optimizer = start(process_group, "decentlam")
    model.register_buffer("large", torch.full((2,), 20_000.0, dtype=torch.float16))
    with optimizer.averaged(model):
        inside = model.large[0].item()
    return inside, model.large[0].item()


def groups_momentum(process_group: Group) -> str:
    """What runs where only a param group has the momentum that needs a stable form."""
    model = Quadratic()
    optimizer = decentlam.DecentLaM(
        [{"params": list(model.parameters()), "momentum": 0.9}],
        lr=LR,
        momentum=0.0,
        topology="one-peer-hypercube",
        process_group=process_group,
    )
    return repr(optimizer.algorithm)


def unpickled_exact(process_group: Group) -> str:
    """Exact averages need a group of their own, which one process alone cannot form."""
    _, model, optimizer = start(dist.group.WORLD, "pmsgd")
    data = pickle.dumps(optimizer)
    optimizer.runtime.close()
    del optimizer, model
    decentlam.exchange.network._connected.clear()  # as in another process
    return message_of(lambda: pickle.loads(data))


def empty_parameter(process_group: Group) -> Tensor:
    full = nn.Parameter(torch.ones(3))
    optimizer = decentlam.DmSGD(
        [nn.Parameter(torch.empty(0)), full], lr=0.1, process_group=process_group
    )
    full.sum().backward()
    optimizer.step()
    return full.detach()


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any) -> Tensor:
        return self.inner(*inputs)


def ddp_inside(process_group: Group) -> str:
    """DDP is around a part, and the bare model has run before."""
    node, model, optimizer = start(process_group, "decentlam")
    quadratic_loss(model, node, 0)
    wrapped = Outer(DistributedDataParallel(model, process_group=process_group))
    quadratic_loss(wrapped, node, 0).backward()
    return message_of(optimizer.step)


def group_of_another(process_group: Group) -> list[int]:
    """A param group that comes from another optimizer, with its own count of steps."""
    node, model, optimizer = start(process_group, "dmsgd")
    train(optimizer, model, node, range(3))
    more = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [("more", more)], "step": 7, "previous_lr": 1.0})
    return [group["step"] for group in optimizer.param_groups]


def swapped_aside(process_group: Group) -> tuple[Tensor, Tensor]:
    """Between two steps a script evaluates other weights, by `.data`, and puts its own back; just
    then the neighbor takes in what AWC-DmSGD has sent early."""
    store = dist.distributed_c10d._get_default_store()
    found = []
    for swaps in (False, True):
        node, model, optimizer = start(process_group, "awc-dmsgd", overlap=True, topology="ring")
        optimizer.zero_grad()
        quadratic_loss(model, node, 0).backward()
        if swaps and node > 0:  # it posts its receive when node 0 has other weights
            store.get("swapped")
        optimizer.step()
        if swaps and node == 0:
            kept = [p.data.clone() for p in model.parameters()]
            for p in model.parameters():
                p.data.fill_(100.0)
            store.set("swapped", "")
            for other in range(1, dist.get_world_size(process_group)):
                store.get(f"stepped {other}")
            for p, value in zip(model.parameters(), kept, strict=True):
                p.data.copy_(value)
        elif swaps:
            store.set(f"stepped {node}", "")
        train(optimizer, model, node, range(1, 4))
        found.append(flat(model))
    return found[0], found[1]

"""What processes do in tests/test_forward.py: look at parameters that are still awaited."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from runs import Quadratic, flat
from runs_steps import LR, build, message_of, quadratic_loss, start
from torch import Tensor, nn

from decentlam.runtime.forward.parameter import AwaitedParameter

Group = dist.ProcessGroup

STEPS = 5


def take_steps(optimizer: Any, model: nn.Module, node: int) -> None:
    """Looks at nothing in between: only forward asks for the parameters."""
    for step in range(STEPS):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        optimizer.step()


def are_awaited(model: nn.Module) -> bool:
    return all(type(p) is AwaitedParameter for p in model.parameters())


def are_plain(model: nn.Module) -> bool:
    return all(type(p) is nn.Parameter for p in model.parameters())


def _deepcopied(model: nn.Module, optimizer: Any) -> Tensor:
    copied = copy.deepcopy(model)
    assert are_plain(copied)
    return flat(copied)


def _saved(model: nn.Module, optimizer: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return _joined(torch.load(file).values())


def _joined(tensors: Any) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).clone()


def _from_thread(model: nn.Module, optimizer: Any) -> Tensor:
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(flat(model))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[0], other) for other in found)
    return found[0]


def _by_other_optimizer(model: nn.Module, optimizer: Any) -> Tensor:
    """Adds nothing, but reads and writes every parameter."""
    other = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    other.step()
    return flat(model)


def _moving_average(model: nn.Module, optimizer: Any) -> Tensor:
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    return flat(average.module)


LOOKS: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "data": lambda model, _: _joined(p.data for p in model.parameters()),
    "detach": lambda model, _: _joined(p.detach() for p in model.parameters()),
    "numpy": lambda model, _: torch.cat(
        [torch.from_numpy(p.detach().numpy().copy()).reshape(-1) for p in model.parameters()]
    ),
    "to list": lambda model, _: torch.cat(
        [torch.tensor(p.flatten().tolist(), dtype=p.dtype) for p in model.parameters()]
    ),
    "state_dict": lambda model, _: _joined(model.state_dict().values()),
    "torch.save": _saved,
    "pickle": lambda model, _: flat(pickle.loads(pickle.dumps(model))),
    "deepcopy": _deepcopied,
    "vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()).detach().clone(),
    "foreach": lambda model, _: _joined(torch._foreach_mul(list(model.parameters()), 1.0)),
    "functional": lambda model, _: _joined(
        torch.func.functional_call(_Parameters(model), dict(_Parameters(model).named_parameters()))
    ),
    "other optimizer": _by_other_optimizer,
    "moving average": _moving_average,
    "thread": _from_thread,
    "finish": lambda model, optimizer: (optimizer.finish(), flat(model))[1],
    "optimizer state": lambda model, optimizer: (optimizer.state_dict(), flat(model))[1],
}


class _Parameters(nn.Module):
    """Returns its parameters, to look at them through functional_call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> list[Tensor]:
        return list(self.model.parameters())


def looks(process_group: Group) -> dict[str, Tensor]:
    """For every way to look: the parameters after STEPS steps, seen that way first."""
    seen = {}
    for name, look in LOOKS.items():
        node, model, optimizer = start(process_group, "decentlam", overlap="forward")
        for step in range(STEPS):
            optimizer.zero_grad()
            quadratic_loss(model, node, step).backward()
            optimizer.step()
            assert are_awaited(model), name
        seen[name] = look(model, optimizer).double()
        assert are_plain(model), name
    return seen


def state_of_momentum(process_group: Group) -> list[Tensor]:
    """The optimizer's saved state belongs to the same step as the parameters."""
    found = []
    for overlap in (False, "forward"):
        node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
        take_steps(optimizer, model, node)
        saved = optimizer.state_dict()["state"].values()
        found.append(_joined(t for state in saved for t in state.values()))
    return found


def metadata(process_group: Group) -> bool:
    """Shapes, types and taking gradients away ask for no value."""
    node, model, optimizer = start(process_group, "decentlam", overlap="forward")
    quadratic_loss(model, node, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    for p in model.parameters():
        facts = (p.shape, p.dtype, p.device, p.requires_grad, p.numel(), p.dim(), p.is_leaf)
        assert facts[0] and facts[3] and isinstance(p, nn.Parameter)
        p.grad = None
    assert are_awaited(model)
    for group in optimizer.param_groups:  # as schedulers do
        group["lr"] = LR / 2
    awaited = are_awaited(model)
    optimizer.finish()
    return awaited and are_plain(model)


def zeroed_in_place(process_group: Group, method: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients that an update to come still needs are zeroed: by the optimizer, by the model."""
    runs = []
    for overlap in (False, "forward"):
        node, model, optimizer = start(process_group, method, overlap=overlap)
        for step in range(6):
            (optimizer if step % 2 else model).zero_grad(set_to_none=False)
            quadratic_loss(model, node, step).backward()
            optimizer.step()
        runs.append([flat(model)])
    return runs[0], runs[1]


def written(process_group: Group) -> tuple[Tensor, Tensor]:
    """An assignment after step() is to the new value, not lost under it."""
    results = []
    for overlap in (False, "forward"):
        node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
        for step in range(STEPS):
            optimizer.zero_grad()
            quadratic_loss(model, node, step).backward()
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
        results.append(flat(model))
    return results[0], results[1]


def evaluated(process_group: Group) -> dict[str, Any]:
    """Evaluation, merging and saving right after a step."""
    found: dict[str, Any] = {}
    for overlap in (False, "forward"):
        node, model, optimizer = start(process_group, "dmsgd", overlap=overlap)
        take_steps(optimizer, model, node)
        with optimizer.averaged(model):
            average = flat(model)
        quadratic_loss(model, node, STEPS).backward()
        optimizer.step()
        distance = optimizer.consensus_distance()
        optimizer.zero_grad()
        quadratic_loss(model, node, STEPS + 1).backward()
        optimizer.step()
        optimizer.merge(model)
        found[str(overlap)] = (average, distance, flat(model))
    return found


def compiled(process_group: Group) -> tuple[list[Tensor], list[Tensor], int]:
    """A compiled model takes the same steps, and is not compiled anew at each of them."""
    runs, graphs = [], 0
    for overlap in (False, "forward"):
        node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fast = torch.compile(model, backend="eager")
        trajectory = []
        for step in range(12):
            optimizer.zero_grad()
            loss = quadratic_loss(fast, node, step)
            trajectory.append(flat(model))
            loss.backward()
            optimizer.step()
        runs.append([*trajectory, flat(model)])
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return runs[0], runs[1], graphs


def scripted(process_group: Group) -> tuple[Tensor, Tensor]:
    """TorchScript reads parameters in C++; a module beside it shares their bucket."""
    results = []
    for overlap in (False, "forward"):
        torch.manual_seed(0)
        layers = [torch.jit.script(nn.Linear(3, 3).double()), nn.Linear(3, 2).double()]
        model = nn.Sequential(*layers)
        optimizer = build("decentlam", model, process_group, overlap=overlap, bucket_bytes=10_000)
        x = torch.ones(4, 3, dtype=torch.float64) * (1 + dist.get_rank(process_group))
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        results.append(flat(model))
    return results[0], results[1]


def unseen(process_group: Group) -> str:
    """A forward that does not pass through torch's Python functions computes with old values."""
    node, model, optimizer = start(
        process_group, "decentlam", overlap="forward", bucket_bytes=10_000
    )

    def two_steps() -> None:
        for step in range(2):
            optimizer.zero_grad()
            with torch._C.DisableTorchFunctionSubclass():
                loss = quadratic_loss(model, node, step)
            model.weights[0].sum().item()  # settles the bucket, but only this one was asked for
            loss.backward()
            optimizer.step()

    message = message_of(two_steps)
    optimizer.finish()
    return message


def subclassed(process_group: Group) -> tuple[Tensor, Tensor]:
    """A parameter of another class is never awaited, and takes the same steps."""

    class Own(nn.Parameter):
        pass

    results = []
    for overlap in (False, "forward"):
        node = dist.get_rank(process_group)
        model = Quadratic(seed=node)
        model.weights[1].__class__ = Own
        optimizer = build("decentlam", model, process_group, overlap=overlap)
        take_steps(optimizer, model, node)
        assert type(model.weights[1]) is Own
        results.append(flat(model))
    return results[0], results[1]


# Ends and deaths --------------------------------------------------------------------------------


def leave_at_once(method: str, seconds: float) -> int:
    """A script whose last act is step(): its neighbors must still get its messages."""
    node = dist.get_rank()
    model = Quadratic(seed=node)
    optimizer = build(method, model, None, overlap="forward", topology="ring")
    for step in range(3):
        optimizer.zero_grad()
        quadratic_loss(model, node, step).backward()
        time.sleep(seconds * node)
        optimizer.step()
    return node

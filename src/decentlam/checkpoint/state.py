"""What a run consists of: taken from its objects, checked against others, put into them."""

from __future__ import annotations

import collections
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decentlam.layout import shaped_like
from decentlam.optimizer import DecentralizedOptimizer

Content = dict[str, Any]  # of one process: model, parameters (names), optimizer, others, rng
NodeState = dict[int, dict[str, Tensor]]  # by number of the parameter, then by name of the buffer


def take(model: nn.Module, optimizer: DecentralizedOptimizer, others: Mapping[str, Any]) -> Content:
    """Everything this process knows. Tensors are not copied."""
    optimizer._check_quiet("save a checkpoint")
    content: Content = {
        "model": model.state_dict(),
        "parameters": _names(model, optimizer),
        "optimizer": optimizer.state_dict(),
        "others": {name: thing.state_dict() for name, thing in others.items()},
        "rng": {"cpu": torch.get_rng_state()},
    }
    if torch.cuda.is_initialized():
        content["rng"]["cuda"] = torch.cuda.get_rng_state()
    for name, part in [*content.items(), *content["others"].items()]:
        if name != "others":
            _check_loadable(name, part)
    return content


def gather_parts(optimizer: DecentralizedOptimizer) -> NodeState:
    """In a node of several processes each holds a part of the state: this is the whole."""
    whole: NodeState = collections.defaultdict(dict)
    numbers = _numbers(optimizer)
    for flight in optimizer._flights:
        for name, part in flight.state.items():
            full = torch.empty_like(flight.bucket.x)
            dist.all_gather_into_tensor(full, part, group=optimizer.network.node_group)
            for p, span in zip(flight.bucket.params, flight.bucket.spans, strict=True):
                whole[numbers[p]][name] = shaped_like(full[span], p)
    return dict(whole)


def average(contents: Iterable[Content], num_processes: int, processes_per_node: int) -> Content:
    """One process's content whose floating-point tensors are the mean over all nodes.

    Counters and the state of the others are those of process 0.
    """
    sums: dict[tuple[Any, ...], Tensor] = {}
    result: Content = {}
    for rank, content in enumerate(contents):
        if not result:
            result = content
        for key, tensor in _floating(content):
            # Only the first process of a node holds optimizer state.
            share = num_processes if key[0] == "model" else num_processes // processes_per_node
            if rank == 0:
                sums[key] = torch.zeros_like(tensor, dtype=torch.float64)
            sums[key].add_(tensor, alpha=1 / share)
    for key, tensor in _floating(result):
        tensor.copy_(sums[key])
    return result


def _floating(content: Content) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    for name, value in content["model"].items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield ("model", name), value
    for number, buffers in content["optimizer"]["state"].items():
        for name, value in buffers.items():
            yield ("state", number, name), value


def check(
    content: Content,
    model: nn.Module,
    optimizer: DecentralizedOptimizer,
    others: Mapping[str, Any],
) -> None:
    """Refuses what does not fit before anything is changed."""
    optimizer._check_quiet("load a checkpoint")
    names = _names(model, optimizer)
    here, saved = model.state_dict(), content["model"]
    wrong = [f"{name} is not in the checkpoint" for name in here if name not in saved]
    wrong += [f"{name} is not in this model" for name in saved if name not in here]
    wrong += [
        f"{name} has shape {tuple(saved[name].shape)} in the checkpoint and {tuple(t.shape)} here"
        for name, t in here.items()
        if isinstance(t, Tensor) and name in saved and saved[name].shape != t.shape
    ]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in content["optimizer"]["param_groups"]]
    if sizes != saved_sizes:
        wrong.append(f"the optimizer has groups of {saved_sizes} parameters there and {sizes} here")
    elif names != content["parameters"]:
        wrong.append("the optimizer has the parameters in another order")
    if wrong:
        more = [f"and {len(wrong) - 5} more"] if wrong[5:] else []
        raise ValueError(f"the checkpoint is of another model: {'; '.join(wrong[:5] + more)}")
    absent = sorted(name for name in others if name not in content["others"])
    if absent:
        raise ValueError(
            f"the checkpoint holds no {', '.join(absent)}; besides model and optimizer it has: "
            f"{', '.join(sorted(content['others'])) or 'nothing'}"
        )


def put(
    content: Content,
    model: nn.Module,
    optimizer: DecentralizedOptimizer,
    others: Mapping[str, Any],
    rng: bool,
) -> None:
    """Makes the objects continue where the content was taken."""
    model.load_state_dict(content["model"])
    state = _fitted(optimizer, content["optimizer"]["state"])
    optimizer.load_state_dict({**content["optimizer"], "state": state})
    for name, thing in others.items():
        thing.load_state_dict(content["others"][name])
    if rng:
        torch.set_rng_state(content["rng"]["cpu"])
        if "cuda" in content["rng"] and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(content["rng"]["cuda"])


@torch.no_grad()
def _fitted(optimizer: DecentralizedOptimizer, saved: NodeState) -> NodeState:
    """The state of a node as this optimizer keeps it, in whatever buckets and parts.

    A buffer that was not saved starts as in a new run. That happens when a run moves between one
    node and several, because some methods keep less on one.
    """
    numbers = _numbers(optimizer)
    fitted: NodeState = collections.defaultdict(dict)
    for flight in optimizer._flights:
        for name in flight.state:
            full = torch.zeros_like(flight.bucket.x)
            for p, span in zip(flight.bucket.params, flight.bucket.spans, strict=True):
                start = p if name == "x0" else None  # SlowMo's period begins here
                value = saved.get(numbers[p], {}).get(name, start)
                view = shaped_like(full[span], p)
                if value is not None:
                    view.copy_(value)
                if optimizer.network.processes_per_node == 1:
                    fitted[numbers[p]][name] = view
            if optimizer.network.processes_per_node > 1:
                fitted[numbers[flight.bucket.params[0]]][name] = full[flight.part]
    return dict(fitted)


def _numbers(optimizer: DecentralizedOptimizer) -> dict[Tensor, int]:
    """The number under which torch.optim saves the state of a parameter."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {p: number for number, p in enumerate(params)}


def _names(model: nn.Module, optimizer: DecentralizedOptimizer) -> list[str]:
    """What the model calls the optimizer's parameters, in the optimizer's order."""
    known: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for p, number in _numbers(optimizer).items():
        if p not in known:
            raise ValueError(
                f"parameter {number} of the optimizer is not one of the model's, so a checkpoint "
                "of this model does not hold it; pass the module that has all trained parameters"
            )
    return [known[p] for p in _numbers(optimizer)]


def _check_loadable(name: str, part: Any) -> None:
    """Tries on everything but the tensors what loading will do: better now than in a week."""
    buffer = io.BytesIO()
    try:
        torch.save(_skeleton(part), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"the state of {name} holds something a checkpoint cannot keep; tensors, numbers, "
            f"strings, lists, tuples and dicts are allowed. torch says: {_reason(error)}"
        ) from error


def _skeleton(part: Any) -> Any:
    if isinstance(part, Tensor):
        return None
    if type(part) in (dict, collections.OrderedDict):
        return {key: _skeleton(value) for key, value in part.items()}
    if type(part) in (list, tuple):
        return [_skeleton(value) for value in part]
    return part


def _reason(error: Exception) -> str:
    """The line of torch's long message that names the culprit."""
    lines = str(error).splitlines() or [repr(error)]
    return next((line.strip() for line in lines if "nsupported" in line), lines[0])

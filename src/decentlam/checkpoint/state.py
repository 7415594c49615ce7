"""What a run consists of: taken from its objects, checked against others, put into them."""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decentlam.checkpoint.directory import reason
from decentlam.checkpoint.generators import stateful
from decentlam.errors import CheckpointError
from decentlam.optimizer import DecentralizedOptimizer
from decentlam.runtime import state
from decentlam.runtime.evaluation import check_none_averaged
from decentlam.runtime.param_groups import check_saved, check_values
from decentlam.runtime.sharded import cut, cuts_of, is_sharded, like, local

Content = dict[str, Any]  # of one process: model, groups, others, rng; state of its node


@dataclass(frozen=True, eq=False)
class Objects:
    """The objects of a run that a user's script holds."""

    model: nn.Module
    optimizer: DecentralizedOptimizer
    others: Mapping[str, Any]  # without those that are None

    def check(self, doing: str, *needed: str) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {self.model!r}")
        for name, thing in self.others.items():
            for method in needed:
                if not callable(getattr(stateful(thing), method, None)):
                    raise TypeError(
                        f"{name} must be an object with {method}(), or a random generator of "
                        f"torch, numpy or Python; got {thing!r}"
                    )
        self.optimizer.runtime.check_between_steps(doing)
        self.optimizer.runtime.reshard()
        check_none_averaged(self.model, doing)

    def names(self) -> dict[Tensor, str]:
        return {p: name for name, p in self.model.named_parameters()}

    def groups(self) -> list[dict[str, Any]]:
        """Return the param groups, with the names that the model has for their parameters."""
        names, groups = self.names(), self.optimizer.param_groups
        for number, p in enumerate(p for group in groups for p in group["params"]):
            if p not in names:
                raise ValueError(
                    f"parameter {number} of the optimizer is not one of the model's, so a "
                    "checkpoint of this model does not hold it; pass the module that has all "
                    "trained parameters"
                )
        return [{**group, "params": [names[p] for p in group["params"]]} for group in groups]


def take(objects: Objects) -> Content:
    """Return all that this process knows but the state of its node. Tensors are not copied, except
    in evaluation: saved is what goes on after optimizer.train()."""
    if objects.optimizer.runtime.evaluating:
        with objects.optimizer.runtime.own_parameters():
            return copied(take(objects))
    objects.check("save a checkpoint", "state_dict")
    model = objects.model.state_dict()
    cuts = cuts_of(model)
    content: Content = {
        "model": _mapped(model, local, lambda value: value) if cuts else model,
        "cuts": cuts,  # the dimension along which tensors of the model are cut into shards
        "groups": objects.groups(),
        "others": take_others(objects),
        "rng": {"cpu": torch.get_rng_state()},
    }
    if torch.cuda.is_initialized():
        content["rng"]["cuda"] = torch.cuda.get_rng_state()
    for name, part in [*content.items(), *content["others"].items()]:
        if name != "others":
            _check_loadable(name, part)
    return content


def take_others(objects: Objects) -> Content:
    """Return the states of the other objects, by name."""
    return {name: stateful(thing).state_dict() for name, thing in objects.others.items()}


def put_others(objects: Objects, states: Content) -> None:
    """Give the other objects these states."""
    for name, thing in objects.others.items():
        stateful(thing).load_state_dict(states[name])


def whole_state(objects: Objects) -> dict[str, Any]:
    """Return the method's own tensors by parameter name; called on all processes together."""
    names, buckets = objects.names(), objects.optimizer.runtime.buckets
    return {
        names[p]: {name: local(view) for name, view in views.items()}
        for bucket in buckets
        for p, views in state.whole_state(bucket)
    }


def joined(parts: Sequence[Content]) -> Content:
    """Return the content of a node from those of its processes, which have shards."""
    first = parts[0]
    for name, dim in first["cuts"].items():
        first["model"][name] = torch.cat([part["model"][name] for part in parts], dim)
        own = first["state"].get(name, {})
        for kind in own:
            own[kind] = torch.cat([part["state"][name][kind] for part in parts], dim)
    return {**first, "cuts": {}}


def cut_for(objects: Objects, content: Content) -> Content:
    """Return the content of a whole node as this process has it: its shards of the parameters."""
    for name, t in objects.model.state_dict().items():
        if is_sharded(t):
            content["model"][name] = cut(content["model"][name], t)
            own = content["state"].get(name, {})
            for kind in own:
                own[kind] = cut(own[kind], t)
    return content


def average(contents: Iterable[Content], number: int) -> Content:
    """Return one content whose floating-point tensors are the mean over all of them.

    Counters and the state of the others are those of process 0.
    """
    first: Content = {}
    sums: list[Tensor] = []
    for content in contents:
        first = first or content
        sums = sums or [torch.zeros_like(t, dtype=torch.float64) for t in _floating(first)]
        for total, tensor in zip(sums, _floating(content), strict=True):
            total.add_(tensor, alpha=1 / number)
    for total, tensor in zip(sums, _floating(first), strict=True):
        tensor.copy_(total)
    return first


def _floating(content: Content) -> Iterator[Tensor]:
    for part in (content["model"], *(content["state"][name] for name in sorted(content["state"]))):
        for value in (part[name] for name in sorted(part)):
            if isinstance(value, Tensor) and value.is_floating_point():
                yield value


def check(objects: Objects, content: Content) -> None:
    """Refuse what does not fit before anything is changed."""
    objects.check("load a checkpoint", "state_dict", "load_state_dict")
    here, groups = _mapped(objects.model.state_dict(), local, lambda v: v), objects.groups()
    try:
        wrong = _differences(content["model"], here)
        if [g["params"] for g in content["groups"]] != [g["params"] for g in groups]:
            wrong.append("the optimizer has the parameters in other groups or in another order")
        held = content["others"].keys()
        if not wrong:
            _check_values(objects, content)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the files are not those of a checkpoint: {error!r}") from error
    if wrong:
        more = [f"and {len(wrong) - 5} more"] if wrong[5:] else []
        raise ValueError(f"the checkpoint is of another model: {'; '.join(wrong[:5] + more)}")
    if absent := sorted(objects.others.keys() - held):
        has = ", ".join(sorted(held)) or "nothing"
        text = f"the checkpoint holds no {', '.join(absent)}; besides model and optimizer it has"
        raise ValueError(f"{text}: {has}")


def _differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    wrong = [f"{name} is not in the checkpoint" for name in here if name not in saved]
    wrong += [f"{name} is not in this model" for name in saved if name not in here]
    both = [(n, saved[n], t) for n, t in here.items() if n in saved and isinstance(t, Tensor)]
    return wrong + [
        f"{name} is {_kind(there)} in the checkpoint, and {_kind(t)} here"
        for name, there, t in both
        if there.is_meta or _kind(there) != _kind(t)
    ]


def _kind(t: Tensor) -> str:
    """Return what a tensor must have like another to be copied into it."""
    more = [] if t.layout is torch.strided and not t.is_meta else [str(t.layout), str(t.device)]
    return " ".join([f"{t.dtype} of shape {tuple(t.shape)}", *more])


def _check_values(objects: Objects, content: Content) -> None:
    """Refuses values that could not be put into the optimizer, or used there."""
    shapes = {name: local(p).shape for name, p in objects.model.named_parameters()}
    for name, buffers in content["state"].items():
        for kind, t in buffers.items():
            dense = t.is_floating_point() and t.layout is torch.strided and not t.is_meta
            if not dense or t.shape != shapes[name]:
                raise TypeError(f"state {kind!r} of {name} is {_kind(t)}")
    for group in content["groups"]:
        if type(group["step"]) is not int or group["step"] < 0:
            raise TypeError(f"step is {group['step']!r}")
        check_values(group)
        objects.optimizer.method.with_hyper(group)
    check_saved(content["groups"], objects.optimizer.param_groups)
    for device, values in content["rng"].items():
        if device == "cpu" or torch.cuda.is_initialized():
            torch.Generator(device).set_state(values)


@torch.no_grad()
def put(objects: Objects, content: Content, rng: bool) -> None:
    """Make model and optimizer continue where the content was taken.

    State that was not saved starts as in a run that begins here. That happens when a run moves
    between one node and several, because some methods keep less on one.
    """
    optimizer = objects.optimizer
    here = objects.model.state_dict()
    saved = {name: like(here[name], t) for name, t in content["model"].items()}
    objects.model.load_state_dict(saved if cuts_of(here) else content["model"])
    optimizer.runtime.fetch()
    numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
    groups = [{**g, "params": n} for g, n in zip(content["groups"], numbers, strict=True)]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    states = {p: content["state"].get(name, {}) for p, name in objects.names().items()}
    for bucket in optimizer.runtime.buckets:
        state.load_whole_state(bucket, states)
    if rng:
        torch.set_rng_state(content["rng"]["cpu"])
        if "cuda" in content["rng"] and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(content["rng"]["cuda"])


def copied(content: Content) -> Content:
    """Return the same in memory of its own, on the CPU: training goes on while it is written."""
    result: Content = _mapped(content, lambda t: t.detach().to("cpu", copy=True), copy.deepcopy)
    return result


def _check_loadable(name: str, part: Any) -> None:
    """Try on everything but the tensors what loading will do: better now than in a week."""
    buffer = io.BytesIO()
    try:
        torch.save(_mapped(part, lambda tensor: None, lambda value: value), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"the state of {name} holds something a checkpoint cannot keep; tensors, numbers, "
            f"strings, lists, tuples and dicts are allowed. torch says: {reason(error)}"
        ) from error


def _mapped(part: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """Return the same with other leaves; dicts keep their kind and what was attached to them."""
    if isinstance(part, Tensor):
        return tensor(part)
    if type(part) in (list, tuple):
        return type(part)(_mapped(value, tensor, other) for value in part)
    if type(part) not in (dict, collections.OrderedDict):
        return other(part)
    result = copy.copy(part)
    for key, value in part.items():
        result[key] = _mapped(value, tensor, other)
    return result

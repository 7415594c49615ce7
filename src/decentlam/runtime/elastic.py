"""elastic=True: what an optimizer does when the members of the run change.

`step()` has completed its step alone when it comes here, and so has every other member. They go on
together at the step of the furthest; who is behind takes the steps between alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import Reach
from decentlam.errors import ExchangeError, LaunchError, MinorityError, RunOverError
from decentlam.exchange.base import forget_unfinished
from decentlam.membership import generations
from decentlam.membership.generations import Membership
from decentlam.membership.store import StoreGoneError
from decentlam.runtime.groups import ParamGroup
from decentlam.runtime.runtime import Runtime
from decentlam.topology import resolve

log = logging.getLogger(__name__)

_ATTEMPTS = 100
_FALLBACK = "ring"  # exists for every number of nodes


def membership() -> Membership:
    """The elastic run that this process takes part in."""
    found = generations.current()
    if found is None or not dist.is_initialized():
        raise LaunchError(
            "elastic=True needs a process group that can change: start with decentlam.launch(fn, "
            "nodes=4, elastic=True), or as docs/survive.md says, and call "
            "decentlam.init(elastic=True) instead of init_process_group"
        )
    return found


def check_same_run(run: Membership, facts: Mapping[str, object]) -> None:
    """A newcomer that trains something else is refused. `init` has joined by then, so the others
    change their members for it, and again when it has gone."""
    mine = {key: repr(value) for key, value in facts.items() if _static(key)}
    run.facts = mine
    if not run.joins:
        if run.generation.members[0] == run.me:
            run.publish("facts", mine)
        return
    theirs = run.read("facts")
    differences = [
        f"{key} is {mine.get(key)}, theirs {theirs.get(key)}"
        for key in {**theirs, **mine}
        if mine.get(key) != theirs.get(key)
    ]
    if differences:
        raise ValueError("this process cannot join the run: " + "; ".join(differences[:5]))


def _static(key: str) -> bool:
    """Whether it stays the same as long as the run lasts."""
    return key.startswith("parameter ") or "of group" not in key


def fitting(topology: str, num_nodes: int) -> str:
    """The topology, or another if it does not exist for that many nodes."""
    try:
        resolve(topology, num_nodes)
    except ValueError as error:
        log.warning("%s; %s runs meanwhile", error, _FALLBACK)
        return _FALLBACK
    return topology


def renew(
    run: Membership, runtime: Callable[[], Runtime | None], settle: Callable[[], None]
) -> None:
    """Goes on with those who are there; `settle` builds a runtime for them. None: a newcomer whose
    first generation ended before it had built one."""
    alone = everyone = False  # of the last step; a runtime that was built since knows nothing of it
    last: ExchangeError | None = None
    for _ in range(_ATTEMPTS):
        now = runtime()
        if now is not None and now.failure is None:
            if not run.troubled:
                return
            now.cut_off(ExchangeError("the members of the run change"))
        step = 0 if now is None else now.index
        if now is not None and step > 0 and now.finished_alone:
            alone, everyone = True, now.algorithm.reach(step - 1) is Reach.EVERYONE
        try:
            run.renew(step, not alone, everyone)
            forget_unfinished()
            settle()
        except (RunOverError, MinorityError):
            raise
        except ExchangeError as error:
            if isinstance(error, StoreGoneError) and not run.can_move:
                raise
            last = error
            log.warning("%s", error)
            run.report(str(error))
            built = runtime()
            if built is not None and built.failure is None:  # nobody may go on with it
                built.cut_off(error)
    text = f"the members of the run changed {_ATTEMPTS} times without a step"
    raise ExchangeError(text if last is None else f"{text}; at last: {last}") from last


@torch.no_grad()
def hand_over(
    run: Membership, runtime: Runtime, groups: Sequence[ParamGroup], buffers: Sequence[Tensor]
) -> None:
    """The source's parameters, state, step and the model's buffers, from process to process, to
    those who need them."""
    generation = run.generation
    runtime.alone_until = generation.step
    if not generation.takers:
        return
    key = f"groups/{generation.number}"
    tensors = [bucket.x for bucket in runtime.buckets]
    tensors += [t for round in runtime.rounds for _, t in sorted(round.shard.state.items())]
    tensors += [p.data for g in groups for p in g["params"] if not p.requires_grad]
    tensors += buffers
    rank = {member: k for k, member in enumerate(generation.members)}
    with runtime.network.errors():
        if run.me == generation.source:
            for group in groups:
                group["step"] = generation.step  # later, if the one who was further is lost
            run.publish(key, [_plain(group) for group in groups])
            for taker in generation.takers:
                for tensor in tensors:
                    dist.send(_sendable(tensor), rank[taker])
        elif run.me in generation.takers:
            received = [_sendable(torch.empty_like(tensor)) for tensor in tensors]
            for tensor in received:
                dist.recv(tensor, rank[generation.source])
            for group, values in zip(groups, run.read(key), strict=True):
                group.update(values)
            for tensor, value in zip(tensors, received, strict=True):  # all of it, or nothing
                tensor.copy_(value)
            run.has_state = True


def _sendable(tensor: Tensor) -> Tensor:
    """As gloo takes it; it has no booleans."""
    return (tensor.byte() if tensor.dtype is torch.bool else tensor).contiguous()


def _plain(group: ParamGroup) -> dict[str, Any]:
    """What can be told of a param group: numbers, such as its lr and step."""
    return {
        name: value
        for name, value in group.items()
        if name not in ("params", "param_names")
        and (value is None or isinstance(value, int | float | str | bool))
    }

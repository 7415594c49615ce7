"""elastic=True: how an optimizer goes on when the members of its run change.

A step that fails has changed nothing. It is taken again alone, and then all members agree on who is
left. They go on together at the step of the furthest; whoever is behind jumps there, and the
batches that it skips are dealt again.
"""

from __future__ import annotations

import io
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from decentlam.algorithms import Algorithm, Reach, State
from decentlam.data import Place
from decentlam.elastic import membership as memberships
from decentlam.elastic.membership import Membership
from decentlam.errors import ExchangeError, LaunchError, MinorityError, RunOverError
from decentlam.exchange.base import forget_unfinished
from decentlam.network.network import Network
from decentlam.network.store import StoreGoneError
from decentlam.runtime.agreement import check_agreement, check_order
from decentlam.runtime.build import start_equal
from decentlam.runtime.param_groups import ParamGroup
from decentlam.runtime.runtime import Runtime
from decentlam.topology import resolve

log = logging.getLogger(__name__)

_ATTEMPTS = 100
_FALLBACK = "ring"  # exists for every number of nodes


class Rebuild(Protocol):
    """Builds the runtime of an optimizer anew on torch's default group, for those who are there."""

    def __call__(self, fitting: Callable[[int], str]) -> Runtime:
        """`fitting` returns the topology for a number of nodes."""


class Recovery:
    """Keeps one optimizer training while members are lost and join."""

    def __init__(
        self,
        optimizer: object,
        groups: Sequence[ParamGroup],
        buffers: Sequence[Tensor],
        topology: str,
        timeout_seconds: float,
        rebuild: Rebuild,
        description: Mapping[str, object],
        more_state: weakref.WeakMethod[Callable[[], dict[str, Any]]],
        take_state: weakref.WeakMethod[Callable[[dict[str, Any]], None]],
    ) -> None:
        self.run = _joined_run()
        if self.run.has_optimizer:
            raise ValueError(
                "this process has an optimizer with elastic=True already, and a run has one: a "
                "second would stay in the process group of members that are gone. Give all "
                "parameters to one optimizer, as param groups, or delete the first"
            )
        self.run.use_optimizer(optimizer)
        self._groups, self._buffers, self._topology = groups, buffers, topology
        self._timeout_seconds, self._rebuild = timeout_seconds, rebuild
        self._description, self._more_state, self._take_state = description, more_state, take_state
        self._runtime: Runtime | None = None

    def start(self) -> None:
        """Take part in the run, whether it begins or is under way."""
        run = self.run
        run.use_position(_position_of(weakref.ref(self)))
        run.description = {k: repr(v) for k, v in self._description.items() if _stays(k)}
        try:
            self._settle()
        except ExchangeError as error:
            log.warning("%s", error)
            run.report(str(error))
            self._renew(0, whole=True, everyone=False)

    def step(self, found_inf: Tensor | None, scale: Tensor | None) -> None:
        """Take a step with whoever is there; if it fails, alone. Then let the members change."""
        runtime = self.runtime
        whole, everyone = True, runtime.algorithm.reach(runtime.index) is Reach.EVERYONE
        try:
            runtime.step(found_inf=found_inf, scale=scale)
        except ExchangeError as error:
            log.warning("a step is finished without neighbors: %s", error)
            runtime.step(found_inf=found_inf, scale=scale, alone=True)
            whole = False
        if self.run.interrupted or not whole:
            self._renew(runtime.index, whole, everyone and not whole)

    @property
    def runtime(self) -> Runtime:
        """The runtime of the members that are there."""
        assert self._runtime is not None
        return self._runtime

    @property
    def place(self) -> Place:
        """The place of this process at its next step."""
        generation = self.run.generation
        node = generation.members.index(self.run.me)
        return Place(self.runtime.index, node, generation.history)

    def _renew(self, step: int, whole: bool, everyone: bool) -> None:
        """Agree with the others on who is left, until a runtime for them is built."""
        run, last = self.run, None
        for _ in range(_ATTEMPTS):
            try:
                run.renew(step, whole, everyone)
                forget_unfinished()
                self._settle()
                step, whole, everyone = self.runtime.index, True, False
                if not run.interrupted:
                    return
            except (RunOverError, MinorityError):
                raise
            except ExchangeError as error:
                if isinstance(error, StoreGoneError) and not run.can_move:
                    raise
                last = error
                log.warning("%s", error)
                run.report(str(error))
        text = f"the members of the run changed {_ATTEMPTS} times without a step"
        raise ExchangeError(text if last is None else f"{text}; at last: {last}") from last

    def _settle(self) -> None:
        """Build the runtime of a new generation, all of its members together."""
        run, generation = self.run, self.run.generation
        # Before all do anything together: newcomers look at it first.
        if run.me == generation.members[0]:
            run.publish("facts", run.description)
        if run.joins and not run.has_state:
            self._check_description(run.read("facts"))
        self._runtime = runtime = self._rebuild(self._fitting)
        if generation.number == 0:
            check_agreement(runtime.network, self._description)
            check_order(runtime.network, self._groups)
        form = {"stable form": f"{runtime.algorithm!r} on {runtime.topology!r}"}
        check_agreement(runtime.network, form)
        run.use_timeout(self._timeout_seconds)
        if generation.number == 0:
            start_equal(runtime, self._groups)
        self._hand_over(runtime)

    def _fitting(self, num_nodes: int) -> str:
        """Return the topology, or another if it does not exist for that many nodes."""
        try:
            resolve(self._topology, num_nodes)
        except ValueError as error:
            log.warning("%s; %s runs meanwhile", error, _FALLBACK)
            return _FALLBACK
        return self._topology

    def _check_description(self, theirs: Mapping[str, str]) -> None:
        """Refuse to join a run that trains something else. `init` has joined by then, so the others
        change their members for it, and again when it has gone."""
        mine = self.run.description
        differences = [
            f"{key} is {mine.get(key)}, theirs {theirs.get(key)}"
            for key in {**theirs, **mine}
            if mine.get(key) != theirs.get(key)
        ]
        if differences:
            raise ValueError("this process cannot join the run: " + "; ".join(differences[:5]))

    @torch.no_grad()
    def _hand_over(self, runtime: Runtime) -> None:
        """Send the source's parameters, state and the model's buffers to those who need them, and
        let everybody go on at the same step."""
        run, generation = self.run, self.run.generation
        takes, gives = run.me in generation.takers, run.me == generation.source
        for group in self._groups:
            group["step"] = generation.step
        if generation.number > 0:
            begin_anew(runtime.algorithm, [bucket.state for bucket in runtime.buckets])
        if not takes and not (gives and generation.takers):
            return
        key = f"groups/{generation.number}"
        tensors = [bucket.x for bucket in runtime.buckets]
        tensors += [t for bucket in runtime.buckets for _, t in sorted(bucket.state.items())]
        tensors += [p.data for g in self._groups for p in g["params"] if not p.requires_grad]
        tensors += self._buffers
        rank = {member: k for k, member in enumerate(generation.members)}
        more_state, take_state = self._more_state(), self._take_state()
        assert more_state is not None and take_state is not None  # the optimizer calls this
        more = more_state() if gives else {}
        with runtime.network.errors():
            if gives:
                run.publish(key, [_plain(group) for group in self._groups])
                for taker in generation.takers:
                    for tensor in [*tensors, *_packed(more)]:
                        dist.send(_sendable(tensor), rank[taker])
                return
            received = [_sendable(torch.empty_like(tensor)) for tensor in tensors]
            for tensor in received:
                dist.recv(tensor, rank[generation.source])
            more = _unpacked(lambda tensor: dist.recv(tensor, rank[generation.source]))
            for group, values in zip(self._groups, run.read(key), strict=True):
                group.update(values)
            for tensor, value in zip(tensors, received, strict=True):  # all of it, or nothing
                tensor.copy_(value)
            if more:
                take_state(more)
            run.has_state = True


def begin_anew(algorithm: Algorithm, states: Iterable[State]) -> None:
    """Clear what adds up to zero only over the members there were."""
    for state in states:
        for name in algorithm.balanced:
            state[name].zero_()


def _position_of(its: weakref.ref[Recovery]) -> Callable[[], int]:
    """Return a function that tells how far the training is."""

    def position() -> int:
        recovery = its()
        runtime = None if recovery is None else recovery._runtime
        return 0 if runtime is None else runtime.position

    return position


def check_network(network: Network, process_group: dist.ProcessGroup | None) -> None:
    """Refuse groups and devices whose members cannot change."""
    if process_group is not None:
        raise ValueError("elastic=True is for all processes; leave process_group out")
    if network.is_nccl or network.device.type == "cuda":
        raise ValueError(
            "elastic=True needs the gloo backend and parameters on the CPU, but they are on "
            f"{network.device}; use model.cpu(), or leave elastic out"
        )


def _joined_run() -> Membership:
    """Return the elastic run that this process takes part in."""
    joined = memberships.current()
    if joined is None or not dist.is_initialized():
        raise LaunchError(
            "elastic=True needs a process group that can change: start with decentlam.launch(fn, "
            "nodes=4, elastic=True), or as docs/survive.md says, and call "
            "decentlam.init(elastic=True) instead of init_process_group"
        )
    return joined


def _stays(key: str) -> bool:
    """Return True for what stays the same as long as the run lasts."""
    return key.startswith("parameter ") or "of group" not in key


def _sendable(tensor: Tensor) -> Tensor:
    """Return the tensor as gloo takes it; it has no booleans."""
    return (tensor.byte() if tensor.dtype is torch.bool else tensor).contiguous()


def _packed(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return any state as bytes, and their number before them."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return torch.tensor([len(content)]), content


def _unpacked(receive: Callable[[Tensor], object]) -> dict[str, Any]:
    """Return the state that `_packed` made bytes of; nothing in it is executed."""
    size = torch.zeros(1, dtype=torch.int64)
    receive(size)
    content = torch.empty(int(size), dtype=torch.uint8)
    receive(content)
    state: dict[str, Any] = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
    return state


def _plain(group: ParamGroup) -> dict[str, Any]:
    """Return what can be told of a param group: numbers, such as its lr and step."""
    return {
        name: value
        for name, value in group.items()
        if name not in ("params", "param_names")
        and (value is None or isinstance(value, int | float | str | bool))
    }

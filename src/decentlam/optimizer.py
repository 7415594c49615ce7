"""DecentralizedOptimizer: torch.optim's contract, around a runtime that does the work."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from decentlam.algorithms import Algorithm, Reach, check_lr, check_number, reaches
from decentlam.errors import ExchangeError
from decentlam.exchange.network import Network, connect, reconnect, saved
from decentlam.membership.deal import Place
from decentlam.membership.generations import Change, Membership
from decentlam.options import OptimizerOptions, Options
from decentlam.runtime import build, elastic, evaluation
from decentlam.runtime.agreement import check_agreement, facts_of
from decentlam.runtime.groups import PAST, check_saved, prepare
from decentlam.runtime.runtime import Runtime
from decentlam.runtime.statistics import StepStatistics
from decentlam.topology import Topology


class DecentralizedOptimizer(Optimizer, Joinable):
    """Runs any `Algorithm` on the processes of a torch.distributed group, one node each.

    Each of the nodes trains on its own data. A step forms a message from parameters and gradients,
    averages it with a few neighbors, and updates the parameters from the average. The method
    classes (`DecentLaM`, `DmSGD`, ...) are this class with their algorithm filled in.

    Args:
        params: Parameters or param groups, as for any torch optimizer.
        algorithm: What a node computes.
        lr: The learning rate.
        options: See `decentlam.options.OptimizerOptions`.

    >>> import torch, decentlam
    >>> model = torch.nn.Linear(3, 1)
    >>> algorithm = decentlam.algorithms.DecentLaM(beta=0.9)
    >>> opt = decentlam.DecentralizedOptimizer(model.parameters(), algorithm, lr=0.1)
    >>> model(torch.ones(2, 3)).sum().backward()
    >>> opt.step()
    """

    _step_supports_amp_scaling = True  # GradScaler then always calls step: neighbors need answers

    def __init__(
        self,
        params: ParamsT,
        algorithm: Algorithm,
        lr: float = 1e-3,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        check_lr(lr)
        weight_decay = check_number("weight_decay", options.pop("weight_decay", 0.0))
        process_group = options.pop("process_group", None)
        self._model = _checked(options.pop("model", None))
        if unknown := sorted(options.keys() - Options.__dataclass_fields__.keys()):
            raise TypeError(
                f"{type(self).__name__} has no argument {', '.join(unknown)}. Of torch.optim.SGD's "
                "it has lr, momentum, nesterov and weight_decay, where the method has them; "
                "decentlam.options.OptimizerOptions lists its own."
            )
        self._options = Options(**cast(dict[str, Any], options))
        self._asked_dtype = self._options.message_dtype  # topology="auto" may choose another
        self._method = algorithm  # as the user named it; what runs may be a stable form of it
        self._runtime: Runtime | None = None
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **algorithm.hyper()})
        Joinable.__init__(self)
        network = build.join(
            self.param_groups, algorithm, self._options, process_group, self._buffers()
        )
        self._tag, self._copied = build.agreed_tag(network, self._options.elastic), False
        self._membership = elastic.membership() if self._options.elastic else None
        if self._membership is not None:
            self._membership.use_optimizer(self)
        if self._membership is not None and self._membership.joins:
            self._enter(self._membership)
            return
        self._shares = build.can_share(self.param_groups, algorithm, self._options, network)
        self._link = build.measured_link(algorithm, self._options, network, self._shares)
        self._build(network, self._options, StepStatistics())
        self._check_same_form()
        if self._membership is not None:
            self._membership.use_timeout(self._options.timeout_seconds)
        build.start_equal(self.runtime, self.param_groups)

    def _build(self, network: Network, options: Options, statistics: StepStatistics) -> None:
        """A runtime on this network; parameters and state stay as they are."""
        before, this = self._runtime, weakref.ref(self)
        self._runtime = build.build(
            self.param_groups,
            self.state,
            self._method,
            options,
            network,
            self._tag,
            shares=self._shares,
            link=self._link,
            statistics=statistics,
            notify=lambda: _notify(this()),
        )
        if before is not None:
            before.close()
        self._options = self._runtime.options
        self._show_state()

    def _enter(self, run: Membership) -> None:
        """Takes part in an elastic run that is under way; if that fails, in its next generation."""
        try:
            self._settle()
        except ExchangeError as error:
            run.report(str(error))
            if self._runtime is not None:
                self._runtime.cut_off(error)
            elastic.renew(run, lambda: self._runtime, self._settle)

    def _settle(self) -> None:
        """With the members of a new generation, all together: the same method, on a topology of as
        many nodes as there are."""
        assert self._membership is not None
        asked = self._options
        exact = Reach.EVERYONE in reaches(self._method)
        device = build.check_parameters(self.param_groups)
        network = connect(exact=exact, device=device)
        self._shares = build.can_share(self.param_groups, self._method, asked, network)
        self._link = None
        assert isinstance(asked.topology, str)
        topology = elastic.fitting(asked.topology, network.num_nodes)
        options = dataclasses.replace(asked, topology=topology)
        statistics = StepStatistics() if self._runtime is None else self.statistics
        self._build(network, options, statistics)
        self._options = asked  # the family that was asked for may fit the next generation
        self._check_same_form()
        self._membership.use_timeout(asked.timeout_seconds)
        elastic.hand_over(self._membership, self.runtime, self.param_groups, self._buffers())

    def _buffers(self) -> list[Tensor]:
        """What newcomers get besides parameters and state."""
        return [] if self._model is None else list(self._model.buffers())

    @property
    def members(self) -> tuple[int, ...]:
        """With elastic=True: the numbers of the processes that take part, in the order of their
        nodes. A number never changes; that of a newcomer is new."""
        if self._membership is None:
            return tuple(range(self.network.num_processes))
        return self._membership.generation.members

    @property
    def place(self) -> Place:
        """Where this process stands at its next step; `decentlam.Deal` gives its samples."""
        step = self.runtime.index
        if self._membership is None:
            return Place(step, self.network.node, (Change(0, self.network.num_nodes),))
        its = self._membership.generation_at(step)
        return Place(step, its.members.index(self._membership.me), its.history)

    def _check_same_form(self) -> None:
        chosen = {"stable form": f"{self.algorithm!r} on {self.topology!r}"}
        check_agreement(self.network, chosen)

    def _check_copied_alike(self) -> None:
        """Before a copy's first message: copies ask nobody when they are made, and one process may
        have made one alone. Messages of other numbers would never meet."""
        if self._copied and not self.runtime.exchange.silent:
            made = {"number of optimizers built or copied before": self._tag // build.TAGS_EACH}
            check_agreement(self.network, made)
            self._copied = False

    def _check_rebuildable(self) -> None:
        """In nodes of several processes the state belongs to buckets, which must stay the same."""
        params = [p for bucket in self.runtime.buckets for p in bucket.params]
        if self.network.processes_per_node > 1 and not all(p.requires_grad for p in params):
            raise ValueError(
                "a parameter was frozen since the optimizer was built; with processes_per_node="
                f"{self.network.processes_per_node} its momentum would be lost. Unfreeze it first, "
                "or save_checkpoint, build a new optimizer and load_checkpoint."
            )

    def _show_state(self) -> None:
        """Shows the flat state as per-parameter views, the form torch saves and loads."""
        for round in self.runtime.rounds:
            for p, views in round.shard.state_views():
                self.state[p] = views

    # What runs -------------------------------------------------------------------------------

    @property
    def runtime(self) -> Runtime:
        """What does the work."""
        assert self._runtime is not None
        return self._runtime

    @property
    def method(self) -> Algorithm:
        """The algorithm as it was asked for."""
        return self._method

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that runs: the method, or a stable form of it."""
        return self.runtime.algorithm

    @property
    def topology(self) -> Topology:
        return self.runtime.topology

    @property
    def network(self) -> Network:
        """Which process is which node."""
        return self.runtime.network

    def use_network(self, network: Network, topology: str | Topology) -> None:
        """Goes on with another network or topology; only between steps, on every node."""
        self.runtime.check_between_steps("change the network")
        if network.processes_per_node != self.network.processes_per_node:
            raise ValueError(
                f"the new network has {network.processes_per_node} processes per node, the old one "
                f"{self.network.processes_per_node}; build a new optimizer to change that"
            )
        self._check_rebuildable()
        if network.is_nccl and network.inter_node_group is None:
            device = build.check_parameters(self.param_groups)
            network = connect(network.group, device=device, batches=True)
        options = dataclasses.replace(
            self._options, topology=topology, message_dtype=self._asked_dtype
        )
        # Where a neighbor died, some nodes may have finished the step and others not.
        step = max(network.gather(self.param_groups[0]["step"]))
        for group in self.param_groups:
            group["step"] = step
        self._link = build.measured_link(self._method, options, network, self._shares)
        self._build(network, options, self.statistics)
        self._check_same_form()

    # torch.optim -----------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the neighbors' messages and updates; with a closure, evaluates it first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.runtime.step(
            found_inf=getattr(self, "found_inf", None),  # both are set by GradScaler.step
            scale=getattr(self, "grad_scale", None),
        )
        if self._membership is not None:
            elastic.renew(self._membership, lambda: self._runtime, self._settle)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        if set_to_none:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None  # without a look at it: an update may still need it
        else:
            self.finish()
            super().zero_grad(set_to_none=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._runtime is None:  # called by torch's own constructor
            super().add_param_group(param_group)
            return
        if self._options.elastic:
            raise ValueError(
                "with elastic=True all param groups are given when the optimizer is built: one "
                "that is added later would be unknown to newcomers. Give parameters that join "
                "later from the start, with requires_grad=True and lr=0 until then"
            )
        self.runtime.check_between_steps("add a param group")
        self._check_rebuildable()
        self.runtime.catch_up()
        self.runtime.recall_messages()
        known = ("step", *PAST)  # of another optimizer, if it was there
        before, runtime = len(self.param_groups), self._runtime
        super().add_param_group({k: v for k, v in param_group.items() if k not in known})
        try:
            build.check_parameters(self.param_groups)
            prepare(self.param_groups, self._method, self.param_groups[0]["step"])
            check_agreement(self.network, facts_of(self._method, self._options, self.param_groups))
            options = self._options
            if build.trained_dtypes(self.param_groups) != {torch.float32}:  # 16 bits: not for these
                options = dataclasses.replace(options, message_dtype=self._asked_dtype)
            self._build(self.network, options, self.statistics)
        except BaseException:
            if self._runtime is runtime:  # nothing has changed
                del self.param_groups[before:]
            raise
        build.start_equal(self.runtime, self.param_groups, before)

    def state_dict(self) -> dict[str, Any]:
        self.runtime.check_state("take the state")
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.runtime.check_between_steps("load a state")
        check_saved(state_dict["param_groups"], self.param_groups)
        self.runtime.recall_messages()
        before = self.param_groups, self.state
        super().load_state_dict(state_dict)  # torch makes new lists of both
        try:
            for round in self.runtime.rounds:
                round.shard.check_state(self.state)
        except BaseException:
            self.param_groups, self.state = before
            raise
        self.runtime.use_groups(self.param_groups)
        for round in self.runtime.rounds:
            round.shard.load_state({p: self.state.get(p, {}) for p in round.bucket.params})
        self._show_state()

    def __getstate__(self) -> dict[str, Any]:
        self.runtime.check_training("copy the optimizer")
        self.runtime.check_state("copy the optimizer")
        return {
            **super().__getstate__(),
            "_options": self._options,
            "_method": self._method,
            "_network": saved(self.network),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = "_options" in state  # unpickled or deep-copied, not load_state_dict
        network = state.pop("_network", None)
        super().__setstate__(state)
        if fresh:
            Joinable.__init__(self)
            self._runtime = None
            self._membership = None
            self._model = None
            # A copy may be one process's own idea: it must not ask others.
            self._shares, self._link = False, None
            self._tag, self._copied = build.next_tag(), True
            self._options = dataclasses.replace(self._options, elastic=False)  # a run has one
            self._asked_dtype = self._options.message_dtype
            device = build.check_parameters(self.param_groups)
            network = reconnect(network, device, Reach.EVERYONE in reaches(self._method))
            self._build(network, self._options, StepStatistics())

    # Beyond torch.optim ------------------------------------------------------------------------

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Inside, backward only accumulates gradients; nothing is sent."""
        return self.runtime.no_sync()

    @contextlib.contextmanager
    def averaged(self, model: nn.Module | None = None) -> Iterator[None]:
        """Inside, parameters and the model's floating buffers are their mean over all nodes.

        Every process must enter. Afterwards everything is restored to the bit.
        """
        self.runtime.check_between_steps("average the model")
        self.runtime.evaluate(model)
        try:
            yield
        finally:
            self.runtime.train()

    def eval(self, model: nn.Module | None = None) -> None:
        """Makes the parameters the mean of all nodes, until `train()`: to evaluate, or to publish.

        The same as `averaged`, in two calls and with the names that trainers made for
        schedule-free optimizers already call. Every process must call both. With `model`, its
        floating buffers are averaged too. A second call changes nothing. Until `train()`,
        backward() and step() are refused; `model.state_dict()` is the averaged model, and
        `save_checkpoint` still writes each node's own.
        """
        self.runtime.evaluate(model)

    def train(self) -> None:
        """Gives the node its own parameters back, to the bit; in training, changes nothing."""
        self.runtime.train()

    def merge(self, model: nn.Module | None = None) -> None:
        """Sets every node to the exact mean of all, parameters and buffers: the end of a run."""
        self.runtime.check_between_steps("merge the nodes")
        self.runtime.recall_messages()
        evaluation.average_(self._flat(), model, self.network)

    def consensus_distance(self) -> float:
        """sqrt of the mean squared distance of the nodes' parameters from their average."""
        self.runtime.check_between_steps("measure the consensus distance")
        return evaluation.consensus_distance(self._flat(), self.network)

    def finish(self) -> None:
        """Completes the last step: every message has arrived and left, every parameter is new.

        Only `overlap="forward"` leaves anything to complete, and whoever reads a parameter
        completes that. Call this before the process group is destroyed: neighbors may still wait
        for messages of this process. `decentlam.init` does it by itself.
        """
        self.runtime.finish()

    @property
    def statistics(self) -> StepStatistics:
        """What the last step cost: time waited, bytes sent, share of the exchange hidden."""
        return self.runtime.statistics

    def memory_bytes(self) -> dict[str, int]:
        """Bytes this process holds for training, by kind."""
        return self.runtime.memory_bytes()

    def _flat(self) -> list[Tensor]:
        return [bucket.x for bucket in self.runtime.buckets]

    # Uneven inputs (torch.distributed.algorithms.Join) -------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self.network.processes_per_node > 1:
            raise ValueError(
                "Join works with one process per node; with processes_per_node="
                f"{self.network.processes_per_node} give every process the same number of batches"
            )
        if self._options.patience_seconds is not None or self._options.elastic:
            given = "elastic=True" if self._options.elastic else "patience_seconds"
            raise ValueError(
                f"Join waits for everyone in every step, which {given} is to avoid; leave one of "
                "them out"
            )
        self._check_copied_alike()  # here, which all processes reach
        return _AnswerNeighbors(self.runtime)

    @property
    def join_device(self) -> torch.device:
        return self.network.control_device

    @property
    def join_process_group(self) -> Any:
        return self.network.group


def _checked(model: object) -> nn.Module | None:
    if model is None or isinstance(model, nn.Module):
        return model
    raise TypeError(f"model must be a torch.nn.Module or None, got {model!r}")


def _notify(optimizer: DecentralizedOptimizer | None) -> None:
    if optimizer is not None:
        Join.notify_join_context(optimizer)
        optimizer._check_copied_alike()


class _AnswerNeighbors(JoinHook):
    """A node without data goes on mixing, with a zero gradient, until all have finished."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def main_hook(self) -> None:
        self._runtime.step(absent=True)
        self._runtime.finish()  # nobody will look at the parameters

"""DecentralizedOptimizer: a torch.optim.Optimizer around the runtime."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from decentlam.algorithms import Algorithm, Reach, check_number, check_period, reaches, shown
from decentlam.data import Change, Place
from decentlam.elastic.recovery import Recovery, check_network
from decentlam.launch.init import init_if_launched
from decentlam.network import heartbeat
from decentlam.network.network import Network, connect, reconnect, saved
from decentlam.options import OptimizerOptions, Options
from decentlam.runtime import build, evaluation
from decentlam.runtime.agreement import check_agreement, describe_run
from decentlam.runtime.param_groups import PAST, ParamGroup, check_saved, prepare
from decentlam.runtime.runtime import Runtime, StepStatistics
from decentlam.runtime.sharded import group_of, is_sharded
from decentlam.runtime.state import check_state, load_state, state_views
from decentlam.topology import Topology

log = logging.getLogger(__name__)


class DecentralizedOptimizer(Optimizer, Joinable):
    """An optimizer that runs any `Algorithm` on the processes of a group, one node each.

    Each node trains on its own data. A step forms a message from parameters and gradients,
    averages it with the neighbors' messages, and updates the parameters from the average. The
    method classes (`DecentLaM`, `DmSGD`, ...) are this class with their algorithm filled in.

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
    _own_defaults: ClassVar[Mapping[str, Any]] = {}  # of options, in a method's class

    def __init__(
        self,
        params: ParamsT,
        algorithm: Algorithm,
        lr: float = 1e-3,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                "algorithm must be an Algorithm, such as decentlam.algorithms.DecentLaM(beta=0.9), "
                f"got {shown(algorithm)}"
            )
        check_number("lr", lr)
        options = cast(OptimizerOptions, {**self._own_defaults, **options})
        weight_decay = check_number("weight_decay", options.pop("weight_decay", 0.0))
        process_group = group_of(options.pop("mesh", None), options.pop("process_group", None))
        model = _checked(options.pop("model", None))
        if unknown := sorted(options.keys() - Options.__dataclass_fields__.keys()):
            raise TypeError(
                f"{type(self).__name__} has no argument {', '.join(unknown)}. Of torch.optim.SGD's "
                "it has lr, momentum, nesterov and weight_decay, where the method has them; "
                "decentlam.options.OptimizerOptions lists its own."
            )
        self._options = Options(**cast(dict[str, Any], options))
        self._method = algorithm  # as the user named it; what runs may be a stable form of it
        self._runtime: Runtime | None = None
        self._recovery: Recovery | None = None
        self._copied = False
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **algorithm.hyper()})
        Joinable.__init__(self)
        device = build.check_parameters(self.param_groups)
        check_period(algorithm)
        prepare(self.param_groups, algorithm)
        buffers = [] if model is None else _buffers(model, self.param_groups)
        names: dict[Tensor, str] = {}
        if model is not None:
            names = {p: name for name, p in model.named_parameters()}
        init_if_launched(device, self._options.elastic)
        if self._options.elastic:
            self._start_elastic(process_group, buffers, names)
            self._announce()
            return
        described = describe_run(algorithm, self._options, self.param_groups, buffers, names)
        network = build.join(self.param_groups, algorithm, self._options, process_group, described)
        self._tag = build.agreed_tag(network)
        self._build(network, self._options, together=True)
        chosen = {"stable form": f"{self.algorithm!r} on {self.topology!r}"}
        check_agreement(network, chosen)
        build.start_equal(self.runtime, self.param_groups)
        self._announce()

    def _announce(self) -> None:
        if log.isEnabledFor(logging.INFO):
            log.info("%s", self.runtime.description(self._method, "step"))

    def _build(self, network: Network, options: Options, together: bool) -> Runtime:
        """Build a runtime on this network; parameters and state stay as they are."""
        before = self._runtime
        self._runtime = build.build(
            self.param_groups,
            self.state,
            self._method,
            options,
            network,
            self._tag,
            together=together,
            statistics=StepStatistics() if before is None else before.statistics,
            before_message=weakref.WeakMethod(self._before_message),
        )
        if before is not None:
            before.close()
        self._show_state()
        return self._runtime

    def _start_elastic(
        self,
        process_group: dist.ProcessGroup | None,
        buffers: Sequence[Tensor],
        names: Mapping[Tensor, str],
    ) -> None:
        """Take part in an elastic run, which builds the runtime whenever its members change."""
        options, groups, this = self._options, self.param_groups, weakref.ref(self)
        check_network(connect(process_group, device=groups[0]["params"][0].device), process_group)
        heartbeat.use_limit(options.heartbeat_seconds)
        if any(is_sharded(p) for group in groups for p in group["params"]):
            raise ValueError(
                "elastic=True is for models that are not sharded: a node whose processes have "
                "shards ends with any of them, and could not be taken out of its mesh. Leave "
                "elastic out, save_checkpoint often, and start again"
            )
        self._tag = build.FIRST_TAG  # newcomers were not there when others could have agreed
        exact = Reach.EVERYONE in reaches(self._method)

        def rebuild(fitting: Callable[[int], str]) -> Runtime:
            optimizer = this()
            assert optimizer is not None
            network = connect(exact=exact)
            topology = fitting(network.num_nodes)
            return optimizer._build(network, replace(options, topology=topology), together=True)

        assert isinstance(options.topology, str)
        self._recovery = Recovery(
            self,
            groups,
            buffers,
            options.topology,
            options.timeout_seconds,
            rebuild,
            describe_run(self._method, options, groups, buffers, names),
            weakref.WeakMethod(self._state_for_newcomers),
            weakref.WeakMethod(self._take_state),
        )
        self._recovery.start()

    def _state_for_newcomers(self) -> dict[str, Any]:
        """Return what newcomers to an elastic run get besides parameters and the method's state."""
        return {}

    def _take_state(self, state: dict[str, Any]) -> None:
        """Take over what `_state_for_newcomers` returned on another process."""

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the processes that take part, in the order of their nodes. A process keeps
        its number; one that joins an elastic run gets a new number."""
        if self._recovery is None:
            return tuple(range(self.network.num_processes))
        return self._recovery.run.generation.members

    @property
    def steps(self) -> int:
        """The number of steps since the run began."""
        return self.runtime.index

    @property
    def place(self) -> Place:
        """The position of this process at its next step, for `decentlam.Deal`."""
        if self._recovery is None:
            return Place(
                self.runtime.index, self.network.node, (Change(0, self.network.num_nodes),)
            )
        return self._recovery.place

    def _before_message(self) -> None:
        """Runs before a step's first message."""
        Join.notify_join_context(self)
        if self._copied:
            self._check_copied_alike()

    def _check_copied_alike(self) -> None:
        """Refuse, before a copy's first message, one that some processes have not made: copies ask
        nobody when they are made, and messages of other numbers would never meet."""
        if self._copied and not self.runtime.exchange.silent:
            made = {"number of optimizers built or copied before": self._tag // build.TAGS_EACH}
            check_agreement(self.network, made)
            self._copied = False

    def _check_rebuildable(self) -> None:
        """Refuse frozen parameters in nodes of several processes, where the state belongs to
        buckets, which must stay the same."""
        params = [p for bucket in self.runtime.buckets for p in bucket.params]
        if self.network.processes_per_node > 1 and not all(p.requires_grad for p in params):
            raise ValueError(
                "a parameter was frozen since the optimizer was built; with processes_per_node="
                f"{self.network.processes_per_node} its momentum would be lost. Unfreeze it first, "
                "or save_checkpoint, build a new optimizer and load_checkpoint."
            )

    def _show_state(self) -> None:
        """Show the flat state as per-parameter views, the form torch saves and loads."""
        for bucket in self.runtime.buckets:
            self.state.update(state_views(bucket))

    @property
    def runtime(self) -> Runtime:
        """The runtime, which takes the steps."""
        assert self._runtime is not None
        return self._runtime

    @property
    def method(self) -> Algorithm:
        """The algorithm that you asked for."""
        return self._method

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that runs: `method`, or a stable form of it."""
        return self.runtime.algorithm

    @property
    def topology(self) -> Topology:
        """The topology: which nodes average at each step."""
        return self.runtime.topology

    @property
    def network(self) -> Network:
        """The network: which process is which node."""
        return self.runtime.network

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the neighbors' messages and update the parameters.

        With a closure, call it first and return its loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Both are set by GradScaler.step.
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if self._recovery is None:
            assert self._runtime is not None
            self._runtime.step(found_inf=found_inf, scale=scale)
        else:
            self._recovery.step(found_inf, scale)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, on every process, between steps."""
        if self._runtime is None:  # called by torch's own constructor
            super().add_param_group(param_group)
            return
        if self._recovery is not None:
            raise ValueError(
                "with elastic=True all param groups are given when the optimizer is built: one "
                "that is added later would be unknown to newcomers. Give parameters that join "
                "later from the start, with requires_grad=True and lr=0 until then"
            )
        self.runtime.check_between_steps("add a param group")
        self._check_rebuildable()
        self.runtime.recall_messages()
        known = ("step", *PAST)  # of another optimizer, if it was there
        before, runtime = len(self.param_groups), self._runtime
        super().add_param_group({k: v for k, v in param_group.items() if k not in known})
        try:
            build.check_parameters(self.param_groups)
            prepare(self.param_groups, self._method, self.param_groups[0]["step"])
            described = describe_run(self._method, self._options, self.param_groups)
            check_agreement(self.network, described)
            self._build(self.network, runtime.options, together=True)
        except BaseException:
            if self._runtime is runtime:  # nothing has changed
                del self.param_groups[before:]
            raise
        build.start_equal(self.runtime, self.param_groups, before)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this node."""
        self.runtime.finish()
        state = super().state_dict()
        for group in state["param_groups"]:
            group["num_nodes"] = self.network.num_nodes
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this node."""
        self.runtime.check_between_steps("load a state")
        saved, here = state_dict["param_groups"][0].get("num_nodes"), self.network.num_nodes
        if saved not in (None, here):
            log.warning(
                "the state is that of one node of %s, and this run has %d; save_checkpoint and "
                "load_checkpoint go on from the average of all nodes",
                *(saved, here),
            )
        check_saved(state_dict["param_groups"], self.param_groups)
        self.runtime.recall_messages()
        before = self.param_groups, self.state
        super().load_state_dict(state_dict)  # torch makes new lists of both
        try:
            for bucket in self.runtime.buckets:
                check_state(bucket, self.state)
        except BaseException:
            self.param_groups, self.state = before
            raise
        self.runtime.use_groups(self.param_groups)
        for bucket in self.runtime.buckets:
            load_state(bucket, {p: self.state.get(p, {}) for p in bucket.wholes})
        self._show_state()

    def __getstate__(self) -> dict[str, Any]:
        self.runtime.check_training("copy the optimizer")
        self.runtime.finish()
        return {
            **super().__getstate__(),
            "_options": self.runtime.options,
            "_method": self._method,
            "_network": saved(self.network),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = "_options" in state  # unpickled or deep-copied, not load_state_dict
        network = state.pop("_network", None)
        super().__setstate__(state)
        if fresh:
            Joinable.__init__(self)
            self._runtime = self._recovery = None
            # A copy may be one process's own idea: it must not ask others, so it shares no memory.
            self._tag, self._copied = build.next_tag(), True
            self._options = replace(self._options, elastic=False)  # a run has one
            device = build.check_parameters(self.param_groups)
            network = reconnect(network, device, Reach.EVERYONE in reaches(self._method))
            self._build(network, self._options, together=False)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward only accumulates gradients and sends nothing."""
        return self.runtime.no_sync()

    @contextlib.contextmanager
    def averaged(self, model: nn.Module | None = None) -> Iterator[None]:
        """Return a context in which parameters and floating buffers are the mean of all nodes.

        The buffers are those of `model`. Every process must enter. On exit each node gets its own
        values back, bitwise.
        """
        self.runtime.check_between_steps("average the model")
        self.runtime.evaluate(model)
        try:
            yield
        finally:
            self.runtime.train()

    def eval(self, model: nn.Module | None = None) -> None:
        """Set the parameters to the mean of all nodes until `train()`, to evaluate or to publish.

        This is `averaged` in two calls, with the names that trainers call for schedule-free
        optimizers. Every process must call both. With `model`, its floating buffers are averaged
        too. Until `train()`, backward() and step() raise an error, `model.state_dict()` is the
        averaged model, and `save_checkpoint` still writes each node's own. A second call does
        nothing.
        """
        self.runtime.evaluate(model)

    def train(self) -> None:
        """Undo `eval`: give the node its own parameters back, bitwise."""
        self.runtime.train()

    def merge(self, model: nn.Module | None = None) -> None:
        """Set parameters and buffers of every node to the mean of all, at the end of a run."""
        self.runtime.check_between_steps("merge the nodes")
        self.runtime.recall_messages()
        self.runtime.reshard()
        evaluation.average_(self.runtime.memory, model, self.network, self.runtime.rates)
        self.runtime.reshard()

    def consensus_distance(self) -> float:
        """Return the root mean square distance of the nodes' parameters from their average."""
        self.runtime.check_between_steps("measure the consensus distance")
        return evaluation.consensus_distance(self.runtime.memory, self.network, self.runtime.rates)

    @property
    def statistics(self) -> StepStatistics:
        """The cost of the last step: time waited, bytes sent, share of the exchange hidden."""
        return self.runtime.statistics

    def join_hook(self, **kwargs: Any) -> JoinHook:
        if self.network.node_group is not None:
            raise ValueError(
                "Join works with one process per node, and here a node has "
                f"{self.network.node_group.size()}; give every process the same number of batches"
            )
        if self._options.elastic:
            raise ValueError(
                "Join waits for everyone in every step, which elastic=True is to avoid; leave one "
                "of them out"
            )
        self._check_copied_alike()  # here, which all processes reach
        return AnswerNeighbors(lambda: self.runtime.step(absent=True))

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


def _buffers(model: nn.Module, groups: Sequence[ParamGroup]) -> list[Tensor]:
    """Return the buffers of the model that is trained; refuse one that is not."""
    if set(model.parameters()).isdisjoint(p for group in groups for p in group["params"]):
        raise ValueError(
            f"model={type(model).__name__} has none of the optimizer's parameters; pass the module "
            "whose parameters() were given, or leave it out"
        )
    return list(model.buffers())


class AnswerNeighbors(JoinHook):
    """A node without data goes on mixing, with a zero gradient, until all have finished."""

    def __init__(self, answer: Callable[[], None]) -> None:
        self.main_hook = answer  # type: ignore[method-assign]

"""Lightning: strategies for Trainer and Fabric that leave the averaging to the optimizer.

`DecentralizedStrategy` and `DecentralizedFabricStrategy` are Lightning's DDP without the wrapper:
they start processes and set samplers in the same way. Each process is a node with its own model.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from decentlam.checkpoint import directory, load_checkpoint, save_checkpoint
from decentlam.checkpoint.all_processes import on_all_processes
from decentlam.data import ResumableLoader
from decentlam.integrations import NodeOptimizer, missing, ours
from decentlam.monitoring import monitor, numbers
from decentlam.network.network import connect
from decentlam.runtime.evaluation import Evaluation

try:
    from lightning.fabric.strategies import DDPStrategy as FabricDDP
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.types import _Stateful
    from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise missing("lightning", error) from error

_COMMON = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "start_method",
}


class DecentralizedStrategy(DDPStrategy):
    """A strategy for Lightning's `Trainer` whose optimizer averages: decentlam's.

    Validation, test and prediction run on the average of all nodes. A checkpoint is Lightning's
    file with the averaged model, and beside it a directory `<file>.nodes` with each node's own
    model, momentum and random numbers: `fit(ckpt_path=...)` goes on to the bit.

    Args:
        options: accelerator, parallel_devices, cluster_environment, checkpoint_io,
            precision_plugin, process_group_backend, timeout, start_method: as for DDPStrategy.
    """

    def __init__(self, **options: Any) -> None:
        _check_options(options, _COMMON | {"precision_plugin"})
        super().__init__(**options)
        self._evaluation = Evaluation()  # of trainer.test() and the like, which have no optimizer
        self._loaded_from = Path()

    # Setup -----------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True makes every node wait for all others in every forward. Leave "
                "it out: evaluation averages the batch norm's statistics over the nodes."
            )
        # Not DDPStrategy's: that gives everyone the model of process 0 before a test.
        super(ParallelStrategy, self).setup(trainer)

    def configure_ddp(self) -> None:
        """Nothing: DDP around the model would average the gradients of all nodes."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            _check_optimizer(optimizer, "return one from configure_optimizers")
            if getattr(self.precision_plugin, "scaler", None) is None:
                # Else Lightning does not clip: it believes that step() has to unscale first.
                optimizer._step_supports_amp_scaling = False
        if trainer.loggers and self.optimizers:
            monitor(self.optimizers[0], functools.partial(_log, trainer))

    def block_backward_sync(self) -> Any:
        """Around every backward but the last of a step, when gradients are accumulated."""
        return _no_sync(self.optimizers)

    # Evaluation ------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        module = self.lightning_module
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._average_optimizers()
        else:
            params = [p.data for p in module.parameters()]
            self._evaluation.enter(params, module, connect(None, device=self.root_device))

    def _average_optimizers(self) -> None:
        for number, optimizer in enumerate(self.optimizers):
            optimizer.eval(self.lightning_module if number == 0 else None)  # its buffers once

    def _train(self) -> None:
        for optimizer in self.optimizers:
            optimizer.train()
        self._evaluation.leave()

    on_validation_start = on_test_start = on_predict_start = _evaluate
    on_validation_end = on_test_end = on_predict_end = _train

    # Checkpoints -----------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The averaged model; every process calls this."""
        if not self.optimizers or self.optimizers[0].runtime.evaluating:
            return copy.deepcopy(self.lightning_module.state_dict())
        self._average_optimizers()
        try:
            return copy.deepcopy(self.lightning_module.state_dict())
        finally:
            self._train()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing for the one file: every node has its own."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        if "optimizer_states" in checkpoint:  # else weights only
            self._end_epochs(checkpoint)
            checkpoint["decentlam"] = {"steps": [o.steps for o in self.optimizers]}
            with contextlib.ExitStack() as stack:
                for optimizer in self.optimizers:  # all: each saves the whole model
                    stack.enter_context(optimizer.runtime.own_parameters())
                for number, optimizer in enumerate(self.optimizers):
                    save_checkpoint(
                        _nodes(filepath) / f"optimizer-{number}",
                        model=self.lightning_module,
                        optimizer=optimizer,
                        precision=self._scaler(),
                        keep=2,  # a file that is there still needs its own
                    )
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _end_epochs(self, checkpoint: dict[str, Any]) -> None:
        """Lightning takes the last batch of an epoch and does not ask for another, so a
        ResumableLoader does not know yet that the epoch is over."""
        loop = self.lightning_module.trainer.fit_loop
        states = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        if states and loop.epoch_loop.batch_progress.is_last_batch:
            loaders = [x for x in loop._combined_loader.flattened if isinstance(x, _Stateful)]
            for loader, state in zip(loaders, states, strict=True):
                if isinstance(loader, ResumableLoader) and state["batches"] > 0:
                    state.update(epoch=state["epoch"] + 1, batches=0)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        self._loaded_from = _nodes(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Each node's own model, optimizer and random numbers; the file has given the rest."""
        if "decentlam" not in checkpoint:
            raise ValueError(
                "the checkpoint was not saved by DecentralizedStrategy, so it has the optimizer "
                "of one process. Start a new run from its model: "
                "YourModule.load_from_checkpoint(path), then fit without ckpt_path."
            )
        for number, optimizer in enumerate(self.optimizers):
            place = self._loaded_from / f"optimizer-{number}"
            step = checkpoint["decentlam"]["steps"][number]
            # The newest may be of a step whose file was not written any more.
            find = functools.partial(directory.locate, place, step)
            load_checkpoint(
                on_all_processes(optimizer.network, find),
                model=self.lightning_module,
                optimizer=optimizer,
                precision=self._scaler(),
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_nodes(filepath), ignore_errors=True)

    def _scaler(self) -> Any:
        """The precision plugin if it has a state: the scale of a GradScaler is a node's own."""
        return self.precision_plugin if self.precision_plugin.state_dict() else None


class DecentralizedFabricStrategy(FabricDDP):
    """A strategy for Lightning's `Fabric` whose optimizer averages: decentlam's.

    `fabric.save` and `fabric.load` write and read a directory with all nodes.
    """

    def __init__(self, **options: Any) -> None:
        _check_options(options, _COMMON | {"precision"})
        super().__init__(**options)
        self._optimizers: list[NodeOptimizer] = []
        self._backward_sync_control = _NoSync(self._optimizers)

    def setup_module(self, module: nn.Module) -> nn.Module:
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self._optimizers.append(_check_optimizer(optimizer, "build one"))
        return optimizer

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if storage_options is not None or filter:
            raise ValueError("fabric.save here takes a path and a state; filter is not possible")
        model, optimizer, rest = _parts(state)
        save_checkpoint(path, model=model, optimizer=optimizer, fabric=rest)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not isinstance(state, dict):
            raise ValueError(
                "fabric.load needs the dict of objects that fabric.save got: "
                'fabric.load(path, {"model": model, "optimizer": optimizer})'
            )
        model, optimizer, rest = _parts(state)
        load_checkpoint(path, model=model, optimizer=optimizer, fabric=rest)
        return {}


class _NoSync(_BackwardSyncControl):
    """`fabric.no_backward_sync`: a backward that only accumulates."""

    def __init__(self, optimizers: list[NodeOptimizer]) -> None:
        self._optimizers = optimizers

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:
        return _no_sync(self._optimizers) if enabled else contextlib.nullcontext()


class _Rest:
    """The rest of a Fabric state besides model and optimizer: objects with a state, and values."""

    def __init__(self, state: dict[str, Any], names: list[str]) -> None:
        self._state, self._names = state, names

    def state_dict(self) -> dict[str, Any]:
        found = {name: self._state[name] for name in self._names}
        return {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in found.items()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if sorted(saved) != sorted(self._names):
            raise ValueError(f"the checkpoint holds {sorted(saved)}, the state {self._names}")
        for name, value in saved.items():
            if hasattr(self._state[name], "load_state_dict"):
                self._state[name].load_state_dict(value)
            else:
                self._state[name] = value


def _parts(state: dict[str, Any]) -> tuple[nn.Module, NodeOptimizer, _Rest]:
    models = {k: v for k, v in state.items() if isinstance(v, nn.Module)}
    optimizers = {k: v for k, v in state.items() if isinstance(v, NodeOptimizer)}
    if len(models) != 1 or len(optimizers) != 1:
        raise ValueError(
            "the state needs one model and one optimizer of decentlam, it has "
            f"{len(models)} and {len(optimizers)}; put several models into one nn.ModuleDict"
        )
    names = [name for name in state if name not in models | optimizers]
    return *models.values(), *optimizers.values(), _Rest(state, names)  # type: ignore[return-value]


def _log(trainer: Any, record: dict[str, Any]) -> None:
    """Hand the numbers of a record to Lightning's own loggers, which write on process 0."""
    if values := numbers(record):
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)


def _nodes(filepath: Any) -> Path:
    """The directory of the nodes' own states, beside Lightning's file; behind a link, beside its
    target."""
    return Path(f"{directory.local(filepath)}.nodes")


@contextlib.contextmanager
def _no_sync(optimizers: Iterable[NodeOptimizer]) -> Generator[None, None, None]:
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.no_sync())
        yield


def _check_options(options: dict[str, Any], allowed: set[str]) -> None:
    refused = sorted(options.keys() - allowed)
    if refused:
        raise TypeError(
            f"{', '.join(refused)}: no option of a decentralized strategy, which has no "
            f"DistributedDataParallel to pass it to; choose from {', '.join(sorted(allowed))}"
        )


def _check_optimizer(optimizer: Optimizer, how: str) -> NodeOptimizer:
    cure = f"Use an optimizer of decentlam: {how}, for instance"
    return ours(optimizer, "strategy", f"{cure} decentlam.DecentLaM(model.parameters(), lr=0.1)")

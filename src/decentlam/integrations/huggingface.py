"""Hugging Face: a Trainer that leaves the averaging to the optimizer."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from decentlam.checkpoint import load_checkpoint, save_checkpoint
from decentlam.integrations import NodeOptimizer, missing, ours
from decentlam.monitoring import monitor, numbers
from decentlam.optim import AdamW, DecentLaM
from decentlam.optimizer import DecentralizedOptimizer

try:
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise missing("huggingface", error) from error

log = logging.getLogger(__name__)

_NODES = "nodes"  # in the directory of a checkpoint


class DecentralizedTrainer(Trainer):
    """transformers.Trainer for an optimizer of decentlam: each process is a node of its own.

        trainer = DecentralizedTrainer(model, args, train_dataset=data)

    `TrainingArguments(optim="adamw_torch")`, the default, builds `decentlam.AdamW`, and "sgd"
    builds `decentlam.DecentLaM`, with the learning rate, weight decay and betas that are set there.
    `optimizer_cls_and_kwargs=(decentlam.AdamW, {"topology": "ring"})` names another optimizer or
    gives it options.

    The model is not wrapped in DDP. Evaluation, prediction and saved models are of the average of
    all nodes. A checkpoint also has a directory `nodes` with each node's own model, momentum and
    schedule, from which `train(resume_from_checkpoint=...)` goes on. All arguments are Trainer's.
    """

    optimizer_cls_and_kwargs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._monitored, self._numbers = False, dict[str, float]()
        super().__init__(*args, **kwargs)
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "DeepSpeed and FSDP shard one model over all processes; here every process has a "
                "model of its own. Use one or the other."
            )
        if self.args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True starts anew when one process runs out of memory, and "
                "the others would wait for it. Set per_device_train_batch_size yourself."
            )
        if self.args.max_grad_norm is None:
            self.args.max_grad_norm = 0.0  # the same, but Trainer compares it with a number
        if self.args.average_tokens_across_devices:
            # A collective at every step; a node's loss is the mean over its own tokens.
            self.args.average_tokens_across_devices = False
            log.info("average_tokens_across_devices is off: nodes do not wait for each other")

    @property
    def node_optimizer(self) -> NodeOptimizer:
        """The optimizer without Accelerate's wrapper."""
        return ours(
            getattr(self.optimizer, "optimizer", self.optimizer),
            "Trainer",
            "Leave it out, and TrainingArguments(optim='adamw_torch') builds decentlam.AdamW; or "
            "pass optimizer_cls_and_kwargs=(decentlam.DecentLaM, {'lr': 0.1})",
        )

    # Training --------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model
        # Everything that prepare does for training, but DDP around the model.
        self.accelerator.prepare_model = functools.partial(prepare, evaluation_mode=True)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None:
            kind, options = self.optimizer_cls_and_kwargs or _named(self.args)
            self.optimizer_cls_and_kwargs = kind, _completed(options, self.args)
        optimizer = super().create_optimizer(*args, **kwargs)
        if not self._monitored:
            self._monitored = True
            monitor(self.node_optimizer, lambda record: self._numbers.update(numbers(record)))
        clips, mode = self.args.max_grad_norm > 0, self.node_optimizer.runtime.overlap.mode
        if clips and mode != "none":
            raise ValueError(
                f"TrainingArguments(max_grad_norm={self.args.max_grad_norm}) clips gradients after "
                f"backward, but with overlap={mode!r} they have been sent by then. Build the "
                "optimizer with overlap='none', or set max_grad_norm=0."
            )
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as Trainer does, with the newest numbers of `decentlam.monitor` beside the loss."""
        super().log({**logs, **(self._numbers if "loss" in logs else {})}, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            if not self.accelerator.sync_gradients:  # all backwards of a step but the last
                stack.enter_context(self.node_optimizer.no_sync())
            return super().training_step(*args, **kwargs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Without Trainer's clip to infinity, which writes gradients that may be on their way."""
        if grad_norm is None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            return torch.nn.utils.get_total_norm(grads)
        return super()._get_grad_norm(model, grad_norm)

    # The averaged model ----------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is not None:
            self.node_optimizer.eval(self.model)  # Trainer's own call leaves buffers out
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the average of all nodes; every process must call this."""
        if self.optimizer is None or self.node_optimizer.runtime.evaluating:
            super().save_model(*args, **kwargs)
        else:
            with self.node_optimizer.averaged(self.model):
                super().save_model(*args, **kwargs)

    # Checkpoints -----------------------------------------------------------------------------

    def _others(self) -> dict[str, Any]:
        return {"scheduler": self.lr_scheduler, "scaler": getattr(self.accelerator, "scaler", None)}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(
            os.path.join(output_dir, _NODES),
            model=self.model,
            optimizer=self.node_optimizer,
            keep=1,
            **self._others(),
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        place = os.path.join(checkpoint, _NODES)
        if not os.path.isdir(place):
            raise FileNotFoundError(
                f"{checkpoint} has no directory {_NODES!r}, so it was not saved by "
                "DecentralizedTrainer, or with save_only_model=True. To start a new run from its "
                "model, pass AutoModel....from_pretrained(checkpoint) and do not resume."
            )
        load_checkpoint(place, model=self.model, optimizer=self.node_optimizer, **self._others())

    def _save_scaler(self, output_dir: str) -> None:
        """Saved with its node."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Loaded with its node."""


def _named(args: TrainingArguments) -> tuple[type[DecentralizedOptimizer], dict[str, Any]]:
    """Return our counterpart of the optimizer that TrainingArguments name."""
    name = str(getattr(args.optim, "value", args.optim))
    if name in ("adamw_torch", "adamw_torch_fused", "adamw_hf"):
        betas = (args.adam_beta1, args.adam_beta2)
        return AdamW, {"betas": betas, "eps": args.adam_epsilon}
    if name == "sgd":
        return DecentLaM, {}
    raise ValueError(
        f"TrainingArguments(optim={name!r}) has no counterpart in decentlam; use "
        "optim='adamw_torch' or 'sgd', or pass optimizer_cls_and_kwargs=(decentlam.AdamW, {})"
    )


def _completed(options: Mapping[str, Any], args: TrainingArguments) -> dict[str, Any]:
    """Return an optimizer's options with what TrainingArguments say of them."""
    usual = TrainingArguments.__dataclass_fields__["learning_rate"].default
    lr = options.get("lr", args.learning_rate)
    if lr != args.learning_rate and args.learning_rate != usual:
        raise ValueError(
            f"two learning rates: lr={lr} in optimizer_cls_and_kwargs and learning_rate="
            f"{args.learning_rate} in TrainingArguments. Set one of them"
        )
    completed = {**options, "lr": lr}
    if args.max_grad_norm > 0:  # clips when messages would have left
        completed.setdefault("overlap", "none")
    return completed

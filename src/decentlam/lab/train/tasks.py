"""The interface between the training loop and what it trains: classification or detection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from decentlam.lab.recipes import Recipe

Batch = Any  # of one node, as `train_batch` makes it
Outcome = Any  # what a model did on a test batch; plain values that processes can send each other
Scores = dict[str, float | None]


@dataclass(frozen=True)
class Numerics:
    """The device and precision of a run: float32, float64, or float32 with the forward pass in
    bfloat16 where that is safe."""

    precision: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.precision == "bfloat16" else None

    def model(self, model: nn.Module) -> nn.Module:
        return model.to(self.device, self.dtype)

    def inputs(self, inputs: Tensor) -> Tensor:
        """Move the inputs to the device; floating-point ones take the precision of the run."""
        dtype = self.dtype if inputs.is_floating_point() else inputs.dtype
        return inputs.to(self.device, dtype, non_blocking=True)

    def autocast(self) -> AbstractContextManager[object]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast_dtype)


class Task(Protocol):
    """A task: from data to batches, from a batch to a loss, from a model to its scores."""

    @property
    def main(self) -> str:
        """The name of the main score in records."""

    @property
    def data(self) -> Any:
        """A `Source` with `labels`, one for each training sample: shards are sorted by them."""

    @property
    def notes(self) -> list[str]:
        """Return what a user should know of the data before training starts."""

    def pieces(self, batch: Batch, size: int | None) -> list[tuple[Batch, float]]:
        """Split the batch into pieces of so many samples, each with its share of them."""

    def model(self) -> nn.Module:
        """Return the initial model, the same on every node."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean over the samples, one number to call `backward` on."""

    def test_batches(self, workers: int) -> Iterator[Any]: ...

    def score(self, model: nn.Module, batch: Any) -> Outcome:
        """Return what the model does on a test batch; it is left in evaluation mode."""

    def numbers(self, outcomes: Sequence[Outcome]) -> Scores:
        """Return the scores of a model from what it did on all test batches, in any order."""


def make_task(recipe: Recipe, numerics: Numerics) -> Task:
    """Make the task of a recipe, its data read and checked."""
    if recipe.task == "detection":
        from decentlam.lab.detection.task import Detection

        return Detection.of(recipe, numerics)
    from decentlam.lab.train.classification import Classification

    return Classification.of(recipe, numerics)

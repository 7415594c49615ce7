"""What the training loop trains, classification or detection, and in which precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from decentlam.lab.recipes import Recipe

if TYPE_CHECKING:
    from decentlam.lab.detection.task import Detection
    from decentlam.lab.train.classification import Classification

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

    def model(self, model: nn.Module) -> nn.Module:
        return model.to(self.device, self.dtype)

    def inputs(self, inputs: Tensor) -> Tensor:
        """Move the inputs to the device; floating-point ones take the precision of the run."""
        dtype = self.dtype if inputs.is_floating_point() else inputs.dtype
        return inputs.to(self.device, dtype, non_blocking=True)

    def autocast(self) -> torch.autocast:
        enabled = self.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)


# Both have the same attributes and methods; those of Classification are described.
Task: TypeAlias = "Classification | Detection"


def make_task(recipe: Recipe, numerics: Numerics) -> Task:
    """Make the task of a recipe, its data read and checked."""
    if recipe.task == "detection":
        from decentlam.lab.detection.task import Detection

        return Detection.of(recipe, numerics)
    from decentlam.lab.train.classification import Classification

    return Classification.of(recipe, numerics)

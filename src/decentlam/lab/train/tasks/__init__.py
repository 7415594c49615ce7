"""Tasks: what a batch, a loss and a score are. One training loop serves them all."""

from __future__ import annotations

from decentlam.lab.recipes import Recipe
from decentlam.lab.train.numerics import Numerics
from decentlam.lab.train.tasks.base import Task as Task
from decentlam.lab.train.tasks.classification import Classification
from decentlam.lab.train.tasks.detection import Detection


def make_task(recipe: Recipe, numerics: Numerics) -> Task:
    """The task of a recipe, its data read and checked."""
    kind = Detection if recipe.task == "detection" else Classification
    return kind.of(recipe, numerics)

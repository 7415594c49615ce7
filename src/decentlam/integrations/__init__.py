"""Thin adapters for other people's trainers; the rest of the library does not know them."""

from __future__ import annotations

from typing import Any

from decentlam.local_steps import LocalSteps
from decentlam.optimizer import DecentralizedOptimizer

NodeOptimizer = DecentralizedOptimizer | LocalSteps


def missing(extra: str, error: ImportError) -> ImportError:
    """Return the error for a framework that cannot be imported."""
    return ImportError(
        f"decentlam.integrations.{extra} needs {error.name or extra}, which is not installed; "
        f"install it with `pip install decentlam[{extra}]`, or in a checkout with "
        f"`pip install '.[{extra}]'`"
    )


def ours(optimizer: Any, trainer: str, cure: str) -> NodeOptimizer:
    """Return the optimizer if it averages; the trainer does not."""
    if isinstance(optimizer, NodeOptimizer):
        return optimizer
    raise TypeError(
        f"{type(optimizer).__name__} does not average with other nodes, and this {trainer} does "
        f"not either: each process would train alone. {cure}."
    )

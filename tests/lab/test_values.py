"""Errors that a run can end with, in a line."""

from __future__ import annotations

import pytest

from decentlam.errors import LaunchError
from decentlam.lab.values import explained


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (MemoryError("1 GB"), "out of memory: 1 GB; try a smaller --batch or --micro-batch"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: Default"),
        (LaunchError("node 1 was killed"), "node 1 was killed"),
        (RuntimeError("a bug"), ""),
    ],
)
def test_what_is_no_bug_is_said_in_a_line(error: Exception, text: str) -> None:
    assert (explained(error) or "").startswith(text) and bool(explained(error)) == bool(text)

"""What every test process sets before the first test."""

from __future__ import annotations

import os
import signal

import pytest

# One thread each: processes of several threads, for tensors this small, only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite that a shell runs in the background ignores SIGINT, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, the longest first, so that no worker is left alone with one of them.
# Whoever adds a file that takes more than some ten seconds puts it here.
LONGEST = [
    "optimizer_parity", "batched", "optimizer_nodes", "runtime", "emulation", "launch_command",
    "launchers", "launch", "forward", "differences", "train", "detection_train", "examples",
    "optimizer_deaths",
    "cli", "last_step", "studies", "optimizer_models", "stability", "mistakes", "finite_time",
    "lab", "elastic", "detection_study", "algorithms_reference", "predict", "train_command",
    "worker",
    "shared_memory", "pieces", "soak", "optimizer_gradients", "optimizer_torch",
    "algorithms_special_cases", "module",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order, if asked for with --no-loadscope-reorder."""
    place = {f"test_{name}": k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))

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
    "optimizer_nodes", "optimizer_parity", "differences", "batched", "cli", "stability", "forward",
    "runtime", "emulation", "launch_command", "launchers", "optimizer_models", "lab", "train",
    "studies", "finite_time", "detection_train", "optimizer_deaths", "predict", "launch",
    "last_step", "algorithms_reference", "models", "optimizer_gradients", "imports", "fuzz",
    "mistakes", "examples", "elastic", "pieces", "docs_pages", "patience", "cost_calibration",
    "train_command", "detection_study", "checkpoint_files", "optimizer_torch", "cost_choice",
    "shared_memory", "checkpoint", "algorithms_special_cases", "topology", "soak",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order, if asked for with --no-loadscope-reorder."""
    place = {f"test_{name}": k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))

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
    "optimizer_nodes", "differences", "optimizer_parity", "stability", "runtime", "emulation",
    "launch_command", "launchers", "cli", "optimizer_deaths", "train", "optimizer_gradients",
    "store_moves", "forward", "finite_time", "batched", "pieces", "lab", "studies", "elastic",
    "optimizer_models", "mistakes", "algorithms_special_cases", "detection_train", "patience",
    "surroundings", "topology", "predict", "optimizer_torch", "fuzz", "module",
    "algorithms_reference", "checkpoint", "cost_choice", "optimizer_state", "docs_pages",
    "shared_memory", "optimizer_several", "optimizer_evaluation", "watch", "launch",
    "checkpoint_files", "last_step", "imports", "theory", "cost_calibration", "soak", "models",
    "optimizer_batches", "examples", "train_command", "detection_study",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order, if asked for with --no-loadscope-reorder."""
    place = {f"test_{name}": k for k, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONGEST)))

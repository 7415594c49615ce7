"""What every test process sets before the first test."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# One thread each: processes of several threads, for tensors this small, only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A suite that a shell runs in the background ignores SIGINT, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The files that take longest, the longest first, so that no worker is left alone with one of them.
# Whoever adds a file that takes more than some ten seconds puts it here.
LONGEST = [
    "runtime/test_runtime", "elastic/test_runs", "runtime/test_checks", "exchange/test_neighbors",
    "network/test_heartbeat", "test_optimizer_in_processes", "runtime/test_sharded",
    "runtime/test_models", "local_steps/test_local_steps", "runtime/test_overlap",
    "runtime/test_nodes", "lab/train/test_run", "local_steps/test_elastic", "checkpoint/test_run",
    "exchange/test_rounded", "lab/commands/test_app", "lab/detection/test_task",
    "runtime/test_bucket", "checkpoint/test_directory", "runtime/test_groups",
    "checkpoint/test_all_processes", "analysis/test_stability", "test_docs_pages",
    "runtime/test_evaluation", "network/test_waiting", "exchange/test_shared_memory",
    "runtime/test_statistics", "topology/test_finite", "algorithms/test_reference", "test_imports",
    "launch/test_init", "launch/test_local", "simulation/test_module", "test_fuzz",
]  # fmt: skip
ROOT = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order, if asked for with --no-loadscope-reorder."""
    place = {name: k for k, name in enumerate(LONGEST)}

    def order(item: pytest.Item) -> int:
        within = item.path.is_relative_to(ROOT)
        name = item.path.relative_to(ROOT).with_suffix("").as_posix() if within else ""
        return place.get(name, len(LONGEST))

    items.sort(key=order)

"""The versions of code and libraries that a study or a training run records."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

import decentlam


def versions(**more: str) -> dict[str, str | None]:
    return {
        "decentlam": decentlam.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **more,
    }


def commit() -> str | None:
    """Return the commit of this source tree, if it is a git checkout of decentlam."""
    here = Path(__file__)
    command = f"git ls-files --error-unmatch {here.name} >&2 && git rev-parse HEAD"
    try:
        found = subprocess.run(
            ["sh", "-c", command], cwd=here.parent, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None

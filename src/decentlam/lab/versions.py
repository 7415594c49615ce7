"""The versions of code and libraries that a study or a training run records."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

import decentlam


def versions(**more: str) -> dict[str, str | None]:
    """Return them, with the commit if this source tree is a git checkout of decentlam."""
    here = Path(__file__)
    command = f"git ls-files --error-unmatch {here.name} && git rev-parse HEAD"
    found = subprocess.run(["sh", "-c", command], cwd=here.parent, capture_output=True, text=True)
    return {
        "decentlam": decentlam.__version__,
        "commit": None if found.returncode else found.stdout.split()[-1],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        **more,
    }

"""What tests on emulated networks share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import decentlam


def left_of(pid: int) -> list[str]:
    """Namespaces of a process, and their files."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    files = [path.name for path in Path("/etc/netns").glob(f"dlam-{pid}-*")]
    return [n for n in listed.split() if n.startswith(f"dlam-{pid}-")] + files


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    paths = [str(Path(__file__).parent), str(Path(decentlam.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

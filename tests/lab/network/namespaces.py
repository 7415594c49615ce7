"""What a process leaves of its emulated hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path


def left_of(pid: int) -> list[str]:
    """Return the namespaces of a process, and their files."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    files = [path.name for path in Path("/etc/netns").glob(f"dlam-{pid}-*")]
    return [n for n in listed.split() if n.startswith(f"dlam-{pid}-")] + files

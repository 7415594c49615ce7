"""Compiles loops.c when the package is installed from source, where there is a C compiler.

    pip install .                            # compiled if `cc` is there, else without
    DECENTLAM_LOOPS=1 pip install .          # compiled, or an error
    DECENTLAM_LOOPS=0 pip wheel .            # the wheel for everyone: no compiler, any machine

A wheel with the library is for this kind of machine, and for every Python: it needs nothing of it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PLACE = Path("src", "decentlam", "algorithms")
SOURCES = ("loops.c", "loops.h")
LIBRARY = "loops.library"
# Numbers must not depend on the processor, and NaN must be found.
EXACT = ["-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS = ["-std=c11", "-O3", *EXACT, "-fPIC", "-shared"]


class CompiledLoops(BuildHookInterface):
    """Only an editable install writes into the source tree; what is there is in no wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get("DECENTLAM_LOOPS", "")
        if wanted not in ("", "0", "1"):
            raise ValueError(f"DECENTLAM_LOOPS is {wanted!r}; allowed are 0 and 1")
        sources = Path(self.root) / PLACE
        self._temporary = tempfile.TemporaryDirectory()
        place = sources if version == "editable" else Path(self._temporary.name)
        try:
            if version == "editable":
                (place / LIBRARY).unlink(missing_ok=True)
            if wanted == "0":
                return
            build(sources, place / LIBRARY)
        except (OSError, subprocess.SubprocessError) as error:
            if wanted == "1":
                told = getattr(error, "stderr", None) or str(error)
                raise RuntimeError(f"DECENTLAM_LOOPS=1 was asked for, but: {told}") from error
            return
        if version != "editable":
            inside = f"decentlam/algorithms/{LIBRARY}"
            build_data["force_include"][str(place / LIBRARY)] = inside
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self._temporary.cleanup()


def build(sources: Path, library: Path) -> None:
    """Raises if there is no compiler, or it refuses."""
    digest = hashlib.sha256(b"".join((sources / name).read_bytes() for name in SOURCES)).hexdigest()
    compiler = os.environ.get("CC", "cc").split()
    made = library.with_suffix(f".{os.getpid()}")
    command = [*compiler, *FLAGS, f'-DDIGEST="{digest}"', str(sources / SOURCES[0])]
    subprocess.run(
        [*command, "-o", str(made)],
        check=True,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )
    made.replace(library)  # whole, or not at all

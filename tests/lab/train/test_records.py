"""The run directory: one run at a time, and one that can be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from decentlam.lab.train import records
from tests.lab.helpers import recipe

HOLD = """
import fcntl, sys
with open(sys.argv[1], "a") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_do_not_write_to_one_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    options = records.RunOptions(recipe(), tmp_path, simulate=True)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        claim = records.claimed(options)
        with pytest.raises(ValueError, match="another run is writing to"), claim:
            pass
        other.kill()
    with records.claimed(options):
        pass


@pytest.mark.parametrize("text", ["{}", "", "[1]", '{"recipe": 1}'])
def test_a_run_directory_that_tells_nothing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / records.RUN).write_text(text)
    with pytest.raises(ValueError, match=r"run\.json is damaged or of another version"):
        records.read_recipe(tmp_path)

"""A death in the midst of what all processes do together; two runs that write to one directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import runs
import runs_deaths
import runs_train

from decentlam.checkpoint import directory
from decentlam.lab.train import records

pytestmark = pytest.mark.timeout(200)


@pytest.mark.parametrize("kind", ["averaged", "merge", "consensus_distance", "checkpoint"])
def test_a_death_in_a_collective_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    results = runs.run_processes(runs_deaths.in_collective, 3, (kind, str(tmp_path)), 100)
    assert results[runs_deaths.VICTIM] == 7
    for error in results[: runs_deaths.VICTIM]:
        assert error.startswith("ExchangeError"), error
        assert "process 2 (pid " in error and "died or stopped" in error, error
    assert directory.find(tmp_path) is None  # nothing that counts was written


HOLD = """
import fcntl, sys
with open(sys.argv[1], "a") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_do_not_write_to_one_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    plan = runs_train.recipe()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        claim = records.claimed(tmp_path, plan, simulated=True, resume=False)
        with pytest.raises(ValueError, match="another run is writing to"), claim:
            pass
        other.kill()
    with records.claimed(tmp_path, plan, simulated=True, resume=False):
        pass


@pytest.mark.parametrize("text", ["{}", "", "[1]", '{"recipe": 1}'])
def test_a_run_directory_that_tells_nothing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / records.RUN).write_text(text)
    with pytest.raises(ValueError, match=r"run\.json is damaged or of another version"):
        records.read_recipe(tmp_path)

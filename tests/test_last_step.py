"""A script whose last act is step() still sends what its neighbors wait for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import runs_late as late

import decentlam

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("method", ["decentlam", "pmsgd"])
def test_a_script_may_end_with_step(method: str) -> None:
    assert decentlam.launch(late.leave_at_once, 2, (method, 0.05)) == [0, 1]


SCRIPT = """
import time, torch, decentlam

decentlam.init()
rank = torch.distributed.get_rank()
model = torch.nn.Linear(400, 400)
optimizer = decentlam.DecentLaM(model.parameters(), lr=0.1, topology="ring", overlap="forward")
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 400)).sum().backward()
    time.sleep(0.3 * rank)
    optimizer.step()
"""


def test_a_script_that_init_joined_may_end_with_step(tmp_path: Path) -> None:
    """The group is left at exit; the last messages must be out before."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "decentlam.launch", "-n", "2", str(tmp_path / "script.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr

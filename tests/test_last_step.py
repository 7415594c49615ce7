"""A script whose last act is step() still sends what its neighbors wait for."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs
import runs_forward as forward
from launching import fork

import decentlam
from decentlam.launch.__main__ import main


@pytest.mark.parametrize("method", ["decentlam", pytest.param("pmsgd", marks=pytest.mark.slow)])
def test_a_script_may_end_with_step(method: str) -> None:
    assert decentlam.launch(forward.leave_at_once, 2, (method, 0.05)) == [0, 1]


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


@pytest.mark.system
def test_a_script_that_init_joined_may_end_with_step(tmp_path: Path) -> None:
    """The group is left at exit; the last messages must be out before."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = fork(main, tmp_path / "output", ["-n", "2", str(tmp_path / "script.py")])
    process.join(runs.HANG_SECONDS)
    assert process.exitcode == 0, (tmp_path / "output").read_text()

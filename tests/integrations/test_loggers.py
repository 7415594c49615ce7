"""What `decentlam.monitor` sees goes to the loggers of Lightning and of Hugging Face's Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

LIGHTNING = """
import csv, sys
import lightning
from lightning.pytorch.loggers import CSVLogger
from decentlam.integrations.lightning import DecentralizedStrategy
from tests.integrations.lightning_runs import QUIET, Module, loaders

logger = CSVLogger(sys.argv[1])
trainer = lightning.Trainer(
    accelerator="cpu", devices=1, strategy=DecentralizedStrategy(), default_root_dir=sys.argv[1],
    enable_checkpointing=False, max_steps=3, limit_val_batches=0, **QUIET | {"logger": logger},
)
trainer.fit(Module(), *loaders())
logger.save()
found = csv.DictReader(open(logger.experiment.metrics_file_path)).fieldnames
"""

HUGGING_FACE = """
import sys
from pathlib import Path
from tests.integrations.huggingface_runs import build_model, trainer_of

trainer = trainer_of(Path(sys.argv[1]), build_model())
trainer.train()
found = [key for entry in trainer.state.log_history if "loss" in entry for key in entry]
"""


@pytest.mark.parametrize(
    ("framework", "code"), [("lightning", LIGHTNING), ("transformers", HUGGING_FACE)]
)
def test_loggers_have_the_numbers_of_monitor(framework: str, code: str, tmp_path: Path) -> None:
    pytest.importorskip(framework)
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(*found)", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | place if framework == "transformers" else None,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert {"decentlam/wait_seconds", "decentlam/bytes_sent", "decentlam/step_seconds"} <= {*names}

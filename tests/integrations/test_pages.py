"""The scripts of the guides run as a reader would run them, in an empty directory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import decentlam
from tests.integrations import launched
from tests.test_docs_pages import blocks

pytestmark = pytest.mark.timeout(1800)

PAGES = [f"docs/{name}.md" for name in ("lightning", "huggingface", "ray")]
SCRIPTS = {block.file: block.text for block in blocks() if block.file and block.page in PAGES}
(PIECE,) = (b.text for b in blocks() if b.page == "docs/lightning.md" and b.language == "py")
BY_TORCHRUN = {"trainer_train.py", "accelerate_train.py"}


def test_every_guide_has_its_scripts() -> None:
    started_by_the_framework = {"lightning_train.py", "fabric_train.py", "ray_train.py"}
    assert set(SCRIPTS) == BY_TORCHRUN | started_by_the_framework


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_trains(name: str, tmp_path: Path, sockets: str) -> None:
    (tmp_path / name).write_text(SCRIPTS[name])
    launcher = launched.TORCHRUN if name in BY_TORCHRUN else [sys.executable]
    env = launched.environment(
        GLOO_SOCKET_IFNAME="lo", HOME=str(tmp_path), RAY_TMPDIR=sockets, **launched.PATIENCE
    )
    for _ in range(5):
        done = subprocess.run(
            [*launcher, name],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=1500,
        )
        if launched.RAY_WAS_SLOW not in done.stdout:
            break
    assert done.returncode == 0, done.stdout[-8000:]
    shown = re.findall(r"^(accuracy|loss) of the averaged model: ([\d.]+)$", done.stdout, re.M)
    assert len(shown) == 1, done.stdout[-8000:]
    what, value = shown[0]
    assert float(value) > 0.9 if what == "accuracy" else float(value) < 4.0  # untrained: 5.5


def test_the_loader_of_a_module_is_one_that_can_be_resumed() -> None:
    import lightning

    data = torch.utils.data.TensorDataset(torch.arange(32.0))
    names = {"lightning": lightning, "decentlam": decentlam, "data": data}
    exec(PIECE, names)
    loader = names["Model"]().train_dataloader()
    assert isinstance(loader, decentlam.ResumableLoader) and len(loader) == 2

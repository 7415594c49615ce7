"""Ray Train equals the plain loop; a run goes on after a stop and a death; what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
from ray.train.v2._internal.execution.storage import StorageContext

from decentlam.integrations import ray as integration
from tests.integrations import launched, work
from tests.integrations.launched import assert_same_run, left

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, sockets: str) -> Path:
    out = tmp_path_factory.mktemp("ray")
    variables = {"HOME": str(out), "RAY_TMPDIR": sockets, **launched.PATIENCE}
    launched.run([sys.executable], "ray_runs.py", out, **variables)
    return out


@pytest.fixture(scope="module")
def first(out: Path) -> list[Any]:
    return left(out, "first")


@pytest.fixture(scope="module")
def driver(out: Path) -> Any:
    return torch.load(out / "driver.pt", weights_only=True)


@pytest.mark.parametrize("case", work.CASES)
def test_equals_the_plain_loop(plain: Path, out: Path, case: str) -> None:
    assert_same_run(left(plain, case), left(out, f"ray-{case}"))


def test_a_run_goes_on_after_a_stop_and_a_death_to_the_bit(out: Path, first: list[Any]) -> None:
    """The second fit begins with the stopped run; after the death Ray starts new workers."""
    assert (out / "death").exists()
    for before, after in zip(first, left(out, "second"), strict=True):
        assert (before["stopped"]["began at"], after["began at"]) == (0, 8)
        assert torch.equal(before["whole"]["own"], after["own"])
    assert not torch.equal(first[0]["whole"]["own"], first[1]["whole"]["own"])


def test_the_saved_model_is_the_average_of_all_nodes(first: list[Any], driver: Any) -> None:
    own = [each["stopped"]["own"] for each in first]
    assert (driver["published"] - torch.stack(own).mean(0)).abs().max() < 1e-6
    assert not torch.equal(driver["published"], own[0])
    assert all(torch.equal(each["stopped"]["seen"], driver["published"]) for each in first)


def test_a_checkpoint_holds_all_nodes_and_ray_deletes_old_ones(driver: Any) -> None:
    nodes = [f"nodes/000001-step-8/process-{rank:05d}.pt" for rank in launched.RANKS]
    assert driver["files"] == ["model.pt", *nodes]
    assert driver["kept"] == [driver["last"]] and driver["metrics"] == {"epoch": 2}


def test_refuses_the_wrapper(first: list[Any]) -> None:
    for each in first:
        assert "prepare_model(model, parallel_strategy=None)" in each["wrapped"]


def test_refuses_storage_that_is_no_file_system(tmp_path: Path) -> None:
    elsewhere = SubTreeFileSystem(str(tmp_path), LocalFileSystem())
    storage = StorageContext("bucket", "run", storage_filesystem=elsewhere)
    with pytest.raises(ValueError, match=r"bucket is not on a file system.*all hosts share"):
        integration.run_directory(storage)

"""Lightning's Trainer and Fabric equal the plain loop; stop and resume; what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import launched, work
from tests.integrations.launched import assert_logged, assert_same_run, left

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lightning")
    launched.run([sys.executable], "lightning_runs.py", out)  # Lightning starts the other three
    return out


@pytest.fixture(scope="module")
def results(out: Path) -> list[Any]:
    return left(out, "results")


@pytest.mark.parametrize("case", work.CASES)
def test_trainer_equals_the_plain_loop(plain: Path, out: Path, case: str) -> None:
    assert_same_run(left(plain, case), left(out, f"trainer-{case}"))


@pytest.mark.parametrize("case", ["usual", "accumulate"])
def test_fabric_equals_the_plain_loop(plain: Path, out: Path, case: str) -> None:
    assert_same_run(left(plain, case), left(out, f"fabric-{case}"))


def test_fabric_goes_on_from_a_checkpoint(plain: Path, out: Path) -> None:
    assert_same_run(left(plain, "usual"), left(out, "fabric-resumed"))


def test_resumed_fit_ends_where_the_whole_one_does_to_the_bit(results: list[Any]) -> None:
    for result in results:
        r = result["resume"]
        assert torch.equal(r["whole"], r["resumed"]) and r["steps"] == 16
    assert not torch.equal(results[0]["resume"]["whole"], results[1]["resume"]["whole"])


@pytest.mark.parametrize("step", [5, 8])
def test_a_fit_resumed_in_an_epoch_ends_where_the_whole_one_does_to_the_bit(
    results: list[Any], step: int
) -> None:
    """With a ResumableLoader. Saved at the last batch, an epoch is over though nobody said so."""
    for result in results:
        r = result["in an epoch"]
        assert torch.equal(r["whole"], r[f"from step {step}"])


def test_two_optimizers_go_on_from_the_last_checkpoint_that_has_both_parts(
    results: list[Any],
) -> None:
    """Both were in evaluation when it was saved; the next save had its nodes and no file."""
    for result in results:
        r = result["two optimizers"]
        assert r["saves"] == ["000001-step-8", "000002-step-16"]
        assert torch.equal(r["own"], r["loaded"])
    assert not torch.equal(*(result["two optimizers"]["own"] for result in results[:2]))


def test_validation_test_and_saved_file_are_of_the_averaged_model(results: list[Any]) -> None:
    for result in results:
        r = result["resume"]
        assert (r["published"] - r["mean at the stop"]).abs().max() < 1e-6
        assert torch.equal(r["seen at the stop"], r["published"])
        assert torch.equal(r["seen in the test"], results[0]["resume"]["seen in the test"])
        assert not torch.equal(r["own at the stop"], r["published"])
        assert r["tested"] == results[0]["resume"]["tested"]


def test_a_checkpoint_is_a_file_and_a_directory_of_nodes(results: list[Any]) -> None:
    """Those of older epochs are removed with their directories."""
    assert results[0]["resume"]["files"] == ["epoch=0.ckpt", "epoch=0.ckpt.nodes", "last.ckpt"]


def test_loggers_have_the_numbers_of_monitor(results: list[Any]) -> None:
    assert_logged(results[0]["logged"])


REFUSED = {
    "ddp": "decentlam.integrations",
    "another optimizer": "return one from configure_optimizers",
    "an option of ddp": "find_unused_parameters: no option",
    "sync_batchnorm": "Leave it out",
    "clip in flight": "max_grad_norm=",
    "remote": "a directory that all hosts share",
    "another checkpoint": "load_from_checkpoint",
}


@pytest.mark.parametrize("what", REFUSED)
def test_trainer_refuses_with_the_cure(results: list[Any], what: str) -> None:
    for result in results:
        assert REFUSED[what] in result["refusals"][what]


def test_fabric_refuses_with_the_cure(results: list[Any]) -> None:
    for result in results:
        refused = result["fabric refusals"]
        assert "build one" in refused["another optimizer"]
        assert "one nn.ModuleDict" in refused["no model"]
        assert "fabric.load(path, {" in refused["no state"]


def test_trainer_joins_processes_that_torchrun_started(plain: Path, tmp_path: Path) -> None:
    launched.run(launched.TORCHRUN, "lightning_runs.py", tmp_path, "usual")
    assert_same_run(left(plain, "usual"), left(tmp_path, "trainer-usual"))

"""A small transformer on real text, by Trainer and by Accelerate, is the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import launched
from tests.integrations.launched import assert_logged, assert_same_run, left

pytestmark = pytest.mark.timeout(1800)

CASES = ["usual", "accumulate", "clip", "backward", "local steps"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("huggingface")
    launched.run(launched.TORCHRUN, "huggingface_runs.py", out, "plain")
    launched.run(launched.TORCHRUN, "huggingface_runs.py", out, "trainer")
    return out


@pytest.fixture(scope="module")
def results(out: Path) -> list[Any]:
    return left(out, "results")


@pytest.mark.parametrize("framework", ["trainer", "accelerate"])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_plain_loop(out: Path, framework: str, case: str) -> None:
    assert_same_run(left(out, f"plain-{case}"), left(out, f"{framework}-{case}"))


def test_resumed_training_ends_where_the_whole_one_does_to_the_bit(results: list[Any]) -> None:
    for result in results:
        assert torch.equal(result["resume"]["whole"], result["resume"]["resumed"])


def test_the_saved_model_is_the_average_of_all_nodes(results: list[Any]) -> None:
    for result in results:
        r = result["resume"]
        assert (r["published"] - r["mean"]).abs().max() < 1e-6
        assert (r["published"] - r["whole"]).abs().max() > 1e-4


def test_a_checkpoint_holds_all_nodes_and_no_single_optimizer(results: list[Any]) -> None:
    files = results[0]["resume"]["files"]
    assert {"nodes", "model.safetensors", "trainer_state.json"} <= set(files)
    assert "optimizer.pt" not in files


def test_no_step_gathers_token_counts(results: list[Any]) -> None:
    assert results[0]["resume"]["gathers"] is False


def test_training_arguments_choose_the_optimizer_and_its_rate(results: list[Any]) -> None:
    for result in results:
        found = result["arguments"]
        assert found["kind"] == "AdamW" and found["sgd"] == ("DecentLaM", 0.2)
        assert found["decay"] == [0.1, 0.0] and found["betas"] == (0.9, 0.95)
        assert_logged(found["logged"])
        assert found["rate"] == 0.003 and found["last rate"] == 0.0  # a linear schedule


REFUSED = {
    "plain Trainer": "decentlam.integrations",
    "prepare(model)": "decentlam.integrations",
    "another optimizer": "optimizer_cls_and_kwargs=(decentlam.DecentLaM",
    "another name": "optim='adamw_torch' or 'sgd'",
    "two rates": "lr=0.1 in optimizer_cls_and_kwargs and learning_rate=0.3",
    "clip in flight": "overlap='none', or set max_grad_norm=0",
    "auto_find_batch_size": "Set per_device_train_batch_size yourself",
    "another checkpoint": "do not resume",
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_with_the_cure(results: list[Any], what: str) -> None:
    for result in results:
        assert REFUSED[what] in result["refusals"][what]

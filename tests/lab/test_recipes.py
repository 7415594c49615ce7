"""Recipes: the paper's settings, what they train on, and what they refuse."""

from __future__ import annotations

import doctest
import json
from dataclasses import replace
from pathlib import Path

import pytest

from decentlam.lab import recipes
from decentlam.lab.recipes import RECIPES, Recipe, from_json, make
from decentlam.lab.train import train
from tests.lab.data.images import write_images
from tests.lab.helpers import records


def test_cifar_recipe_runs_on_a_tiny_folder(tmp_path: Path):
    images = write_images(tmp_path / "images", ("train", "test"), classes=10, each=1, size=32)
    plan = make("cifar10-resnet20", nodes=2, batch=4, data_path=str(images), epochs=0.5)
    assert plan.lr == 0.1 * 4 / 256 and plan.schedule == "cifar-step"
    assert train(plan, tmp_path / "run", simulate=True).status == "finished"
    assert records(tmp_path / "run", "evaluation")[-1]["averaged_top5"] >= 0.3


def test_imagenet_recipe_runs_on_a_tiny_folder(tmp_path: Path):
    images = write_images(tmp_path / "images", ("train", "val"), classes=2, each=1, size=40)
    tiny = {"nodes": 1, "batch": 2, "epochs": 1.0, "data_path": str(images), "model": "resnet18"}
    plan = make("imagenet-resnet50-32k", **tiny)
    assert (plan.precision, plan.schedule) == ("bfloat16", "imagenet-step")  # of a small batch
    plan = replace(plan, precision="float32")  # bfloat16 convolutions are slow on many CPUs
    summary = train(plan, tmp_path / "run", simulate=True)
    assert summary.status == "finished" and summary.evaluation is not None
    assert summary.evaluation["averaged_top5"] == 1.0


def test_the_papers_settings():
    two, eight, sixteen, most = (make(f"imagenet-resnet50-{k}k") for k in (2, 8, 16, 32))
    assert [r.batch for r in (two, eight, sixteen, most)] == [2048, 8192, 16384, 32768]
    assert [r.lr for r in (two, eight, sixteen, most)] == [0.8, 3.2, 6.4, 12.8]
    assert [r.epochs for r in (two, eight, sixteen, most)] == [90, 90, 120, 120]
    for r in (two, eight, sixteen, most):
        assert (r.nodes, r.topology, r.momentum) == (8, "symmetric-exponential", 0.9)
        assert r.weight_decay == 1e-4 and r.lr * r.warmup_from == pytest.approx(0.1)
    rate = eight.factor(steps_per_epoch=156)
    assert rate(5 * 156) == 1 and rate(30 * 156) == pytest.approx(0.1)
    bias = make("fashion-mlp")
    assert (bias.nodes, bias.topology, bias.batch, bias.lr) == (8, "ring", 8000, 0.05)
    assert (bias.shards, bias.epochs, bias.schedule) == ("label-sorted:2", 20, "constant")


def test_examples_of_recipes_run():
    assert doctest.testmod(recipes) == (0, 1)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_json(name: str):
    plan = make(name, method="qg-dmsgd", hyper={"mu": 0.5})
    assert from_json(json.loads(json.dumps(plan.as_json()))) == plan


BAD = {
    "method": ({"method": "nope"}, "unknown algorithm 'nope'"),
    "topology": ({"topology": "nope"}, "unknown topology 'nope'"),
    "model": ({"model": "nope"}, "unknown model 'nope'; choose from linear, mlp"),
    "data": ({"data": "nope"}, "unknown data 'nope'; choose from digits"),
    "schedule": ({"schedule": "nope"}, "unknown schedule 'nope'; choose from constant"),
    "precision": ({"precision": "float16"}, "'float16'; did you mean 'bfloat16'? choose"),
    "directed": ({"topology": "exponential"}, "needs symmetric weights"),
    "indivisible": ({"batch": 1001, "nodes": 8}, "cannot be divided among 8 nodes; try 1000"),
    "no batch": ({"batch": 0}, "batch must be a whole number of 1 or more, got 0"),
    "half a node": ({"nodes": 1.5}, "nodes must be a whole number"),
    "micro batch": ({"micro_batch": 0}, "micro_batch must be a whole number"),
    "epochs": ({"epochs": 0.0}, "epochs must be above 0, got 0.0"),
    "lr": ({"lr": float("nan")}, "lr must be 0 or more, got nan"),
    "momentum": ({"momentum": 1.0}, "momentum must be in [0, 1)"),
    "seed": ({"seed": -1}, "seed must be a whole number of 0 or more"),
    "hyper": ({"hyper": {"tau": 3}}, "decentlam has no hyper-parameter 'tau'"),
    "stable": ({"stable": "nope"}, "unknown stable 'nope'; choose from auto"),
    "a classifier": ({"data": "bccd", "model": "mlp"}, "mlp is no model for detection, which is"),
    "text": ({"data": "stdlib", "model": "mlp"}, "mlp is no model for text"),
    "weights": ({"weights": "x"}, "are for detection"),
    "image size": ({"image_size": 0}, "image_size must be a whole number of 1 or more"),
    "warm-up": ({"epochs": 3.0, "warmup_epochs": 4.0}, "less than all 3.0 epochs"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_recipes_are_refused_with_what_is_allowed(case: str):
    changes, words = BAD[case]
    with pytest.raises(ValueError) as caught:
        Recipe(**changes)
    assert words in str(caught.value)

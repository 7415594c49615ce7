"""Recipes: a training run as one frozen value, and the named ones of the paper.

Importing this file does not import torch, which takes seconds: `decentlam train` makes its options
of the fields.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from decentlam.errors import unknown
from decentlam.lab import schedules
from decentlam.lab.names import (
    ALGORITHMS,
    DATASETS,
    DETECTION_DATASETS,
    DETECTORS,
    GPTS,
    MODELS,
    STABLE,
    TEXTS,
    TOPOLOGIES,
)
from decentlam.lab.schedules import SCHEDULES

if TYPE_CHECKING:
    from decentlam.algorithms import Algorithm
    from decentlam.topology import Topology

PRECISIONS = ("float32", "bfloat16", "float64")
# What can be trained, and on what: the names of data sets, and of models.
TASKS = {
    "classification": (DATASETS, MODELS),
    "text": (TEXTS, GPTS),
    "detection": (DETECTION_DATASETS, DETECTORS),
}
ALL_DATA = tuple(name for data, _ in TASKS.values() for name in data)
ALL_MODELS = tuple(name for _, models in TASKS.values() for name in models)


def _field(default: Any, about: str, choices: Sequence[str] = ()) -> Any:
    """Return a field with the help text of its option in `decentlam train`."""
    return dataclasses.field(default=default, metadata={"about": about, "choices": choices})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a run computes; `decentlam train` has an option for each field.

    A value that does not fit is refused here, before anything is started.
    """

    method: str = _field("decentlam", "The training method.", ALGORITHMS)
    topology: str = _field("ring", "Which nodes exchange messages.", TOPOLOGIES)
    nodes: int = _field(8, "Number of nodes.")
    model: str = _field("mlp", "The model to train.", ALL_MODELS)
    data: str = _field("digits", "The data set to train on.", ALL_DATA)
    data_path: str | None = _field(None, "The folder of the data set.")
    shards: str = _field("iid", "How nodes share the data: iid, label-sorted:K or dirichlet:ALPHA.")
    batch: int = _field(1024, "Samples per step over all nodes.")
    micro_batch: int | None = _field(
        None, "Samples per forward pass of a node; gradients are accumulated."
    )
    epochs: float = _field(10.0, "Passes over the training set.")
    lr: float = _field(0.05, "Learning rate.")
    momentum: float = _field(0.9, "Momentum coefficient, the beta of the paper.")
    weight_decay: float = _field(0.0, "Weight decay, as in torch's optimizers.")
    stable: str = _field("auto", "What to do where the method would diverge.", STABLE)
    hyper: tuple[tuple[str, Any], ...] = _field(
        (), "A hyper-parameter of the method, such as nesterov=true; repeatable."
    )
    schedule: str = _field("constant", "Learning-rate schedule.", tuple(SCHEDULES))
    warmup_epochs: float | None = _field(None, "Epochs of warm-up; default: the schedule's.")
    warmup_from: float = _field(0.0, "Learning rate at the start of the warm-up, as a share of lr.")
    seed: int = _field(0, "Random seed; equal seeds give equal runs.")
    precision: str = _field("float32", "Numeric precision.", PRECISIONS)
    evaluate_every: float = _field(1.0, "Epochs between evaluations and between checkpoints.")
    log_every: int = _field(10, "Steps between step records.")
    image_size: int = _field(800, "Detection: shorter side of resized images, in pixels.")
    weights: str | None = _field(
        None, "Detection: a file of pretrained weights, as torchvision publishes them."
    )

    def __post_init__(self) -> None:
        from decentlam.algorithms import check_compatible

        pairs = self.hyper.items() if isinstance(self.hyper, Mapping) else self.hyper
        object.__setattr__(self, "hyper", tuple((str(name), value) for name, value in pairs))
        for field in ("seed", "nodes", "batch", "log_every", "image_size", "micro_batch"):
            value, least = getattr(self, field), 0 if field == "seed" else 1
            if value is None and field == "micro_batch":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{field} must be a whole number of {least} or more, got {value!r}"
                )
        for field in ("epochs", "evaluate_every"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field} must be above 0, got {getattr(self, field)!r}")
        for field in ("lr", "weight_decay"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} must be 0 or more, got {getattr(self, field)!r}")
        for field in ("model", "data", "schedule", "precision", "stable"):
            value = getattr(self, field)
            known = self.__dataclass_fields__[field].metadata["choices"]
            if value not in known:
                raise ValueError(unknown(field, value, known))
        _, models = TASKS[self.task]
        if self.model not in models:
            raise ValueError(
                f"{self.model} is no model for {self.task}, which is what {self.data} is for; "
                f"choose from {', '.join(models)}"
            )
        if self.task != "detection" and self.weights is not None:
            raise ValueError(f"weights are for detection; leave them out with {self.data}")
        check_compatible(self.algorithm(), self.network())
        self.factor(steps_per_epoch=1)
        if self.batch % self.nodes:
            fitting = self.nodes * max(1, round(self.batch / self.nodes))
            raise ValueError(
                f"a batch of {self.batch} cannot be divided among {self.nodes} nodes; try {fitting}"
            )

    @property
    def task(self) -> str:
        """classification, text or detection, by the data."""
        return next(task for task, (data, _) in TASKS.items() if self.data in data)

    @property
    def batch_per_node(self) -> int:
        return self.batch // self.nodes

    def algorithm(self) -> Algorithm:
        from decentlam.algorithms import make

        return make(self.method, self.momentum, **dict(self.hyper))

    def network(self) -> Topology:
        from decentlam.topology import resolve

        return resolve(self.topology, self.nodes)

    def chosen(self) -> tuple[Algorithm, Topology, str | None]:
        """Return the method and network that run, and why if they are not the ones asked for."""
        return _choose(self)

    def factor(self, steps_per_epoch: int) -> Callable[[int], float]:
        """Return the factor of lr as a function of the step."""
        return schedules.factor(
            self.schedule, self.epochs, self.warmup_epochs, steps_per_epoch, self.warmup_from
        )

    def steps(self, steps_per_epoch: int) -> int:
        return max(1, round(self.epochs * steps_per_epoch))

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"hyper": [list(pair) for pair in self.hyper]}


@lru_cache(maxsize=16)  # computing the growth rate may take seconds, and a run asks more than once
def _choose(recipe: Recipe) -> tuple[Algorithm, Topology, str | None]:
    from decentlam.analysis import stability

    return stability.choose(recipe.algorithm(), recipe.network(), recipe.stable)


def from_json(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe that `as_json` described."""
    known = {field.name for field in dataclasses.fields(Recipe)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"a recipe has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return Recipe(**values)


def _named(about: str, batch: int, **values: Any) -> Callable[..., Recipe]:
    """Make a recipe from its values; those that are functions follow the batch."""

    def recipe(batch: int = batch, **changes: Any) -> Recipe:
        own = {name: value(batch) if callable(value) else value for name, value in values.items()}
        return Recipe(**{**own, "batch": batch, **changes})

    recipe.__doc__ = about
    return recipe


# The paper's linear scaling: lr follows the batch, and warm-up starts from the unscaled lr.
_SCALED: dict[str, Any] = {
    "topology": "symmetric-exponential",
    "lr": partial(schedules.linear_scaling, 0.1),
    "warmup_from": schedules.unscaled,
    "weight_decay": 1e-4,
}


def _imagenet(batch: int) -> Callable[..., Recipe]:
    return _named(
        "ImageNet as in the paper's table 3: 8 nodes, lr 0.1 per 256, its schedule for the batch.",
        batch,
        data="imagenet",
        model="resnet50",
        epochs=lambda batch: 90.0 if schedules.paper_schedule(batch) == "imagenet-step" else 120.0,
        schedule=schedules.paper_schedule,
        precision="bfloat16",
        **_SCALED,
    )


_DETECTION = {
    "topology": "symmetric-exponential",
    "weight_decay": 1e-4,
    "schedule": "detection-1x",
    "warmup_from": 0.001,
}


def _published(data: str, model: str, lr_per_16: float, image_size: int) -> Callable[..., Recipe]:
    return _named(
        f"{data.upper()} as in the paper's table 6: ResNet-50-FPN, batch 256 on 8 nodes, 1x "
        f"schedule, lr {lr_per_16:g} per 16.",
        256,
        data=data,
        model=model,
        micro_batch=2,
        epochs=12.0,
        lr=partial(schedules.linear_scaling, lr_per_16, base_batch=16),
        image_size=image_size,
        **_DETECTION,
    )


def _blood_cells(model: str, lr: float, epochs: float) -> Callable[..., Recipe]:
    return _named(
        "Blood cells at 128 x 96 pixels, a small backbone from scratch, 8 nodes: some minutes.",
        16,
        data="bccd",
        model=model,
        epochs=epochs,
        lr=lr,
        image_size=96,
        evaluate_every=epochs,
        **_DETECTION,
    )


# The first is what `decentlam train` runs without options.
RECIPES: dict[str, Callable[..., Recipe]] = {
    "digits": _named(
        "8x8 digits, a multi-layer perceptron, 4 nodes: a few seconds, for a first look.",
        128,
        topology="bipartite-random-match",
        nodes=4,
        epochs=20.0,
        lr=0.05,
        schedule="cosine",
    ),
    "fashion-mlp": _named(
        "Fashion-MNIST split by label on 8 nodes in a ring, batch 8,000: the setting of the bias.",
        8000,
        data="fashion-mnist",
        shards="label-sorted:2",
        epochs=20.0,
        lr=0.05,
        warmup_epochs=2.0,
        log_every=7,
    ),
    "gpt-small": _named(
        "Python's own library, unlike packages on 4 nodes, a GPT of 0.12M parameters: minutes.",
        128,
        method="adamw",
        topology="bipartite-random-match",
        nodes=4,
        data="stdlib",
        model="gpt-small",
        shards="label-sorted:1",
        epochs=0.5,
        lr=0.004,
        weight_decay=0.01,
        schedule="cosine",
        warmup_epochs=0.025,
        evaluate_every=0.25,
    ),
    "cifar10-resnet20": _named(
        "CIFAR-10 as in the paper's table 1: 200 epochs, a tenth at 100 and 150, lr 0.1 per 256.",
        2048,
        data="cifar10",
        model="resnet20",
        epochs=200.0,
        schedule="cifar-step",
        **_SCALED,
    ),
    "imagenet-resnet50-2k": _imagenet(2048),
    "imagenet-resnet50-8k": _imagenet(8192),
    "imagenet-resnet50-16k": _imagenet(16384),
    "imagenet-resnet50-32k": _imagenet(32768),
    # Rates and image sizes as MMDetection has them, which the paper used.
    "voc-retinanet": _published("voc", "retinanet", 0.01, 600),
    "voc-faster-rcnn": _published("voc", "faster-rcnn", 0.01, 600),
    "coco-retinanet": _published("coco", "retinanet", 0.01, 800),
    "coco-faster-rcnn": _published("coco", "faster-rcnn", 0.02, 800),
    "bccd-retinanet": _blood_cells("retinanet-small", 0.03, 20.0),
    "bccd-faster-rcnn": _blood_cells("faster-rcnn-small", 0.05, 5.0),
}


def make(name: str | None, **changes: Any) -> Recipe:
    """Return the recipe of that name (None: the plain one) with some values changed.

    >>> make("imagenet-resnet50-8k", batch=16384).lr  # the rate follows the batch
    6.4
    """
    if name is not None and name not in RECIPES:
        raise ValueError(unknown("recipe", name, RECIPES))
    return Recipe(**changes) if name is None else RECIPES[name](**changes)


def command(recipe: Recipe, *options: str) -> str:
    """Return the command that runs this recipe: all in which it differs from the default one."""
    words = ["decentlam", "train", *options]
    default = next(iter(RECIPES.values()))().as_json()
    for field, value in recipe.as_json().items():
        option = f"--{field.replace('_', '-')}"
        if value == default[field]:
            continue
        if field == "hyper":
            words += [word for pair in value for word in (option, f"{pair[0]}={pair[1]}")]
        else:
            words += [option, str(value)]
    return shlex.join(words)

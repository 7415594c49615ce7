"""Table 4: PmSGD, DmSGD and DecentLaM on several models, at a smaller and a larger batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from decentlam.lab.recipes import Recipe
from decentlam.lab.studies import paper
from decentlam.lab.studies.common import (
    AVERAGED,
    FASHION,
    NODES,
    accuracy_note,
    cell,
    check_data,
    dot_panels,
    fitting,
    lead_text,
    mean_and_spread,
    seeds_from,
    study_recipe,
    where,
)
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.studies.sweep import sweep


@dataclass(frozen=True)
class ModelCase:
    """A model, what it is trained on and for how long; the rate follows the batch."""

    model: str
    data: str
    batches: tuple[int, ...]
    lr: float  # of the largest batch
    epochs: float


# One core trains the perceptron on the 60,000 images in a second, the small convolutional network
# in half a minute, ResNet-20 in minutes: convolutions get the digits, some 1,400 images of 8 x 8.
CASES = (
    ModelCase("linear", FASHION, (2000, 8000), 0.05, 20.0),
    ModelCase("mlp", FASHION, (2000, 8000), 0.05, 20.0),
    ModelCase("cnn", "digits", (128, 512), 0.05, 60.0),
    ModelCase("resnet20", "digits", (128, 512), 0.05, 20.0),
)
QUICK = (
    ModelCase("mlp", "digits", (128, 1024), 0.05, 5.0),
    ModelCase("cnn", "digits", (128, 1024), 0.05, 2.0),
)


@dataclass(frozen=True)
class Models:
    cases: tuple[ModelCase, ...] = CASES
    data_path: str | None = None
    methods: tuple[str, ...] = ("pmsgd", "dmsgd", "qg-dmsgd", "decentlam")
    nodes: int = 8
    topology: str = "ring"
    shards: str = "label-sorted:2"
    momentum: float = 0.9
    seeds: tuple[int, ...] = (0, 1, 2)


def recipe(
    nodes: int | None = None,
    seed: int = 0,
    quick: bool = False,
    data: str = FASHION,
    data_path: str | None = None,
) -> Models:
    nodes, seeds = 8 if nodes is None else nodes, seeds_from(seed, 2 if quick else 3)
    cases = tuple(
        replace(
            case,
            data=data if case.data == FASHION else case.data,
            batches=fitting(nodes, *case.batches),
        )
        for case in (QUICK if quick else CASES)
    )
    return Models(cases=cases, nodes=nodes, seeds=seeds, data_path=data_path)


def run(setting: Models, tick: Tick = silent, directory: Path = Path()) -> list[Record]:
    for data in dict.fromkeys(case.data for case in setting.cases):
        check_data(data, None if data == "digits" else setting.data_path)
    recipes = [
        make(setting, case, method, batch, seed)
        for case in setting.cases
        for method in setting.methods
        for batch in case.batches
        for seed in setting.seeds
    ]
    return sweep(recipes, directory, tick)


def make(setting: Models, case: ModelCase, method: str, batch: int, seed: int) -> Recipe:
    return study_recipe(
        setting,
        method=method,
        model=case.model,
        data=case.data,
        data_path=None if case.data == "digits" else setting.data_path,
        batch=batch,
        epochs=case.epochs,
        lr=case.lr * batch / case.batches[-1],
        seed=seed,
    )


def table(records: Sequence[Record]) -> list[Record]:
    """Return test accuracies in %; each model has a smaller and a larger batch."""
    rows = []
    for model, data in _models(records):
        batches = sorted({r["batch"] for r in where(records, model=model)})
        names = dict(zip(("smaller", "larger"), (batches[0], batches[-1]), strict=True))
        for method in dict.fromkeys(r["method"] for r in records):
            mine = where(records, model=model, method=method)
            row: Record = {"model": model, "data": data, "method": method}
            row["batches"] = " / ".join(f"{batch:,}" for batch in names.values())
            for score, whose in ((AVERAGED, "averaged"), (NODES, "nodes")):
                for size, batch in names.items():
                    row[f"{whose},_{size}_batch"] = cell(where(mine, batch=batch), score)
            row["seconds_per_run"] = mean_and_spread([r["seconds"] for r in mine])[0]
            rows.append(row)
    return rows


def _models(records: Sequence[Record]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((r["model"], r["data"]) for r in records))


def notes(setting: Models, records: Sequence[Record]) -> list[str]:
    theirs = "; ".join(f"{model} {_lead_there(model)}" for model in paper.MODELS)
    values = "; ".join(
        f"{case.model} {case.epochs:g} epochs of {case.data}, lr {case.lr:g} at batch "
        f"{case.batches[-1]:,}"
        for case in setting.cases
    )
    return [
        f"{accuracy_note(setting, '')}; {setting.nodes} nodes, {setting.topology}, "
        f"{setting.shards}, momentum {setting.momentum:g}; a tenth of the epochs is warm-up, then "
        f"the rate is constant, and follows the batch. {values}.",
        *_leads(setting, records),
        "Models with batch norm (cnn, resnet20) keep its statistics on every node; those of the "
        "averaged model are estimated anew from training samples of all labels, those of the "
        "nodes' own models have seen their own labels only. The seconds are of one core, and of "
        "whatever else ran on it.",
        "DecentLaM's lead over DmSGD in the paper's Table 4, ImageNet, batches of 2K / 8K / 16K: "
        f"{theirs}.",
    ]


def _lead_there(model: str) -> str:
    ours, theirs = paper.MODELS[model]["decentlam"], paper.MODELS[model]["dmsgd"]
    return " / ".join(f"{ours[batch] - theirs[batch]:+.1f}" for batch in ours)


def _leads(setting: Models, records: Sequence[Record]) -> list[str]:
    if not {"decentlam", "dmsgd"} <= set(setting.methods):
        return []
    parts = []
    for case in setting.cases:
        for batch in case.batches:
            here = where(records, model=case.model, batch=batch)
            parts.append(f"{case.model} at {batch:,} {lead_text(here)}")
    return [f"DecentLaM's lead over DmSGD in points, seed by seed: {'; '.join(parts)}."]


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw a panel per size of batch: every seed of every model."""
    sizes: dict[str, list[Record]] = {"smaller batch": [], "larger batch": []}
    for model, _ in _models(records):
        mine = where(records, model=model)
        batches = sorted({r["batch"] for r in mine})
        for size, batch in zip(sizes, (batches[0], batches[-1]), strict=True):
            sizes[size] += [r | {"model": f"{model}, {batch:,}"} for r in where(mine, batch=batch)]
    return {"models": dot_panels(sizes, "model")}


_SUMMARY = "accuracy of PmSGD, DmSGD, QG-DmSGD and DecentLaM on several models (Table 4)"
STUDY = Study("models", _SUMMARY, recipe, run, table, notes, figures, resumable=True)

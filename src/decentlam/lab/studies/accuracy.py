"""Tables 1, 3, 4, 5 and 6: scores of the methods by batch, model, topology and detector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from decentlam.lab.recipes import Recipe
from decentlam.lab.recipes import make as named
from decentlam.lab.studies import paper
from decentlam.lab.studies.common import (
    AVERAGED,
    METHODS,
    NODES,
    cell,
    fitting,
    lead_text,
    leads,
    seeds_from,
    where,
)
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.studies.sweep import sweep
from decentlam.lab.train.tasks import Numerics, make_task
from decentlam.topology import resolve

FASHION = "fashion-mnist"  # what the studies train on unless told otherwise
STEADY = "decentlam-steady"
# The scores of a study and how they are called; the first two are compared.
TOP1 = ((AVERAGED, "averaged"), (NODES, "nodes"))
AP = (("averaged_ap50", "AP50"), ("nodes_ap50", "nodes' AP50"), ("averaged_ap", "AP"))


@dataclass(frozen=True)
class Case:
    """Trainings that differ in method, batch, lr and seed alone."""

    name: str
    base: Recipe  # with the lr of the largest batch; the rate follows the batch
    methods: tuple[str, ...]
    batches: tuple[int, ...]
    factors: tuple[float, ...] = (1.0,)  # of lr: the first seed tries all, the others its best
    paper: Mapping[str, str] = field(default_factory=dict, compare=False)  # its figures, by method


@dataclass(frozen=True)
class Scores:
    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    # LARS makes every step lr * trust * |x| long, ten times that with momentum: at lr 0.05 a
    # hundredth, of detectors half of that.
    lars_trust: float = 0.2
    scores: tuple[tuple[str, str], ...] = TOP1


def _recipe(cases: Callable[..., Sequence[Case]]) -> Callable[..., Scores]:
    """Make the recipe of a study from its cases for so many nodes, quick or not, and data."""

    @wraps(cases)
    def recipe(
        nodes: int = 8,
        seed: int = 0,
        quick: bool = False,
        data: str = FASHION,
        data_path: str | None = None,
    ) -> Scores:
        seeds = seeds_from(seed, 2 if quick else 3)
        return Scores(tuple(cases(nodes, quick, data, data_path)), seeds)

    return recipe


def _base(nodes: int, data: str, path: str | None, epochs: float, **values: Any) -> Recipe:
    """Return what all runs of a case have: a tenth of it warms up, then the rate stays."""
    defaults = {"shards": "label-sorted:2", "topology": "ring", "lr": 0.05}
    return Recipe(
        **{**defaults, **values},
        nodes=nodes,
        batch=nodes,
        data=data,
        data_path=None if data == "digits" else path,
        epochs=epochs,
        warmup_epochs=epochs / 10,
        evaluate_every=epochs,
        log_every=50,
        stable="ignore",  # as printed, stable or not
    )


@_recipe
def large_batch(nodes: int, quick: bool, data: str, path: str | None) -> Sequence[Case]:
    """Return one fixed setting in depth, and a trend over batches with rates chosen per method."""
    methods: tuple[str, ...] = METHODS
    if quick:
        data = "digits"
        methods = ("pmsgd", "pmsgd-lars", "dmsgd", "slowmo", "qg-dmsgd", "decentlam")
    batches = fitting(nodes, *((128, 1024) if quick else (512, 2000, 8000)))
    fixed = _base(nodes, data, path, 6.0 if quick else 20.0)
    trend = [
        _base(nodes, data, path, 3.0 if quick else 10.0, shards=shards)
        for shards in ("iid", "label-sorted:2")
    ]
    factors = (1.0, 4.0) if quick else (0.25, 1.0, 4.0)
    return [
        Case("fixed", fixed, methods, batches[-1:], paper=paper.IMAGENET),
        *(Case(f"trend, {b.shards}", b, methods, batches, factors, paper.IMAGENET) for b in trend),
    ]


@_recipe
def models(nodes: int, quick: bool, data: str, path: str | None) -> Sequence[Case]:
    """Return a case per model. One core trains the perceptron on 60,000 images in a second and
    ResNet-20 in minutes: convolutions get the digits, some 1,400 images of 8 x 8."""
    large, small = fitting(nodes, 2000, 8000), fitting(nodes, 128, 512)
    what = [("linear", data, large, 20.0), ("mlp", data, large, 20.0)]
    what += [("cnn", "digits", small, 60.0), ("resnet20", "digits", small, 20.0)]
    if quick:
        small = fitting(nodes, 128, 1024)
        what = [("mlp", "digits", small, 5.0), ("cnn", "digits", small, 2.0)]
    methods = ("pmsgd", "dmsgd", "qg-dmsgd", "decentlam")
    return [
        Case(model, _base(nodes, on, path, epochs, model=model), methods, batches)
        for model, on, batches, epochs in what
    ]


@_recipe
def topologies(nodes: int, quick: bool, data: str, path: str | None) -> Sequence[Case]:
    """Return a case per topology, one of which changes at every step, and one of PmSGD."""
    batches = fitting(nodes, *((128, 1024) if quick else (2000, 8000)))
    data, epochs = ("digits", 10.0) if quick else (data, 20.0)
    cases = [Case("all-reduce", _base(nodes, data, path, epochs), ("pmsgd",), batches)]
    for name, figures in paper.TOPOLOGIES.items():
        methods: tuple[str, ...] = ("dmsgd", "qg-dmsgd", "decentlam")
        methods += () if resolve(name, nodes).static else (STEADY,)
        base = _base(nodes, data, path, epochs, topology=name)
        cases.append(Case(name, base, methods, batches, paper={"decentlam": figures}))
    return cases


def detection(
    nodes: int = 8,
    seed: int = 0,
    quick: bool = False,
    data: str = "bccd",
    data_path: str | None = None,
) -> Scores:
    """Return a case per detector, small ones that train from scratch."""
    bccd = data == "bccd"  # other data has larger images, and more of them: one short run each
    quickly = (("bccd-faster-rcnn", "F-RCNN", 1.0, 0.05), ("bccd-retinanet", "R-Net", 1.0, 0.03))
    usual = (("bccd-faster-rcnn", "F-RCNN", 5.0, 0.05), ("bccd-retinanet", "R-Net", 20.0, 0.03))
    cases = []
    for recipe, name, longest, lr in quickly if quick else usual:
        epochs = longest if bccd else min(longest, 5.0)
        base = named(
            recipe,
            nodes=nodes,
            data=data,
            data_path=data_path,
            batch=nodes,
            image_size=64 if quick else 96 if bccd else 160,
            epochs=epochs,
            evaluate_every=epochs,
            lr=lr,
            stable="ignore",
        )
        known = paper.DETECTION[name]
        cases.append(Case(name, base, tuple(known), fitting(nodes, 16), paper=known))
    seeds = seeds_from(seed, 3 if bccd and not quick else 1)
    return Scores(tuple(cases), seeds, lars_trust=0.1, scores=AP)


def run(setting: Scores, tick: Tick = silent, directory: Path = Path()) -> list[Record]:
    """Return a record per run, with its case, and whether the table shows it."""
    check_data(setting)
    jobs = [
        (case, method, batch)
        for case in setting.cases
        for batch in reversed(case.batches)  # the cheapest first
        for method in case.methods
    ]
    first, *others = setting.seeds
    tried = [(job, make(setting, *job, factor, first)) for job in jobs for factor in job[0].factors]
    found = sweep([recipe for _, recipe in tried], directory, tick)
    by_job = {job: [r for (j, _), r in zip(tried, found, strict=True) if j == job] for job in jobs}
    score, _ = setting.scores[0]
    best = {job: choose(records, score) for job, records in by_job.items()}
    repeats = [
        (job, make(setting, *job, best[job]["lr"] / _scaled(job[0], job[2]), seed))
        for job in jobs
        for seed in others
    ]
    again = sweep([recipe for _, recipe in repeats], directory, tick)
    for (job, _), record in zip(repeats, again, strict=True):
        by_job[job].append(record)
    return [
        {
            "case": job[0].name,
            "chosen": r is best[job] or r["seed"] != first,
            "paper": job[0].paper.get(job[1]),
            **r,
        }
        for job, records in by_job.items()
        for r in records
    ]


def check_data(setting: Scores) -> None:
    """Read the data once before anything is started; say what to do without it."""
    try:
        for base in {case.base.data: case.base for case in setting.cases}.values():
            make_task(base, Numerics("float32", torch.device("cpu")))
    except ValueError as error:
        quick = "" if setting.scores is AP else ". Or try --quick, which makes do with the digits"
        raise ValueError(f"{error}{quick}") from None


def make(setting: Scores, case: Case, method: str, batch: int, factor: float, seed: int) -> Recipe:
    """Return the recipe of one run."""
    hyper = (("trust", setting.lars_trust),) if method == "pmsgd-lars" else ()
    lr = _scaled(case, batch) * factor
    return replace(case.base, method=method, batch=batch, lr=lr, hyper=hyper, seed=seed)


def choose(tried: Sequence[Record], score: str) -> Record:
    """Return the run whose averaged model is best; of equal ones that with the lowest rate."""
    return max(tried, key=lambda r: (-1.0 if r[score] is None else r[score], -r["lr"]))


def _scaled(case: Case, batch: int) -> float:
    return case.base.lr * batch / case.batches[-1]


def _scores_of(records: Sequence[Record]) -> tuple[tuple[str, str], ...]:
    return AP if AP[0][0] in records[0] else TOP1


def table(records: Sequence[Record]) -> list[Record]:
    """Return scores in %, of the averaged model and the nodes' own, a row per case and method."""
    shown = where(records, chosen=True)
    batches = sorted({r["batch"] for r in shown})
    rows = []
    for case, method in dict.fromkeys((r["case"], r["method"]) for r in shown):
        mine = where(shown, case=case, method=method)
        row: Record = {"case": case, "method": method}
        for score, what in _scores_of(records):
            for batch in batches:
                row[f"{what},_batch_{batch:,}"] = cell(where(mine, batch=batch), score)
        rates = dict.fromkeys(r["lr"] for r in sorted(mine, key=lambda r: r["batch"]))
        row["lr"] = " / ".join(f"{lr:g}" for lr in rates)
        row["paper"] = mine[0]["paper"]
        rows.append(row)
    return rows


def notes(setting: Scores, records: Sequence[Record]) -> list[str]:
    values = "; ".join(
        f"{case.name}: {b.model} on {b.data}, {b.shards}, {b.topology}, {b.epochs:g} epochs, "
        f"{b.schedule}, lr {' or '.join(f'{b.lr * f:g}' for f in case.factors)} at batch "
        f"{case.batches[-1]:,}"
        for case in setting.cases
        for b in [case.base]
    )
    base, detects = setting.cases[0].base, setting.scores is AP
    what = "AP50 and AP@[.5:.95] by pycocotools" if detects else "Top-1"
    source = (
        "PASCAL VOC / COCO with ResNet-50-FPN from ImageNet weights, batch 256"
        if detects
        else "ImageNet with ResNet-50, batches of 2K / 8K / 16K / 32K (Table 3) or 16K / 32K "
        "(Table 5)"
    )
    return [
        f"{what} on the test set in %, mean ± standard deviation over seeds "
        f"{', '.join(map(str, setting.seeds))}, of the mean of all nodes' models and of their own "
        f"ones in the mean (nodes); {base.nodes} nodes, momentum {base.momentum:g}. The rate "
        "follows the batch; of several rates the best on the test set at the first seed is used. "
        f"pmsgd-lars runs with trust {setting.lars_trust:g}. {values}.",
        *_leads(records),
        f"The paper's figures are of {source}. Compare the order of methods, not the numbers.",
    ]


def _leads(records: Sequence[Record]) -> list[str]:
    """Return DecentLaM's leads over DmSGD, seed by seed."""
    parts = []
    (averaged, _), (nodes, _), *_ = _scores_of(records)
    for case, batch in dict.fromkeys((r["case"], r["batch"]) for r in records):
        here = where(records, chosen=True, case=case, batch=batch)
        for ours in ("decentlam", STEADY):
            if leads(here, ours, "dmsgd", averaged):
                text = lead_text(here, ours, keys=(averaged, nodes))
                parts.append(f"{ours} in {case} at {batch:,} {text}")
    return [f"Lead over DmSGD in points, seed by seed: {'; '.join(parts)}."] if parts else []


def _study(name: str, recipe: Callable[..., Scores], summary: str) -> Study:
    return Study(name, summary, recipe, run, table, notes, resumable=True)


LARGE_BATCH = _study(
    "large-batch",
    large_batch,
    "accuracy of the ten methods as the batch grows, Fashion-MNIST (Tables 1 and 3)",
)
MODELS = _study(
    "models", models, "accuracy of PmSGD, DmSGD, QG-DmSGD and DecentLaM on several models (Table 4)"
)
TOPOLOGIES = _study(
    "topologies",
    topologies,
    "accuracy on ring, mesh, exponential and random-match graphs (Table 5)",
)
DETECTION = _study(
    "detection",
    detection,
    "average precision of two detectors trained by five methods (Table 6)",
)

"""Tables 1, 3, 4 and 5: test accuracy of the methods by batch, by model and by topology."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path

from matplotlib.figure import Figure

from decentlam.lab.data import load
from decentlam.lab.recipes import Recipe
from decentlam.lab.studies import paper
from decentlam.lab.studies.common import (
    AVERAGED,
    METHODS,
    NODES,
    cell,
    dot_panels,
    fitting,
    lead_text,
    leads,
    seeds_from,
    where,
)
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.studies.sweep import sweep
from decentlam.topology import resolve

FASHION = "fashion-mnist"  # what the studies train on unless told otherwise
STEADY = "decentlam-steady"


@dataclass(frozen=True)
class Case:
    """Trainings that differ in method, batch and seed alone: a panel of the figure."""

    name: str
    methods: tuple[str, ...]
    batches: tuple[int, ...]
    model: str = "mlp"
    data: str = FASHION
    shards: str = "label-sorted:2"
    topology: str = "ring"
    epochs: float = 20.0
    lr: float = 0.05  # of the largest batch; the rate follows the batch
    factors: tuple[float, ...] = (1.0,)  # of lr: the first seed tries all, the others its best
    paper: tuple[tuple[str, str], ...] = ()  # its figures, by method


@dataclass(frozen=True)
class Accuracies:
    cases: tuple[Case, ...]
    seeds: tuple[int, ...]
    nodes: int = 8
    momentum: float = 0.9
    # LARS makes every step lr * trust * |x| long: 1 % at lr 0.05, ten times that with momentum.
    lars_trust: float = 0.2
    data_path: str | None = None


def _recipe(cases: Callable[[int, bool, str], Sequence[Case]]) -> Callable[..., Accuracies]:
    """Make the recipe of a study from its cases for so many nodes, quick or not, and data."""

    @wraps(cases)
    def recipe(
        nodes: int = 8,
        seed: int = 0,
        quick: bool = False,
        data: str = FASHION,
        data_path: str | None = None,
    ) -> Accuracies:
        seeds = seeds_from(seed, 2 if quick else 3)
        return Accuracies(tuple(cases(nodes, quick, data)), seeds, nodes, data_path=data_path)

    return recipe


@_recipe
def large_batch(nodes: int, quick: bool, data: str) -> Sequence[Case]:
    """Return one fixed setting in depth, and a trend over batches with rates chosen per method."""
    methods: tuple[str, ...] = METHODS
    if quick:
        data, methods = (
            "digits",
            ("pmsgd", "pmsgd-lars", "dmsgd", "slowmo", "qg-dmsgd", "decentlam"),
        )
    batches = fitting(nodes, *((128, 1024) if quick else (512, 2000, 8000)))
    known = tuple((method, paper.line(row)) for method, row in paper.IMAGENET.items())
    fixed = Case("fixed", methods, batches[-1:], data=data, epochs=6 if quick else 20, paper=known)
    trend = replace(
        fixed,
        batches=batches,
        epochs=3 if quick else 10,
        factors=(1.0, 4.0) if quick else (0.25, 1.0, 4.0),
    )
    kinds = ("iid", "label-sorted:2")
    return [fixed, *(replace(trend, name=f"trend, {how}", shards=how) for how in kinds)]


@_recipe
def models(nodes: int, quick: bool, data: str) -> Sequence[Case]:
    """Return a case per model. One core trains the perceptron on 60,000 images in a second and
    ResNet-20 in minutes: convolutions get the digits, some 1,400 images of 8 x 8."""
    large, small = fitting(nodes, 2000, 8000), fitting(nodes, 128, 512)
    what = [("linear", data, large, 20.0), ("mlp", data, large, 20.0)]
    what += [("cnn", "digits", small, 60.0), ("resnet20", "digits", small, 20.0)]
    if quick:
        small = fitting(nodes, 128, 1024)
        what = [("mlp", "digits", small, 5.0), ("cnn", "digits", small, 2.0)]
    methods = ("pmsgd", "dmsgd", "qg-dmsgd", "decentlam")
    return [Case(m, methods, batches, m, on, epochs=e) for m, on, batches, e in what]


@_recipe
def topologies(nodes: int, quick: bool, data: str) -> Sequence[Case]:
    """Return a case per topology, one of which changes at every step, and one of PmSGD."""
    batches = fitting(nodes, *((128, 1024) if quick else (2000, 8000)))
    data, epochs = ("digits", 10.0) if quick else (data, 20.0)
    cases = [Case("all-reduce", ("pmsgd",), batches, data=data, epochs=epochs)]
    for name, row in paper.TOPOLOGIES.items():
        methods: tuple[str, ...] = ("dmsgd", "qg-dmsgd", "decentlam")
        methods += () if resolve(name, nodes).static else (STEADY,)
        known = (("decentlam", paper.line(row)),)
        cases.append(
            Case(name, methods, batches, data=data, topology=name, epochs=epochs, paper=known)
        )
    return cases


def run(setting: Accuracies, tick: Tick = silent, directory: Path = Path()) -> list[Record]:
    """Return a record per run, with its case, and whether the table shows it."""
    check_data(setting)
    jobs = [
        (case, method, batch)
        for case in setting.cases
        for batch in reversed(case.batches)  # the cheapest first
        for method in case.methods
    ]
    first, *others = setting.seeds
    later = len(jobs) * len(others)
    tried = [(job, make(setting, *job, factor, first)) for job in jobs for factor in job[0].factors]

    def search(done: int, total: int, what: str) -> None:
        tick(done, total + later, what)

    def repeat(done: int, total: int, what: str) -> None:
        tick(done + len(tried), total + len(tried), what)

    found = sweep([recipe for _, recipe in tried], directory, search)
    by_job = {job: [r for (j, _), r in zip(tried, found, strict=True) if j == job] for job in jobs}
    best = {job: choose(records) for job, records in by_job.items()}
    repeats = [
        (job, make(setting, *job, best[job]["lr"] / _scaled(job[0], job[2]), seed))
        for job in jobs
        for seed in others
    ]
    again = sweep([recipe for _, recipe in repeats], directory, repeat)
    for (job, _), record in zip(repeats, again, strict=True):
        by_job[job].append(record)
    return [
        {
            "case": job[0].name,
            "chosen": r is best[job] or r["seed"] != first,
            "paper": dict(job[0].paper).get(job[1]),
            **r,
        }
        for job, records in by_job.items()
        for r in records
    ]


def check_data(setting: Accuracies) -> None:
    """Read the data once before anything is started; say what to do without it."""
    try:
        for data in dict.fromkeys(case.data for case in setting.cases):
            load(data, _path(setting, data))
    except ValueError as error:
        raise ValueError(
            f"{error}. Or try --quick, which makes do with the digits inside scikit-learn"
        ) from None


def make(
    setting: Accuracies, case: Case, method: str, batch: int, factor: float, seed: int
) -> Recipe:
    """Return the recipe of one run: a tenth of it warms up, then the rate stays."""
    return Recipe(
        method=method,
        topology=case.topology,
        nodes=setting.nodes,
        model=case.model,
        data=case.data,
        data_path=_path(setting, case.data),
        shards=case.shards,
        batch=batch,
        epochs=case.epochs,
        lr=_scaled(case, batch) * factor,
        momentum=setting.momentum,
        stable="ignore",  # as printed, stable or not
        hyper=(("trust", setting.lars_trust),) if method == "pmsgd-lars" else (),
        warmup_epochs=case.epochs / 10,
        seed=seed,
        evaluate_every=case.epochs,
        log_every=50,
    )


def choose(tried: Sequence[Record]) -> Record:
    """Return the run whose averaged model is best; of equal ones that with the lowest rate."""
    return max(tried, key=lambda r: (-1.0 if r[AVERAGED] is None else r[AVERAGED], -r["lr"]))


def _path(setting: Accuracies, data: str) -> str | None:
    return None if data == "digits" else setting.data_path


def _scaled(case: Case, batch: int) -> float:
    return case.lr * batch / case.batches[-1]


def table(records: Sequence[Record]) -> list[Record]:
    """Return test accuracies in %, of the averaged model and the nodes' own, a row per method."""
    shown = where(records, chosen=True)
    batches = sorted({r["batch"] for r in shown})
    rows = []
    for case, method in dict.fromkeys((r["case"], r["method"]) for r in shown):
        mine = where(shown, case=case, method=method)
        row: Record = {"case": case, "method": method}
        for score, whose in ((AVERAGED, "averaged"), (NODES, "nodes")):
            for batch in batches:
                row[f"{whose},_batch_{batch:,}"] = cell(where(mine, batch=batch), score)
        rates = dict.fromkeys(r["lr"] for r in sorted(mine, key=lambda r: r["batch"]))
        row["lr"] = " / ".join(f"{lr:g}" for lr in rates)
        row["paper:_ImageNet"] = mine[0]["paper"]
        rows.append(row)
    return rows


def notes(setting: Accuracies, records: Sequence[Record]) -> list[str]:
    values = "; ".join(
        f"{case.name}: {case.model} on {case.data}, {case.shards}, {case.topology}, "
        f"{case.epochs:g} epochs, lr {' or '.join(f'{case.lr * f:g}' for f in case.factors)} at "
        f"batch {case.batches[-1]:,}"
        for case in setting.cases
    )
    return [
        "Top-1 on the test set in %, mean ± standard deviation over seeds "
        f"{', '.join(map(str, setting.seeds))}, of the mean of all nodes' models (averaged) and of "
        f"their own ones in the mean (nodes); {setting.nodes} nodes, momentum "
        f"{setting.momentum:g}. A tenth of the epochs is warm-up, then the rate is constant, and "
        "follows the batch. Of several rates the best on the test set at the first seed is used. "
        f"pmsgd-lars runs with trust {setting.lars_trust:g}; no weight decay. {values}.",
        *_leads(records),
        "The paper's figures are of ImageNet with ResNet-50, batches of 2K / 8K / 16K / 32K (Table "
        "3) or 16K / 32K (Table 5). Compare the order of methods, not the numbers.",
    ]


def _leads(records: Sequence[Record]) -> list[str]:
    """Return DecentLaM's leads over DmSGD, seed by seed."""
    parts = []
    for case, batch in dict.fromkeys((r["case"], r["batch"]) for r in records):
        here = where(records, chosen=True, case=case, batch=batch)
        for ours in ("decentlam", STEADY):
            if leads(here, ours, "dmsgd"):
                parts.append(f"{ours} in {case} at {batch:,} {lead_text(here, ours)}")
    return [f"Lead over DmSGD in points, seed by seed: {'; '.join(parts)}."] if parts else []


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw a panel per case, a band per batch: every seed of every method."""
    shown = where(records, chosen=True)
    panels = {case: where(shown, case=case) for case in dict.fromkeys(r["case"] for r in shown)}
    return {"accuracy": dot_panels(panels, "batch")}


def _study(name: str, recipe: Callable[..., Accuracies], summary: str) -> Study:
    return Study(name, summary, recipe, run, table, notes, figures, resumable=True)


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

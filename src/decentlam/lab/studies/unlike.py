"""Unlike data at equal bytes: DecentLaM's forms and the all-reduce over a dozen settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from decentlam.lab import schedules
from decentlam.lab.data import Batches, load, split
from decentlam.lab.data.memory import InMemory
from decentlam.lab.studies.accuracy import FASHION
from decentlam.lab.studies.common import AVERAGED, NODES, Finished, scores, seeds_from, where
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.studies.text import StackedModel
from decentlam.simulation.simulate import Nodes

HIDDEN = 64
TWO = "two-random-matches"
RATES = (0.05, 0.1, 0.2, 0.4)


@dataclass(frozen=True)
class Setting:
    """A row of the table: the problem that all methods are trained on."""

    data: str = "fashion-mnist"
    shards: str = "label-sorted"
    batch: int = 8000
    schedule: str = "cosine"
    nodes: int = 8
    topology: str = "bipartite-random-match"
    rates: tuple[float, ...] = RATES

    @property
    def steps(self) -> int:
        return {8000: 140, 2000: 200, 512: 300}.get(self.batch, 40)


_CIFAR = "cifar10"
SETTINGS = (
    Setting(),
    Setting(rates=(0.4,)),
    Setting(schedule="constant"),
    Setting(batch=2000),
    Setting(batch=512),
    Setting(shards="dirichlet:0.1"),
    Setting(shards="iid"),
    Setting(nodes=16),
    Setting(topology="one-peer-hypercube"),
    Setting(topology="ring"),
    Setting(data=_CIFAR),
    Setting(data=_CIFAR, batch=2000, schedule="constant"),
    Setting(data=_CIFAR, shards="dirichlet:0.1", batch=2000, nodes=16),
)
# Two peers in 16 bits send the bytes of one whole message.
METHODS = (
    ("pmsgd", None),
    ("decentlam-steady", None),
    ("decentlam-exact", None),
    ("decentlam-steady", TWO),
    ("decentlam-exact", TWO),
)


@dataclass(frozen=True)
class Unlike:
    """The rate of each method is the best of a grid on the first seed; all seeds are shown."""

    settings: tuple[Setting, ...] = SETTINGS
    methods: tuple[tuple[str, str | None], ...] = METHODS
    momentum: float = 0.9
    seeds: tuple[int, ...] = (0, 1, 2)
    data_path: str | None = None  # of CIFAR-10


def recipe(
    nodes: int | None = None,
    seed: int = 0,
    quick: bool = False,
    data: str = FASHION,
    data_path: str | None = None,
) -> Unlike:
    """Without the path of CIFAR-10 the settings with it are left out."""
    if data not in (FASHION, _CIFAR):
        raise ValueError(f"unlike is about {FASHION} and {_CIFAR}; got {data}")
    if nodes and not quick:
        raise ValueError("unlike has settings of 8 and of 16 nodes; leave --nodes out")
    if quick:
        small = Setting("digits", batch=128, nodes=nodes or 8, rates=(0.1, 0.4))
        return Unlike((small,), seeds=seeds_from(seed, 2))
    settings = tuple(s for s in SETTINGS if s.data != _CIFAR or data_path)
    return Unlike(settings, seeds=seeds_from(seed, 3), data_path=data_path)


def run(setting: Unlike, tick: Tick = silent, directory: Path = Path()) -> list[Record]:
    """Return a record per training; those in runs.jsonl are not repeated."""
    finished, done, records = Finished(directory / "runs.jsonl"), 0, list[Record]()
    most = sum(len(s.rates) + len(setting.seeds) - 1 for s in setting.settings)

    def one(case: Setting, method: str, topology: str | None, lr: float, seed: int) -> Record:
        nonlocal done
        told = {name: value for name, value in asdict(case).items() if name != "rates"}
        told |= {"method": method, "topology": topology or case.topology, "lr": lr, "seed": seed}
        scores = finished.get(told, lambda: train(case, method, topology, lr, seed, setting))
        done += 1
        tick(done, most * len(setting.methods), f"{case.data} {case.shards} {method}")
        row = {"row": setting.settings.index(case), "large": len(case.rates) == 1}
        return told | scores | row

    for case in setting.settings:
        for method, topology in setting.methods:
            first = [one(case, method, topology, lr, setting.seeds[0]) for lr in case.rates]
            best = max(first, key=lambda r: -1 if r[AVERAGED] is None else r[AVERAGED])
            rest = [one(case, method, topology, best["lr"], s) for s in setting.seeds[1:]]
            records += [{**r, "chosen": r is best or r in rest} for r in [*first, *rest]]
    return records


@cache
def _pooled(name: str, path: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training and test images, averaged over 2 x 2 pixels (4 x 4 of CIFAR), and labels."""
    data = load(name, path)
    assert isinstance(data, InMemory)
    window = 4 if name == _CIFAR else 2
    mean, std = (torch.tensor(v)[:, None, None] for v in (data.mean, data.std))

    def inputs(images: Tensor) -> Tensor:
        parts = [F.avg_pool2d((p / 255 - mean) / std, window) for p in images.split(5000)]
        return torch.cat(parts).flatten(1)

    return inputs(data.images), data.labels, inputs(data.test_images), data.test_labels


def train(
    case: Setting, method: str, topology: str | None, lr: float, seed: int, setting: Unlike
) -> Record:
    """Train one hidden layer on every node; return both accuracies, None if it diverges."""
    x, labels, test, test_labels = _pooled(
        case.data, setting.data_path if case.data == _CIFAR else None
    )
    n, steps = case.nodes, case.steps
    batches = Batches(split(labels, n, case.shards, seed), case.batch // n, seed)
    classes, wide = int(labels.max()) + 1, x.shape[1]
    model = nn.Sequential(nn.Linear(wide, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))
    generator = torch.Generator().manual_seed(seed)
    for p, inputs in zip(model.parameters(), (wide, wide, HIDDEN, HIDDEN), strict=True):
        p.data.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
    stacked = StackedModel(model, n)
    nodes = Nodes(method, topology or case.topology, stacked.x, setting.momentum)
    rate = schedules.factor(case.schedule, steps, steps / 10)
    for k in range(steps):
        chosen = torch.stack([batches.indices(k, node) for node in range(n)])
        stacked.x = nodes.x
        gradients = stacked.gradient(x[chosen], labels[chosen])
        if not gradients.isfinite().all():
            return {AVERAGED: None, NODES: None}
        nodes.step(gradients, lr * rate(k))
    right = []
    for one in (nodes.x.mean(0), *nodes.x):
        vector_to_parameters(one, model.parameters())
        with torch.no_grad():
            right.append((model(test).argmax(1) == test_labels).double().mean().item())
    return {AVERAGED: right[0], NODES: fmean(right[1:])}


def table(records: Sequence[Record]) -> list[Record]:
    """Return a row per setting: averaged / nodes of every method, in percent."""
    rows = []
    for number in sorted({r["row"] for r in records}):
        mine = where(records, row=number)
        one = mine[0]
        row: Record = {
            "data": one["data"],
            "shards": one["shards"],
            "batch": one["batch"],
            "lr": one["schedule"] + (f" {one['lr']:g}" if one["large"] else ""),
            "nodes": one["nodes"],
            "network": next((r["topology"] for r in mine if r["topology"] != TWO), TWO),
        }
        for method, topology in dict.fromkeys((r["method"], r["topology"]) for r in mine):
            name = method + (", two pairs" if topology == TWO else "")
            shown = where(mine, method=method, topology=topology, chosen=True)
            cells = [scores(shown, key) for key in (AVERAGED, NODES)]
            lost = len(shown) - len(cells[0])
            row[name] = " / ".join(f"{fmean(c):.1f}" for c in cells) if cells[0] else "diverges"
            row[name] += f", {lost} diverge" if lost and cells[0] else ""
        rows.append(row)
    return rows


def notes(setting: Unlike, records: Sequence[Record]) -> list[str]:
    return [
        f"Top-1 on the test set in %, averaged / nodes, mean of seeds "
        f"{', '.join(map(str, setting.seeds))}; images pooled to 14 x 14 (CIFAR-10 8 x 8), one "
        f"hidden layer of {HIDDEN}, momentum {setting.momentum:g}, a tenth of the steps warms up; "
        "140 steps of 8,000, 200 of 2,000, 300 of 512 samples.",
        f"Each method has the best of lr {', '.join(f'{r:g}' for r in RATES)} on seed "
        f"{setting.seeds[0]}.",
        "Two pairs in 16 bits have the bytes of one whole message. An all-reduce sends "
        "2 (n - 1) / n messages, with 16 bits half of that: 0.875 with 8 nodes.",
    ]


_SUMMARY = "nodes that see unlike data: DecentLaM's forms beside the all-reduce, at equal bytes"
STUDY = Study("unlike", _SUMMARY, recipe, run, table, notes, resumable=True)

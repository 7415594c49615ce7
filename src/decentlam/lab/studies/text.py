"""Text: the validation loss of a small GPT over the bytes that a node sends, method by method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import accumulate, chain, pairwise, product, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, vmap

from decentlam.lab import plot_style
from decentlam.lab.data import Batches, split
from decentlam.lab.data.digits import digits
from decentlam.lab.data.text import Text, shakespeare, stdlib, text
from decentlam.lab.models import make_model
from decentlam.lab.studies.common import Finished, mean_and_spread, seeds_from, where
from decentlam.lab.studies.study import Record, Study, Tick, silent
from decentlam.lab.studies.text_methods import METHODS

SOURCES = {"stdlib": stdlib, "shakespeare": shakespeare, "text": text}
CONTEXT, TEST_WINDOWS, EVALUATIONS = 32, 1024, 8
WINDOWS = 4096  # of a group that a node may train on: 131 kB
RATES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064)
WARMUP = 0.05  # of the steps; then the rate falls to 0 as a cosine


@dataclass(frozen=True)
class Problem:
    """A training problem: model, data, number of nodes and steps."""

    data: str  # unlike, iid, digits
    nodes: int
    steps: int
    batch: int  # of a node
    model: str

    @property
    def name(self) -> str:
        return f"{self.data}, {self.nodes} nodes"


@dataclass(frozen=True)
class TextStudy:
    """The problems, where their text is from, and the seeds."""

    problems: tuple[tuple[Problem, tuple[str, ...]], ...]  # each with its methods
    sources: tuple[tuple[str, str | None], ...]  # data and path, groups are taken from each in turn
    rates: tuple[float, ...]  # every method has the best of these
    seeds: tuple[int, ...]


def recipe(
    nodes: int = 8,
    seed: int = 0,
    quick: bool = False,
    data: str = "stdlib",
    data_path: str | None = None,
) -> TextStudy:
    if data not in SOURCES:
        raise ValueError(f"unknown text {data!r}; choose from {', '.join(SOURCES)}")
    on_text = tuple(name for name, method in METHODS.items() if method.text)
    large = ("all-reduce", "adamw", "adamw-16-bit", "adamw-two")
    if quick:
        problems: Any = (
            (Problem("unlike", nodes, 32, 2, "gpt-tiny"), on_text),
            (Problem("digits", nodes, 60, 16, "mlp"), tuple(METHODS)),
        )
    else:
        problems = (
            (Problem("unlike", nodes, 640, 4, "gpt-tiny"), on_text),
            (Problem("digits", nodes, 400, 16, "mlp"), tuple(METHODS)),
            (Problem("iid", nodes, 640, 4, "gpt-tiny"), on_text),
            (Problem("unlike", 2 * nodes, 640, 4, "gpt-tiny"), large),
        )
    rates = (0.008,) if quick else RATES
    sources: tuple[tuple[str, str | None], ...] = ((data, data_path), ("stdlib", None))
    seeds = seeds_from(seed, 1 if quick else 3)
    return TextStudy(problems, tuple(dict.fromkeys(sources)), rates, seeds)


# Running -----------------------------------------------------------------------------------------


def run(setting: TextStudy, tick: Tick = silent, directory: Path = Path()) -> list[Record]:
    """Return a record per run. Each is written when it is finished; those that are there stay."""
    finished, used = Finished(directory / "runs.jsonl"), list[Record]()
    searched, total = 0, sum(len(methods) for _, methods in setting.problems)

    def loss_of(problem: Problem, method: str, seed: int, lr: float) -> float:
        def run() -> Record:
            tick(searched, total, f"{problem.name}: {method}, lr {lr:g}, seed {seed}")
            return train(setting, problem, method, lr, seed)

        record = finished.get([asdict(problem), setting.sources, method, lr, seed], run)
        if record not in used:
            used.append(record)
        return math.inf if record["loss"] is None else record["loss"]

    first, *others = setting.seeds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are too small for more
    try:
        for several_seeds, (problem, methods) in product((True, False), setting.problems):
            rates = {}
            for method in (m for m in methods if METHODS[m].several_seeds is several_seeds):
                rates[method] = _search(setting.rates, partial(loss_of, problem, method, first))
                searched += 1
            for seed, method in product(others if several_seeds else (), rates):
                for lr in rates[method]:
                    loss_of(problem, method, seed, lr)
    finally:
        torch.set_num_threads(threads)
    return used


def _search(rates: Sequence[float], loss: Callable[[float], float]) -> list[float]:
    """Return the two best rates, going up or down from the middle while the loss falls."""
    tried: dict[float, float] = {}

    def lower(place: int, than: int) -> bool:
        for k in (than, place):
            if rates[k] not in tried:
                tried[rates[k]] = loss(rates[k])
        return tried[rates[place]] < tried[rates[than]]

    place = len(rates) // 2
    for way in (1, -1):
        while 0 <= place + way < len(rates) and lower(place + way, than=place):
            place += way
    lower(place, than=place)  # tries the middle rate even if it is the only one
    return sorted(tried, key=lambda rate: tried[rate])[:2]


def train(setting: TextStudy, problem: Problem, method: str, lr: float, seed: int) -> Record:
    """Train all nodes of one run, and return the losses of their averaged model on the way."""
    data, shards, test = _data(problem, setting.sources, seed)
    model = make_model(problem.model, data.shape, data.classes, seed)
    batches = Batches(shards, problem.batch, seed)
    nodes = StackedModel(model, problem.nodes)
    moves = METHODS[method].start(nodes.x, nodes.layers, seed)
    every, sent, curve = max(1, problem.steps // EVALUATIONS), 0.0, []
    for k in range(problem.steps):
        loaded = [batches.load(data, k, node) for node in range(problem.nodes)]
        inputs, targets = (torch.stack(part) for part in zip(*loaded, strict=True))
        with torch.no_grad():
            sent += moves.send((nodes.gradient(inputs, targets), lr * _factor(k, problem.steps)))
        if (k + 1) % every == 0 or k + 1 == problem.steps:
            loss = nodes.averaged_loss(*test)
            curve.append([k + 1, sent, loss if math.isfinite(loss) else None])
            if not math.isfinite(loss):
                break
    return {
        "problem": problem.name,
        "nodes": problem.nodes,
        "method": method,
        "lr": lr,
        "seed": seed,
        "parameters": nodes.x.shape[1],
        "steps": problem.steps,
        "loss": curve[-1][2],
        "sent": sent / problem.steps if curve[-1][2] is not None else None,
        "curve": curve,  # step, models sent by a node until then, loss
    }


def _factor(step: int, steps: int) -> float:
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


class StackedModel:
    """n models in one tensor x (n, d), and the gradients of all of them in one call."""

    def __init__(self, model: nn.Module, nodes: int) -> None:
        self._model = model
        self._named = {name: p.detach() for name, p in model.named_parameters()}
        self.x = torch.cat([p.reshape(-1) for p in self._named.values()]).repeat(nodes, 1)
        stops = [0, *accumulate(p.numel() for p in self._named.values())]
        self.layers = [slice(start, stop) for start, stop in pairwise(stops)]
        self._losses = vmap(self._loss)

    def _loss(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self._model, parameters, (inputs,)), targets)

    def _views(self, x: Tensor) -> dict[str, Tensor]:
        named = zip(self._named.items(), self.layers, strict=True)
        return {name: x[..., s].view(*x.shape[:-1], *p.shape) for (name, p), s in named}

    def gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return each node's gradient on its own batch, (n, d)."""
        leaves = {name: p.requires_grad_() for name, p in self._views(self.x.detach()).items()}
        with torch.enable_grad():
            losses = self._losses(leaves, inputs, targets)
            found = torch.autograd.grad(losses.sum(), list(leaves.values()))
        return torch.cat([g.reshape(len(g), -1) for g in found], dim=1)

    @torch.no_grad()
    def averaged_loss(self, inputs: Tensor, targets: Tensor) -> float:
        """Return the loss of the mean of all models."""
        return self._loss(self._views(self.x.mean(0)), inputs, targets).item()


# Data --------------------------------------------------------------------------------------------


def _data(
    problem: Problem, sources: tuple[tuple[str, str | None], ...], seed: int
) -> tuple[Any, list[Tensor], tuple[Tensor, Tensor]]:
    """Return the data, what each node has of it, and inputs and targets to test on."""
    if problem.data == "digits":
        images = digits()
        shards = split(images.labels, problem.nodes, "label-sorted:1", seed)
        return images, shards, next(iter(images.test_batches(images.num_test)))
    read = _text(sources, problem.nodes)
    shards = [torch.arange(len(read.labels))[read.labels == g] for g in range(problem.nodes)]
    if problem.data == "iid":
        shards = split(read.labels, problem.nodes, "iid", seed)
    return read, shards, next(iter(read.test_batches(read.num_test)))


@cache
def _text(sources: tuple[tuple[str, str | None], ...], nodes: int) -> Text:
    """Return as many groups as there are nodes, the largest of each source in turn."""
    texts = [SOURCES[name](path, CONTEXT) for name, path in sources]
    numbered = zip_longest(*([(t, g) for g in range(len(t.groups))] for t in texts))
    chosen = [pair for pair in chain(*numbered) if pair is not None][:nodes]
    if len(chosen) < nodes:
        raise ValueError(
            f"there are {len(chosen)} groups of text for {nodes} nodes; try fewer nodes, or a "
            "--data-path with more folders or files"
        )
    tested = -(-TEST_WINDOWS // nodes)
    train = [t.windows[t.labels == g][:WINDOWS] for t, g in chosen]
    test = [t.test_windows[t.test_labels == g][:tested] for t, g in chosen]
    numbers = [[torch.full((len(w),), g) for g, w in enumerate(part)] for part in (train, test)]
    return Text(
        "+".join(name for name, _ in sources),
        tuple(t.groups[g] for t, g in chosen),
        torch.cat(train),
        torch.cat(numbers[0]),
        torch.cat(test),
        torch.cat(numbers[1]),
    )


# Reading -----------------------------------------------------------------------------------------


def best(records: Sequence[Record], problem: str, method: str) -> list[Record]:
    """Return the runs of a method at its best rate, one per seed: of the rates that were tried with
    the most seeds, the one with the least mean loss."""
    rates: dict[float, list[Record]] = {}
    for record in where(records, problem=problem, method=method):
        rates.setdefault(record["lr"], []).append(record)
    most = max(map(len, rates.values()), default=0)
    whole = [runs for runs in rates.values() if len(runs) == most]
    return min(whole, key=_mean_loss, default=[])


def _mean_loss(runs: Sequence[Record]) -> float:
    return statistics.mean(math.inf if r["loss"] is None else r["loss"] for r in runs)


def table(records: Sequence[Record]) -> list[Record]:
    """Return a row per method, a column per problem: loss, and what it is above all-reduce."""
    problems = list(dict.fromkeys(r["problem"] for r in records))
    rows = []
    for method in dict.fromkeys(r["method"] for r in records):
        mine = {problem: best(records, problem, method) for problem in problems}
        sent = [r["sent"] for runs in mine.values() for r in runs]
        row: Record = {
            "method": METHODS[method].title,
            "models_per_step": sent[0] if sent else None,
        }
        for problem, runs in mine.items():
            row[problem] = _cell(runs, best(records, problem, "all-reduce"))
        rows.append(row)
    return rows


def _cell(runs: Sequence[Record], baseline: Sequence[Record]) -> str | None:
    """Return the loss, the rate, and the mean lead of the all-reduce over the same seeds."""
    if not runs:
        return None
    mean, spread = mean_and_spread([r["loss"] for r in runs])
    text = f"{mean:.4f}" + (f" ± {spread:.4f}" if len(runs) > 1 else "") + f" at {runs[0]['lr']:g}"
    other = {r["seed"]: r["loss"] for r in baseline}
    above = [r["loss"] - other[r["seed"]] for r in runs if r["seed"] in other]
    return f"{text} ({mean_and_spread(above)[0]:+.4f})" if above else text


def notes(setting: TextStudy, records: Sequence[Record]) -> list[str]:
    first, _ = setting.problems[0]
    return [
        f"Validation loss of the averaged model in nats, mean ± standard deviation over the seeds, "
        "with the best rate of the same grid for all methods (of the two that are best at the "
        "first seed, the better one over all seeds), and in brackets "
        f"what it is above the all-reduce with the same seeds. {first.model}, context {CONTEXT}, "
        f"{first.steps} steps of {first.batch} windows per node, torch's AdamW coefficients, "
        f"{WARMUP:.0%} warm-up, cosine to 0. Text of {', '.join(n for n, _ in setting.sources)}; "
        "unlike: every node reads one work or package of its own.",
        "A model per step is 4 bytes per parameter sent by a node; DDP's ring all-reduce sends "
        "2 (n - 1) / n. Nodes are simulated.",
    ]


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw the loss over the bytes that a node sent."""
    problems = [p for p in dict.fromkeys(r["problem"] for r in records) if "digits" not in p]
    if not problems:
        return {}
    wide = 4.4 * len(problems)
    figure, axes = plot_style.axes(len(problems), (wide, 4.4), columns=len(problems))
    lines: dict[str, Any] = {}
    for ax, problem in zip(axes, problems, strict=True):
        for name, method in METHODS.items():
            for run in best(records, problem, name)[:1]:  # the first seed at the best rate
                style: dict[str, Any] = {"color": method.color, "marker": method.marker}
                mega = 4e-6 * run["parameters"]
                x, y = zip(
                    *[(mega * sent, loss) for _, sent, loss in run["curve"] if sent], strict=True
                )
                style |= {"markersize": 7, "markevery": [len(x) - 1], "label": method.title}
                (lines[name],) = ax.plot(x, y, **style)
        ax.set(title=problem, xlabel="MB sent by a node", xscale="log")
        plot_style.plain_ticks(ax, [k * 10**power for power in range(-2, 6) for k in (1, 3)])
    axes[0].set_ylabel("validation loss, nats per byte")
    handles = list(lines.values())
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return {"text": figure}


_SUMMARY = "loss of a small GPT over bytes sent: AdamW by gossip, local steps, DiLoCo, NoLoCo"
STUDY = Study("text", _SUMMARY, recipe, run, table, notes, figures, resumable=True)

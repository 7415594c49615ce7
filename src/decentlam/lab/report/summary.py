"""What was run, in words: the title, one paragraph and the key numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decentlam.lab.report.formatting import (
    Spread,
    bytes_of,
    counted,
    listed,
    percent,
    percent_spread,
    value_text,
)
from decentlam.lab.report.run_groups import Setting
from decentlam.lab.report.runs import Run, number, score_name
from decentlam.lab.report.table import COLUMNS

_SHARDS = {
    "iid": "Each node holds a random share of the data.",
    "label-sorted": "The data were sorted by label before they were dealt out, so that each node "
    "sees only a few classes.",
    "dirichlet": "Each class was dealt out to the nodes in uneven, random shares.",
}


def title(runs: Sequence[Run]) -> str:
    return f"{_either(runs, 'model')} on {_either(runs, 'data')}, {_nodes(runs)}"


def paragraph(runs: Sequence[Run], settings: Sequence[Setting]) -> str:
    """Return one paragraph of plain sentences."""
    methods = list(dict.fromkeys(group.label for s in settings for group in s.groups))
    seeds = {value_text(run.recipe.get("seed")) for run in runs}
    networks = _either(runs, "topology")
    what = (
        f"{listed(methods)} trained {_either(runs, 'model')} on {_either(runs, 'data')} with "
        f"{_nodes(runs)} ({networks}) for {_either(runs, 'epochs')} epochs, "
        f"{_either(runs, 'batch')} images per step{_per_node(runs)}, with "
        f"{counted(len(seeds), 'seed')}."
    )
    sentences = [what, _shards(runs), _simulated(runs), _winner(settings), _diverged(runs)]
    return " ".join(sentence for sentence in sentences if sentence)


def key_numbers(runs: Sequence[Run], settings: Sequence[Setting]) -> list[tuple[str, str, str]]:
    """Return (what, number, more) of six numbers."""
    methods = {run.recipe["method"] for run in runs}
    rho, message = _same(runs, "rho"), _same(runs, "message_bytes")
    return [
        _headline(settings),
        ("runs", f"{len(runs)}", counted(len(methods), "method")),
        ("nodes", _either(runs, "nodes"), _either(runs, "topology") + _of(rho, ", ρ = {:.3f}")),
        ("images per step", _either(runs, "batch"), f"learning rate {_either(runs, 'lr')}"),
        ("epochs", _either(runs, "epochs"), _of(_same(runs, "steps"), "{:,.0f} steps")),
        (
            "parameters",
            _of(_same(runs, "parameters"), "{:,.0f}") or "several",
            f"{bytes_of(message)} per message" if message else _either(runs, "precision"),
        ),
    ]


def _headline(settings: Sequence[Setting]) -> tuple[str, str, str]:
    if len(settings) > 1:
        return "settings", f"{len(settings)}", "each with a table below"
    best = _best(settings)
    if best is None:
        return "averaged model", "–", "no run has finished"
    several = len(settings[0].groups) > 1
    return f"{'best ' * several}averaged model", f"{percent(best[1].mean)} %", best[0]


def oddities(runs: Sequence[Run]) -> list[str]:
    """Return what is odd about the files of the runs."""
    return [f"{run.directory.name}: {note}." for run in runs for note in run.notes]


def _winner(settings: Sequence[Setting]) -> str:
    best = _best(settings)
    if best is None or len(settings[0].groups) == 1:
        return ""
    right = percent_spread(best[1])
    score = score_name([run for group in settings[0].groups for run in group.runs])
    value = f"its {score} is {right} %"
    if score == "accuracy":
        value = f"{right} % of the test data are right"
    return f"The best averaged model is that of {best[0]}: {value}."


def _best(settings: Sequence[Setting]) -> tuple[str, Spread] | None:
    """Return the group with the best averaged model, where there is one problem."""
    accuracy = COLUMNS[0].value
    groups = settings[0].groups if len(settings) == 1 else ()
    found = [(value, group) for group in groups if group.finished and (value := accuracy(group))]
    if not found:
        return None
    value, group = max(found, key=lambda pair: pair[0].mean)
    return f"{group.label} {group.detail}".strip(), value


def _diverged(runs: Sequence[Run]) -> str:
    count = sum(run.status == "diverged" for run in runs)
    if not count:
        return ""
    return f"{count} of {counted(len(runs), 'run')} diverged: shown, but in no average."


def _simulated(runs: Sequence[Run]) -> str:
    kinds = {bool(run.info.get("simulated")) for run in runs}
    if kinds == {True}:
        return "All nodes were simulated in one process: no time here is that of a network."
    return "Some runs were simulated in one process." if kinds == {True, False} else ""


def _shards(runs: Sequence[Run]) -> str:
    values = _values(runs, "shards")
    return _SHARDS.get(str(values[0]).split(":")[0], "") if len(values) == 1 else ""


def _nodes(runs: Sequence[Run]) -> str:
    nodes = _either(runs, "nodes")
    return "one node" if nodes == "1" else f"{nodes} nodes"


def _per_node(runs: Sequence[Run]) -> str:
    batches, nodes = _values(runs, "batch"), _values(runs, "nodes")
    if len(batches) > 1 or len(nodes) > 1 or not number(batches[0]) or not number(nodes[0]):
        return ""
    return f" ({batches[0] / nodes[0]:,.0f} per node)" if nodes[0] > 1 else ""


def _values(runs: Sequence[Run], field: str) -> list[Any]:
    values = {
        value_text(value): value for run in runs if (value := run.recipe.get(field, "?")) != ""
    }
    return list(values.values())


def _either(runs: Sequence[Run], field: str) -> str:
    """Return the values of a field: 8, or 8, 16 or 32, or 2 to 64 if they are many."""
    values = _values(runs, field)
    if all(number(value) is not None for value in values):
        values = sorted(values)
        lone = len(values) == 1 and isinstance(values[0], int)
        shown = [f"{value:,}" if lone else value_text(value) for value in values]
        if len(shown) > 4:
            return f"{shown[0]} to {shown[-1]}"
    else:
        shown = [value_text(value) for value in values]
    return listed(shown).replace(" and ", " or ")


def _same(runs: Sequence[Run], key: str) -> float | None:
    """Return a number of run.json that is the same for all runs that have it."""
    values = {number(run.info.get(key)) for run in runs} - {None}
    return values.pop() if len(values) == 1 else None


def _of(value: float | None, words: str) -> str:
    return "" if value is None else words.format(value)

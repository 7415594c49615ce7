"""The records that processes write with `decentlam.monitor`, read while they are written, and the
current state of the run that the page shows."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from decentlam.lab.formatting import bytes_of, duration, quantity, short
from decentlam.lab.report.runs import number
from decentlam.lab.topology_drawing import circle, positions
from decentlam.lab.values import Record, parse_json
from decentlam.monitoring import NODES
from decentlam.topology import resolve

_MOST_RECORDS = 2000  # of a process; beyond, every second one is forgotten
_MOST_POINTS = 200  # of a curve
_MOST_BYTES = 2**26  # read of a file at a time
_QUIET_SECONDS = 10.0  # without a record, while others write: the process is lost
_MOST_NODES = 1024  # processes that are read
_NUMBERS = (
    "step_seconds",
    "lr",
    "loss",
    "wait_seconds",
    "data_seconds",
    "bytes_sent",
    "disagreement",
)


@dataclass
class Process:
    """The records of one process, those of an earlier run in the same directory left out."""

    member: int
    records: list[Record] = field(default_factory=list)
    _read: int = 0  # bytes of its file

    def follow(self, file: Path) -> None:
        """Read what was written since the last time."""
        with file.open("rb") as source:
            if source.seek(0, 2) < self._read:  # another run has begun anew
                self.records, self._read = [], 0
            source.seek(self._read)
            text = source.read(_MOST_BYTES)
        whole = text.rfind(b"\n") + 1  # a line that is still being written is read later
        self._read += whole
        for line in text[:whole].splitlines():
            record = _record(line)
            while record and self.records and self.records[-1]["step"] > record["step"]:
                self.records.pop()  # it was resumed from there
            self.records += [record] if record else []
        while len(self.records) > _MOST_RECORDS:
            self.records = [*self.records[:-1:2], self.records[-1]]

    @property
    def last(self) -> Record:
        return self.records[-1]


def _record(line: bytes) -> Record | None:
    """Return the record of a line, its numbers finite or None; None if it is none."""
    try:
        found = parse_json(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    needed = {key: number(found.get(key)) for key in ("time", "step", "node", "step_seconds")}
    members = found.get("members")
    if None in needed.values() or not isinstance(members, list) or not members:
        return None
    texts = found.get("warnings")
    return {
        **{key: number(found.get(key)) for key in (*_NUMBERS, "total_steps")},
        **needed,
        "members": [m for m in members[:_MOST_NODES] if isinstance(m, int)],
        "warnings": [str(text)[:500] for text in texts[-5:]] if isinstance(texts, list) else [],
        "ended": found.get("ended") is True,
    }


class Nodes:
    """All processes of a run; `follow` reads on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / NODES
        self._all: dict[str, Process] = {}

    def follow(self) -> list[Process]:
        """Return the processes that have written anything, those of this run only."""
        for file in sorted(self._directory.glob("*.jsonl"))[:_MOST_NODES]:
            if file.stem.isdecimal():
                process = self._all.setdefault(file.stem, Process(int(file.stem)))
                process.follow(file)
        found = [process for process in self._all.values() if process.records]
        return sorted(found, key=lambda process: process.member)


def of_this_run(processes: Sequence[Process], info: Record) -> list[Process]:
    """Leave out those that have written nothing since the run began."""
    try:
        started = datetime.fromisoformat(str(info.get("started"))).timestamp() - 5
    except ValueError:
        started = 0.0
    return [process for process in processes if process.last["time"] > started]


def curves(processes: Sequence[Process], per_epoch: float) -> dict[str, Record]:
    """Return loss, disagreement and lr over epochs, each as a band over the processes: mean,
    lowest and highest in bins of steps."""
    last = max(process.last["step"] for process in processes)
    width = max(1.0, last / _MOST_POINTS)
    lines: dict[str, Record] = {}
    for key in ("loss", "disagreement", "lr"):
        bins: dict[int, list[float]] = {}
        for process in processes:
            own: dict[int, list[float]] = {}
            for record in process.records:
                if record[key] is not None:
                    own.setdefault(int(record["step"] / width), []).append(record[key])
            for at, values in own.items():
                bins.setdefault(at, []).append(statistics.fmean(values))
        line: Record = {
            "x": [short(min(last, (at + 1) * width) / per_epoch) for at in sorted(bins)]
        }
        for name, over in (("y", statistics.fmean), ("low", min), ("high", max)):
            line[name] = [short(over(bins[at])) for at in sorted(bins)]
        lines |= {key: line} if bins else {}
    return lines


# Now ---------------------------------------------------------------------------------------------


def now(processes: Sequence[Process], info: Record) -> Record | None:
    """Return the run as it is now; None if no process has written anything."""
    if not processes:
        return None
    fresh = max((process.last for process in processes), key=lambda record: record["time"])
    first = min((process.records[0] for process in processes), key=lambda record: record["time"])
    states = {p.member: _state(p, fresh, first) for p in processes}
    here = [p for p in processes if states[p.member] != "lost"]
    usual = statistics.median(_own(p.last) for p in here) if here else 0.0
    rows = [_row(p, states[p.member], usual) for p in processes]
    rows.sort(key=lambda row: (row["state"] == "lost", -row["late"]))
    return {
        "numbers": _numbers(here, rows, fresh, info),
        "nodes": rows,
        "parts": ["data", "compute", "wait for other nodes"],
        "warnings": list(
            dict.fromkeys(
                f"node {p.last['node']:.0f}: {text}" for p in here for text in p.last["warnings"]
            )
        )[-8:],
        **_graph(processes, states, fresh, info),
    }


def _state(process: Process, fresh: Record, first: Record) -> str:
    """Return ok, ended, joined or lost."""
    last = process.last
    if last["ended"]:
        return "ended"
    gaps = [b["time"] - a["time"] for a, b in pairwise(process.records[-9:])]
    patience = max(_QUIET_SECONDS, 4 * max(gaps, default=0.0))
    if process.member not in fresh["members"] or fresh["time"] - last["time"] > patience:
        return "lost"
    return "ok" if process.member in first["members"] else "joined"


def _own(record: Record) -> float:
    """Return the seconds of a step that the process did not wait for others."""
    return max(0.0, record["step_seconds"] - (record["wait_seconds"] or 0.0))


def _row(process: Process, state: str, usual: float) -> Record:
    last = process.last
    wait, data = last["wait_seconds"] or 0.0, last["data_seconds"] or 0.0
    late = _own(last) / usual - 1 if usual else 0.0
    return {
        "member": process.member,
        "name": f"process {process.member}" if state == "lost" else f"node {last['node']:.0f}",
        "state": state,
        "late": 0.0 if state == "lost" else late,
        "step": int(last["step"]),
        "loss": last["loss"],
        "split": [data, max(0.0, _own(last) - data), wait],
        "whole": duration(last["step_seconds"]),
    }


def _numbers(
    here: Sequence[Process], rows: Sequence[Record], fresh: Record, info: Record
) -> list[list[str]]:
    """Return [what, number, more] of what one asks first."""
    step, lost = int(fresh["step"]), sum(row["state"] == "lost" for row in rows)
    joined, ended = (sum(row["state"] == kind for row in rows) for kind in ("joined", "ended"))
    total = fresh["total_steps"] or number(info.get("steps"))
    per_epoch = number(info.get("steps_per_epoch"))
    seconds = _median(here, lambda last: last["step_seconds"])
    losses = [p.last["loss"] for p in here if p.last["loss"] is not None]
    spread = [p.last["disagreement"] for p in here if p.last["disagreement"] is not None]
    sent = _median(here, lambda last: last["bytes_sent"] or 0.0)
    size, n = number(info.get("parameters")), len(fresh["members"])
    slow = max(rows, key=lambda row: row["late"])
    changes = [f"{count} {what}" for count, what in ((lost, "lost"), (joined, "joined")) if count]
    epoch = f"epoch {step / per_epoch:.4g}" if per_epoch else ""
    left = (
        "" if not total or step >= total or ended else duration((total - step) * seconds) + " left"
    )
    return [
        ["step", f"{step:,}" + (f" of {total:,.0f}" if total else ""), epoch],
        ["steps per second", quantity((1 / seconds, None)) if seconds else "–", left],
        ["nodes", f"{len(here)}", ", ".join(changes) or ("ended" if ended else "all there")],
        ["loss", *_between(losses)],
        [
            "disagreement",
            quantity((statistics.fmean(d * d for d in spread) ** 0.5, None)) if spread else "–",
            "distance from the average, estimated",
        ],
        [
            "sent per node",
            f"{bytes_of(sent / seconds)}/s" if seconds else "–",
            f"{bytes_of(sent)} a step; an all-reduce {bytes_of(8 * size * (n - 1) / n)}"
            if size
            else "",
        ],
        ["slowest", slow["name"], f"{slow['late']:.0%} over the median, without waiting"],
        ["learning rate", "–" if fresh["lr"] is None else f"{fresh['lr']:.4g}", ""],
    ]


def _median(here: Sequence[Process], value: Callable[[Record], float]) -> float:
    return statistics.median(value(process.last) for process in here) if here else 0.0


def _between(values: Sequence[float]) -> list[str]:
    if not values:
        return ["–", ""]
    low, high = (quantity((value, None)) for value in (min(values), max(values)))
    return [quantity((statistics.fmean(values), None)), "" if low == high else f"{low} to {high}"]


def _graph(
    processes: Sequence[Process], states: dict[int, str], fresh: Record, info: Record
) -> Record:
    """Return where the nodes stand, by their member's place in `members`, and who talks to whom."""
    members = [p.member for p in processes]
    place = {member: at for at, member in enumerate(members)}
    recipe = info.get("recipe")
    recipe = recipe if isinstance(recipe, dict) else {}
    step, size = int(fresh["step"]), len(fresh["members"])
    try:
        topology: Any = resolve(str(recipe.get("topology")), size)
        w = topology.sparse(max(0, step - 1))
        pairs = [(int(b), int(a)) for a, b in zip(w.rows, w.columns, strict=True) if a != b]
    except (TypeError, ValueError):  # one that has no name, or other nodes
        topology, pairs = None, []
    edges = sorted(
        {
            (place[fresh["members"][a]], place[fresh["members"][b]])
            for a, b in pairs
            if {fresh["members"][a], fresh["members"][b]} <= place.keys()
            and (a < b or not topology.symmetric)
        }
    )
    whole = topology is not None and size == len(members)
    places = positions(topology) * (1, -1) if whole else circle(len(members)) * (1, -1)
    return {
        "members": members,
        "places": places.round(4).tolist(),
        "edges": edges if len(edges) <= 2000 else [],
        "caption": f"Who talks to whom at step {step:,}"
        + (f" of {topology.name}." if topology is not None else "."),
    }

"""Figure 6: iteration time of PmSGD, DmSGD and DecentLaM on slow and fast networks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decentlam.analysis.cost.model import Exchange
from decentlam.lab.emulation.contenders import RIVALS, choose, have_rivals
from decentlam.lab.emulation.hosts import bits_per_second
from decentlam.lab.emulation.results import left_out, limits, machine, summary
from decentlam.lab.emulation.setting import Setting
from decentlam.lab.emulation.timing import MeasurementError, measure
from decentlam.lab.studies.runtime_plots import by_case, compute_of, figures, title_of
from decentlam.lab.study import Record, Study, Tick, silent
from decentlam.lab.sweep import words

USUAL = (
    "DDP, bucket views",
    "DDP, 1 MB buckets",
    "raw exchange, 1 peer",
    "PmSGD",
    "DmSGD ring",
    "DecentLaM ring, overlap",
    "DecentLaM one-peer, no overlap",
    "DecentLaM one-peer, overlap",
    "DecentLaM one-peer, into forward",
    "DecentLaM sym. exponential, overlap",
    "AWC-DmSGD one-peer",
    "decent-dp ring (1 peer)",
)
FEW = (
    "PmSGD",
    "DmSGD ring",
    "DecentLaM ring, overlap",
    "DecentLaM one-peer, overlap",
    "DecentLaM one-peer, no overlap",
)
_START_SECONDS, _BUILD_SECONDS = 2.5, 0.4  # of a process, of a contender, with 2 cores
_CPU_SECONDS_PER_BYTE = 1e-9  # of a core, to copy, update and compute; a guess


@dataclass(frozen=True)
class Case:
    """A panel of the figure: a cluster, and what it trains."""

    nodes: int
    bandwidth: str | None  # of each link, each way; None: as fast as the machine copies
    compute: str = "real"
    model: str = "transformer-9.5M"
    parameters: int | None = None
    straggler_ms: float = 0.0


@dataclass(frozen=True)
class Runtime:
    """A longer sleep stands for a larger batch: the message stays the same."""

    cases: tuple[Case, ...] = (
        Case(4, "100Mbit", "sleep:300", parameters=1_000_000),
        Case(4, "1Gbit", "sleep:300", parameters=10_000_000),
        Case(4, None),
        Case(8, "100Mbit", "sleep:300", parameters=1_000_000),
    )
    only: tuple[str, ...] = USUAL  # contenders; none are all
    rounds: int = 3
    iterations: int = 4
    loopback: bool = False
    seed: int = 0
    timeout_seconds: float = 3600.0  # of a case

    @property
    def names(self) -> tuple[str, ...]:
        """The contenders that can be had here."""
        return tuple(n for n in self.only if n not in RIVALS or have_rivals())


def recipe(
    nodes: int | None = None, seed: int = 0, quick: bool = False, loopback: bool = False
) -> Runtime:
    """With `loopback` nothing limits the links, and cases that differ in nothing else are one."""
    if nodes is not None and nodes < 2:
        raise ValueError(f"runtime needs 2 nodes or more, got {nodes}")
    cases = Runtime.cases
    if quick:
        small: dict[str, Any] = {"compute": "sleep:60", "parameters": 500_000}
        cases = (Case(4, "100Mbit", **small), Case(4, "1Gbit", **small))
    changes: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
    if loopback:
        changes["bandwidth"] = None
    cases = tuple(dict.fromkeys(Case(**asdict(case) | changes) for case in cases))
    if quick:
        return Runtime(cases, FEW, rounds=2, iterations=4, loopback=loopback, seed=seed)
    return Runtime(cases, loopback=loopback, seed=seed)


def run(setting: Runtime, tick: Tick = silent) -> list[Record]:
    """A record per case, round and contender; a case that fails leaves its whole rounds."""
    records: list[Record] = []
    tasks = [_task(setting, case) for case in setting.cases]
    totals = [task.rounds * len(choose(task.only)) for task in tasks]
    total, done = sum(totals), 0
    tick(0, total, f"{total} runs, about {words(sum(map(_expected, setting.cases, tasks)))}")
    for number, (case, task) in enumerate(zip(setting.cases, tasks, strict=True)):
        network = "loopback" if setting.loopback else case.bandwidth or "no limit"
        about = {**asdict(case), "parameters": task.size, "network": network, "case": number}

        def heard(record: Record, about: Record = about) -> None:
            nonlocal done
            done += 1
            tick(done, total, f"{title_of(about)}, {record['contender']}")

        tick(done, total, title_of(about))
        try:
            found = measure(
                task,
                case.nodes,
                case.bandwidth,
                setting.loopback,
                setting.timeout_seconds,
                heard,
            )
        except MeasurementError as error:
            found = error.records
            if not any("seconds" in record for record in [*records, *found]):
                raise
            reason = str(error).strip().splitlines()[-1]
            found.append({"contender": f"the rest of {title_of(about)}", "left_out": reason})
        records += [{**about, **record} for record in found]
        done = sum(totals[: number + 1])
    tick(total, total, "done")
    return records


def _task(setting: Runtime, case: Case) -> Setting:
    return Setting(
        model=case.model,
        parameters=case.parameters,
        compute=case.compute,
        rounds=setting.rounds,
        iterations=setting.iterations,
        straggler_ms=case.straggler_ms,
        only=setting.names,
        seed=setting.seed,
    )


def _expected(case: Case, task: Setting) -> float:
    """Seconds that a case takes, by the bytes; what the CPU does is guessed from 2 cores."""
    rate = bits_per_second(case.bandwidth) / 8 if case.bandwidth else math.inf
    cpu = case.nodes * 4 * task.size / (os.cpu_count() or 1) * _CPU_SECONDS_PER_BYTE
    seconds = _START_SECONDS * case.nodes
    for contender in choose(task.only).values():
        exchange = Exchange(contender.reach, case.nodes, contender.peers(case.nodes))
        wire = exchange.bytes_sent(4 * task.size) / rate + task.straggler_ms / 1e3
        iteration = (task.sleep_seconds or 2 * cpu) + cpu + wire
        each = (contender.warm_up + task.iterations) * iteration + _BUILD_SECONDS
        seconds += task.rounds * each
    return seconds


def table(records: Sequence[Record]) -> list[Record]:
    rows = []
    for mine in by_case(records):
        about = mine[0]
        for row in summary(mine):
            rows.append(
                {
                    "nodes": about["nodes"],
                    "network": about["network"],
                    "parameters": f"{about['parameters'] / 1e6:.3g}M",
                    "compute": compute_of(about),
                    "contender": row["contender"],
                    "ms": round(row["ms"], 1),
                    "of_DDP": f"{row['of_DDP']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f})",
                    "speed-up": f"{row['speed_up']:.2f}",
                    "compute_ms": round(row["compute_ms"], 1),
                    "exposed_ms": round(row["exposed_ms"], 1),
                    "update_ms": round(row["update_ms"], 1),
                    "MB_sent": f"{row['MB_sent']:.3g}",
                }
            )
    return rows


def notes(setting: Runtime, records: Sequence[Record]) -> list[str]:
    where = (
        "processes on the machine's loopback, where every byte copied takes time from compute"
        if setting.loopback
        else "processes in network namespaces on one bridge, each link limited in both directions"
    )
    found = [
        f"Median over {setting.iterations} iterations (mean, with a straggler) of the mean over "
        f"nodes; then the median over {setting.rounds} rounds, in brackets the lowest and highest "
        f"ratio to DDP of the same round. Real {where}; {machine()}.",
        "Compute `sleep` is a model of equal layers that sleep, a third in forward and two thirds "
        "in backward: the CPU stays free, as with a GPU. Compute `real` shares the CPU with the "
        "network. The update is what step() takes when it does not wait; exposed is the rest of "
        "what an iteration takes longer than the same compute alone.",
        *dict.fromkeys(
            f"{r['nodes']} nodes, {r['parameters'] / 1e6:.3g}M parameters. "
            + limits(r["nodes"], r["parameters"])
            for r in records
        ),
        "The paper's Figure 6 has DmSGD and DecentLaM 1.2 to 1.9 times as fast as PmSGD: ResNet-50 "
        "on 8 nodes of 8 GPUs, 10 and 25 Gbit/s.",
        *dict.fromkeys(left_out(records)),
    ]
    if not have_rivals():
        found.append("decent-dp is not installed and left out.")
    return found


STUDY = Study(
    name="runtime",
    summary="iteration time on emulated networks, against DDP in the same run (Figure 6)",
    recipe=recipe,
    run=run,
    table=table,
    notes=notes,
    figures=figures,
)

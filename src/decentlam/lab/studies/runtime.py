"""Figure 6: iteration time of PmSGD, DmSGD and DecentLaM on slow and fast networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from decentlam.lab import plot_style
from decentlam.lab.network.contenders import LOCAL, available, has_decent_dp
from decentlam.lab.network.results import left_out, limits, machine, summary
from decentlam.lab.network.timing import Benchmark, measure
from decentlam.lab.studies.study import Record, Study, Tick, silent

USUAL = (
    "DDP, 1 MB buckets",
    "DDP, bf16 hook",
    "raw exchange, 1 peer",
    "PmSGD",
    "DmSGD ring",
    "DecentLaM ring, overlap",
    "DecentLaM one-peer, no overlap",
    "DecentLaM one-peer, overlap",
    "DecentLaM one-peer, overlap, float16",
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
# How a contender is drawn: the first name it starts with.
_METHOD_OF = {"PmSGD": "pmsgd", "DmSGD": "dmsgd", "DecentLaM": "decentlam", "AWC": "awc-dmsgd"}
_PARTS = {"compute": 0.3, "update": 0.55, "exposed": 1.0}  # the darkest is what the paper's is


@dataclass(frozen=True)
class Cluster:
    """A panel of the figure: a cluster, and what it trains."""

    nodes: int
    bandwidth: str | None  # of each link, each way; None: as fast as the machine copies
    compute: str = "real"
    model: str = "transformer-9.5M"
    parameters: int | None = None


@dataclass(frozen=True)
class TimingStudy:
    """A longer sleep stands for a larger batch: the message stays the same."""

    clusters: tuple[Cluster, ...] = (
        Cluster(4, "100Mbit", "sleep:300", parameters=1_000_000),
        Cluster(4, "1Gbit", "sleep:300", parameters=10_000_000),
        Cluster(4, None),
        Cluster(8, "100Mbit", "sleep:300", parameters=1_000_000),
    )
    only: tuple[str, ...] = USUAL  # contenders; none are all
    rounds: int = 3
    iterations: int = 4
    loopback: bool = False
    seed: int = 0
    timeout_seconds: float = 3600.0  # of a cluster

    @property
    def names(self) -> tuple[str, ...]:
        """The contenders that can be had here."""
        return tuple(name for name in self.only if name in available())


def recipe(
    nodes: int | None = None, seed: int = 0, quick: bool = False, loopback: bool = False
) -> TimingStudy:
    """Return the study's values; on `loopback` no link is limited, and equal clusters are one."""
    if nodes is not None and nodes < 2:
        raise ValueError(f"runtime needs 2 nodes or more, got {nodes}")
    clusters = TimingStudy.clusters
    if quick:
        small: dict[str, Any] = {"compute": "sleep:60", "parameters": 500_000}
        clusters = (Cluster(4, "100Mbit", **small), Cluster(4, "1Gbit", **small))
    changes: dict[str, Any] = {} if nodes is None else {"nodes": nodes}
    if loopback:
        changes["bandwidth"] = None
    clusters = tuple(dict.fromkeys(Cluster(**asdict(cluster) | changes) for cluster in clusters))
    if quick:
        return TimingStudy(clusters, FEW, rounds=2, iterations=4, loopback=loopback, seed=seed)
    return TimingStudy(clusters, loopback=loopback, seed=seed)


def run(setting: TimingStudy, tick: Tick = silent) -> list[Record]:
    """Return a record per cluster, round and contender."""
    records: list[Record] = []
    benchmarks = [
        Benchmark(
            model=cluster.model,
            parameters=cluster.parameters,
            compute=cluster.compute,
            rounds=setting.rounds,
            iterations=setting.iterations,
            only=setting.names,
            seed=setting.seed,
        )
        for cluster in setting.clusters
    ]
    total = setting.rounds * len(benchmarks)
    for number, (cluster, benchmark) in enumerate(zip(setting.clusters, benchmarks, strict=True)):
        network = "loopback" if setting.loopback else cluster.bandwidth or "no limit"
        about = asdict(cluster) | {"parameters": benchmark.size}
        about |= {"network": network, "cluster": number}

        def on_round(done: int, at: int = number, title: str = title_of(about)) -> None:
            tick(at * setting.rounds + done, total, title)

        on_round(0)
        found = measure(
            benchmark,
            cluster.nodes,
            cluster.bandwidth,
            setting.loopback,
            setting.timeout_seconds,
            on_round,
        )
        records += [{**about, **record} for record in found]
    return records


def table(records: Sequence[Record]) -> list[Record]:
    return [
        {key: mine[0][key] for key in ("nodes", "network", "parameters", "compute")} | row
        for mine in by_cluster(records)
        for row in summary(mine)
    ]


def notes(setting: TimingStudy, records: Sequence[Record]) -> list[str]:
    where = (
        "processes on the machine's loopback, where every byte copied takes time from compute"
        if setting.loopback
        else "processes in network namespaces on one bridge, each link limited in both directions"
    )
    found = [
        f"Median over {setting.iterations} iterations of the mean over "
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
    if not has_decent_dp():
        found.append("decent-dp is not installed and left out.")
    return found


def figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Draw the paper's Figure 6: a panel per cluster, a bar per contender, darkest what is
    exposed."""
    clusters = [(mine[0], summary(mine)) for mine in by_cluster(records)]
    longest = max(len(rows) for _, rows in clusters)
    height = 0.9 + -(-len(clusters) // 2) * (1.2 + 0.23 * longest)
    figure, axes = plot_style.axes(len(clusters), (11.6, height))
    for ax, (about, rows) in zip(axes, clusters, strict=True):
        names, start = [row["contender"] for row in rows], [0.0] * len(rows)
        for part, strength in _PARTS.items():
            widths = [row[f"{part}_ms"] for row in rows]
            shades = [_tint(name, strength) for name in names]
            ax.barh(names, widths, left=start, color=shades, height=0.75)
            start = [a + b for a, b in zip(start, widths, strict=True)]
        for place, row in enumerate(rows):
            text = "" if row["contender"] == LOCAL else f" {row['speed_up']:.2f}×"
            ax.text(start[place], place, text, va="center", fontsize=7)
        ax.tick_params(axis="y", labelsize=7)
        ax.grid(visible=False, axis="y")
        ax.set(xlabel="ms per iteration; speed-up over DDP", xlim=(0, 1.16 * max(start)))
        ax.set_title(title_of(about), fontsize=9)
        ax.invert_yaxis()
    words = {"compute": "compute", "update": "update", "exposed": "exposed communication"}
    handles = [Patch(color=_tint("", _PARTS[p]), label=words[p]) for p in words]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    return {"runtime": figure}


def _tint(contender: str, strength: float) -> tuple[float, float, float]:
    """Return its color mixed with white, so that the grid does not shine through."""
    methods = [method for start, method in _METHOD_OF.items() if contender.startswith(start)]
    color = plot_style.color(methods[0]) if methods else plot_style.GREY
    red, green, blue = (1 - strength * (1 - value) for value in to_rgb(color))
    return red, green, blue


def by_cluster(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each cluster in which anything was timed."""
    timed = dict.fromkeys(r["cluster"] for r in records if "left_out" not in r)
    return [[r for r in records if r["cluster"] == k] for k in timed]


def title_of(about: Record) -> str:
    return (
        f"{about['nodes']} nodes, {about['network']}, {about['parameters'] / 1e6:.3g}M parameters, "
        f"{about['compute']}"
    )


_SUMMARY = "iteration time on emulated networks, against DDP in the same run (Figure 6)"
STUDY = Study("runtime", _SUMMARY, recipe, run, table, notes, figures)

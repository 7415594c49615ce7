"""`decentlam predict`: what an iteration will take on a cluster that you do not have yet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decentlam.lab.names import ALL_REDUCES, MODELS, OVERLAPS
from decentlam.lab.terminal import console, one_of, print_json, print_table

if TYPE_CHECKING:  # what takes seconds to import is imported where it is used
    from matplotlib.figure import Figure

    from decentlam.analysis.cost import Calibration
    from decentlam.lab.predictions import Record

_PAPER_COMPUTE_MS = (25.0, 50.0, 100.0, 200.0, 400.0, 800.0)


def predict(
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}, or any of torchvision's.")
    ] = "resnet50",
    nodes: Annotated[int, typer.Option("-n", "--nodes", help="Number of nodes.")] = 8,
    bandwidth: Annotated[
        str, typer.Option(help="Of each node, both ways: 100Mbit, 25Gbit/s, bits per second.")
    ] = "25Gbit",
    compute_ms: Annotated[
        float | None,
        typer.Option(help="Forward and backward of a step on one node. Measure it: run one alone."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples per step, of all nodes: adds samples per second.")
    ] = None,
    latency_us: Annotated[float, typer.Option(help="One way, in microseconds.")] = 50.0,
    overlap: Annotated[
        str,
        typer.Option(
            help=f"Messages hide behind: {', '.join(OVERLAPS)}.", callback=one_of(OVERLAPS)
        ),
    ] = "backward",
    forward_fraction: Annotated[float, typer.Option(help="Forward's share of compute.")] = 1 / 3,
    bucket_mb: Annotated[
        float, typer.Option(help="Size of a bucket, MiB; 0: as the optimizer's. All-reduce: DDP's.")
    ] = 0.0,
    processes_per_node: Annotated[
        int, typer.Option(help="GPUs of a node, which share its link.")
    ] = 1,
    all_reduce: Annotated[
        str,
        typer.Option(
            help=f"How: {', '.join(ALL_REDUCES)} (log2 n rounds).", callback=one_of(ALL_REDUCES)
        ),
    ] = "ring",
    straggler_ms: Annotated[float, typer.Option(help="How late nodes are.")] = 0.0,
    stragglers: Annotated[
        str, typer.Option(help="one: a random node per step; exponential: all, at random.")
    ] = "one",
    momentum: Annotated[float, typer.Option(help="For growth.")] = 0.9,
    image: Annotated[int, typer.Option(help="Height and width of images.")] = 224,
    classes: Annotated[int, typer.Option(help="Number of classes.")] = 1000,
    parameters: Annotated[
        int | None, typer.Option(help="Of a model of your own, instead of --model.")
    ] = None,
    bytes_each: Annotated[int, typer.Option(help="Bytes of a parameter.")] = 4,
    calibration: Annotated[
        Path | None, typer.Option(help="Constants, or measurements to fit them to (JSON).")
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="The conditions of the paper's Figure 6 instead.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time over 4 to 4096 nodes to this PNG or SVG.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document and nothing else.")
    ] = False,
) -> None:
    """Predict the time of an iteration for every method and topology, and how it grows with n."""
    from decentlam.analysis.cost import Compute, Delays, Job, Link
    from decentlam.lab import predictions
    from decentlam.lab.bandwidth import parse_bandwidth
    from decentlam.lab.study import save

    constants, notes = _calibration(calibration)
    if paper:
        return _paper(compute_ms, latency_us, constants, notes, as_json)
    if compute_ms is None:
        raise ValueError(
            "how long does a step compute? Pass --compute-ms: time forward and backward of one "
            "node alone; it depends on model, batch and GPU, and a guess would decide the result"
        )
    if nodes < 2:
        raise ValueError(f"--nodes must be 2 or more, got {nodes}: one node sends nothing")
    if batch is not None and batch < 1:
        raise ValueError(f"--batch must be 1 or more, got {batch}")
    count = predictions.parameters_of(model, image, classes) if parameters is None else parameters
    job = Job(
        count * bytes_each,
        int(bucket_mb * 2**20),
        processes_per_node=processes_per_node,
        all_reduce=all_reduce,
    )
    link = Link(latency_us / 1e6, parse_bandwidth(bandwidth) / 8)
    delays = Delays(straggler_ms / 1e3, stragglers)
    compute = Compute.split(compute_ms / 1e3, forward_fraction, delays=delays)
    rows = predictions.table(nodes, link, compute, job, overlap, constants, momentum)
    if batch is not None:
        rows = [row | {"samples_per_second": 1e3 * batch / row["iteration_ms"]} for row in rows]
    curves = None
    if plot is not None:
        curves = predictions.over_nodes(link, compute, job, overlap, constants)
        save(figure(curves, f"{model if parameters is None else count}, {bandwidth}"), plot)
    if as_json:
        return print_json(
            {"model_bytes": job.model_bytes, "rows": rows, "curves": curves, "notes": notes}
        )
    shown, kinds = predictions.grouped(rows)
    print_table(shown)
    console().print("\n" + "\n".join(f"{kind}: {names}" for kind, names in kinds.items()))
    console().print(
        f"{count:,} parameters, {job.model_bytes / 1e6:.4g} MB; {nodes} nodes at {bandwidth}, "
        f"{latency_us:g} us; messages hide behind {overlap} (AWC's behind the whole next step). "
        "Times in ms, late: what stragglers cost; speed up over the all-reduce; MB sent per node; "
        f"gap: spectral. unstable: would diverge on these weights with momentum {momentum:g}; "
        "DecentLaM then runs its steady form by itself."
    )
    console().print("\n".join(["", *notes]))
    if plot is not None:
        console().print(f"\nWrote {plot}")


def figure(records: Sequence[Record], title: str) -> Figure:
    """Time per iteration over the number of nodes, a curve per topology."""
    from decentlam.lab import style
    from decentlam.lab.predictions import EVERYONE, HALVING, SIZES

    looks = {
        EVERYONE: ("#000000", "-"),
        HALVING: (style.GREY, (0, (3, 2))),
        "ring": ("#CC6677", "-"),
        "mesh": ("#999933", "-"),
        "symmetric-exponential": ("#44AA99", "-"),
        "one-peer-symmetric-exponential": ("#332288", "-"),
        "bipartite-random-match": ("#AA4499", (0, (3, 2))),
    }
    drawn, (ax,) = style.axes(1, (7.2, 4.6))
    for name, (color, dash) in looks.items():
        curve = [r for r in records if r["topology"] == name]
        label = f"{'PmSGD' if name in (EVERYONE, HALVING) else 'DecentLaM'}, {name}"
        times = [1e3 * r["seconds"] for r in curve]
        ax.plot([r["nodes"] for r in curve], times, color=color, linestyle=dash, label=label)
    ax.set_xscale("log", base=2)
    style.plain_ticks(ax, SIZES)
    ax.set(xlabel="nodes", ylabel="ms per iteration, predicted", title=title)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend(fontsize=9, frameon=False)
    return drawn


def _calibration(path: Path | None) -> tuple[Calibration, list[str]]:
    from decentlam.analysis.cost import Calibration
    from decentlam.lab.calibration import fit, held_out, load_calibration, load_measurements

    if path is None:
        return Calibration(), ["Not calibrated: nominal bandwidth, no copies, no overhead."]
    try:
        return load_calibration(path), [f"Calibrated by {path}."]
    except ValueError:
        measured = load_measurements(path)
    errors = [abs(error.relative) for error in held_out(measured)]
    worst = f"off by {sum(errors) / len(errors):.0%} on average, {max(errors):.0%} at most"
    return fit(measured), [f"Fitted to {path}; each left out in turn, the model is {worst}."]


def _paper(
    compute_ms: float | None,
    latency_us: float,
    constants: Calibration,
    notes: list[str],
    as_json: bool,
) -> None:
    from decentlam.lab import predictions

    times = _PAPER_COMPUTE_MS if compute_ms is None else (compute_ms,)
    rows: list[dict[str, Any]] = predictions.paper(times, latency_us / 1e6, constants)
    notes = [
        "Stated in the paper: 8 servers of 8 V100, 10 and 25 Gbit/s TCP, ResNet-50, PmSGD by DDP, "
        "both hidden behind backward, DecentLaM 1.2 to 1.9 times faster.",
        "Assumed: the compute time, which the paper does not state (its figure has several "
        f"batches); {latency_us:g} us of latency; a ring all-reduce of 64 GPUs; "
        "DDP's buckets; averaging inside a server costs nothing.",
        "By bytes, one peer (random match) can win up to 1.97, latency aside. Two peers "
        "(ring, symmetric exponential with 8 nodes) send as much as the all-reduce and can win by "
        "latency only, so that the paper's upper end needs one peer, or a slower all-reduce.",
        *notes,
    ]
    if as_json:
        return print_json({"rows": rows, "notes": notes})
    print_table(rows)
    console().print("\n" + "\n".join(notes))

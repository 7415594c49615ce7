"""`decentlam predict`: what a step will take on a cluster that you do not have yet."""

from __future__ import annotations

from typing import Annotated

import typer

from decentlam.lab.names import MODELS
from decentlam.lab.terminal import Json, Nodes, print_json, print_table

_NOTE = (
    "What bytes, latency and overlap allow; processors do not count. Measured steps are off by 3 "
    "to 17 % in the median, nearly always longer, and by up to 39 % where cores are busy."
)


def predict(
    model: Annotated[
        str, typer.Option(help=f"{', '.join(MODELS)}, or any of torchvision's.")
    ] = "resnet50",
    parameters: Annotated[
        int | None, typer.Option(help="Of a model of your own, instead of --model.")
    ] = None,
    nodes: Nodes = 8,
    bandwidth: Annotated[
        str, typer.Option(help="Of each node, both ways: 100Mbit, 25Gbit/s, bits per second.")
    ] = "25Gbit",
    latency_us: Annotated[float, typer.Option(help="One way, in microseconds.")] = 50.0,
    compute_ms: Annotated[
        float | None,
        typer.Option(help="Forward, backward and update on one node. Measure it: run one alone."),
    ] = None,
    overlap: Annotated[
        str, typer.Option(help="What messages hide behind: none, backward.")
    ] = "backward",
    as_json: Json = False,
) -> None:
    """Predict the time of a step with DDP, DecentLaM and AWC-DmSGD on your network."""
    from decentlam.lab.network.bandwidth import parse_bandwidth
    from decentlam.lab.network.prediction import parameters_of, table

    if compute_ms is None:
        raise ValueError(
            "how long does a step compute? Pass --compute-ms: time forward and backward of one "
            "node alone; it depends on model, batch and GPU, and a guess would decide the result"
        )
    count = parameters_of(model) if parameters is None else parameters
    rate = parse_bandwidth(bandwidth)
    rows = table(nodes, count, rate, compute_ms / 1e3, latency_us / 1e6, overlap)
    if as_json:
        return print_json({"model_bytes": 4 * count, "rows": rows, "note": _NOTE})
    print_table(rows)
    typer.echo(
        f"\n{count:,} parameters, {4e-6 * count:.4g} MB; {nodes} nodes at {bandwidth}, "
        f"{latency_us:g} us. wire: the link is busy; exposed: what nothing hides; speed up over "
        f"DDP.\n{_NOTE}"
    )

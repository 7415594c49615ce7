"""What the cost model says, as records: every method on every topology, over n, as in the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from decentlam import ALGORITHMS, TOPOLOGIES
from decentlam.algorithms import Reach, make, reaches
from decentlam.analysis.cost import Calibration, Compute, Iteration, Job, Link, predict
from decentlam.analysis.cost.model import busiest
from decentlam.analysis.stability import growth_rate
from decentlam.lab.models import MODELS
from decentlam.topology import Topology, complete, ring

Record = dict[str, Any]

SENSIBLE = (
    "ring",
    "mesh",
    "symmetric-exponential",
    "one-peer-symmetric-exponential",
    "bipartite-random-match",
    "hypercube",
    "one-peer-hypercube",
    "base-2",
)
EVERYONE = "all-reduce"  # stands for a topology where the method averages over all nodes
HALVING = "all-reduce, log2 n rounds"
SIZES = tuple(2**k for k in range(2, 13))
_ORACLE_UP_TO = 128  # nodes; growth and rho of more take minutes

# The paper, section 7: "8 nodes (i.e. 8 x 8 = 64 GPUs)", "25 Gbps TCP", 10 Gbps in Figure 6,
# ResNet-50 "(~25.5M parameters)", "1.2 ~ 1.9 x speed-up compared to PmSGD", which is DDP.
PAPER_NODES, PAPER_GPUS, PAPER_BYTES = 8, 8, 25_557_032 * 4
PAPER_BANDWIDTHS = (10e9, 25e9)
PAPER_TOPOLOGIES = ("ring", "symmetric-exponential", "bipartite-random-match")


def parameters_of(model: str, image: int, classes: int) -> int:
    """Parameters of a model of the lab or of torchvision, counted without allocating them."""
    with torch.device("meta"):
        if model in MODELS:
            built = MODELS[model]((3, image, image), classes)
        else:
            from torchvision.models import get_model, list_models

            if model not in list_models():
                raise ValueError(
                    f"unknown model {model!r}; choose from {', '.join(MODELS)}, or any name of "
                    "torchvision.models.list_models(), or pass --parameters"
                )
            built = get_model(model, weights=None)
    return sum(p.numel() for p in built.parameters())


def table(
    nodes: int,
    link: Link,
    compute: Compute,
    job: Job,
    overlap: str,
    calibration: Calibration,
    momentum: float = 0.9,
    methods: Sequence[str] = tuple(ALGORITHMS),
) -> list[Record]:
    """One record per method and topology that fits; DDP's all-reduce first, the rest by time."""

    everyone = ("pmsgd", complete(nodes), link, compute, job.as_ddp())
    reference = predict(*everyone, _as_ddp(overlap), calibration)
    rows = [_record("pmsgd", EVERYONE, reference, reference, None, momentum)]
    for name in SENSIBLE:
        try:
            network = TOPOLOGIES[name](nodes)
        except ValueError:  # n does not fit
            continue
        for method in methods:
            algorithm = make(method, momentum)
            if method.startswith("pmsgd") or (algorithm.needs_symmetric and not network.symmetric):
                continue
            found = predict(algorithm, network, link, compute, job, overlap, calibration)
            rows.append(_record(method, name, found, reference, network, momentum))
    return [rows[0], *sorted(rows[1:], key=lambda row: row["iteration_ms"])]


def _as_ddp(overlap: str) -> str:
    """DDP hides its all-reduce behind backward, never behind the next forward."""
    return "none" if overlap == "none" else "backward"


def _record(
    method: str,
    name: str,
    cost: Iteration,
    reference: Iteration,
    network: Topology | None,
    momentum: float,
) -> Record:
    asked = network is not None and network.num_nodes <= _ORACLE_UP_TO
    growth = _growth(method, network, momentum) if network and asked else None
    return {
        "method": method,
        "topology": name,
        "iteration_ms": 1e3 * cost.seconds,
        "compute_ms": 1e3 * cost.compute,
        "exposed_ms": 1e3 * cost.exposed,
        "update_ms": 1e3 * cost.update,
        "straggler_ms": 1e3 * cost.straggler,
        "speed_up": reference.seconds / cost.seconds,
        "sent_MB": cost.bytes_sent / 1e6,
        "peers": busiest(network, 0) if network else None,
        "spectral_gap": network.spectral_gap if network and asked else None,
        "growth": growth,
        "stable": None if growth is None else growth < 1 + 1e-9,
    }


def _growth(method: str, network: Topology, momentum: float) -> float:
    return growth_rate(make(method, momentum), network, batch_steps=20).value


def grouped(rows: Sequence[Record]) -> tuple[list[Record], dict[str, str]]:
    """A row per topology and kind of method, as methods that send the same cost the same.

    Also what the kinds stand for: {"one message": "dsgd, dmsgd, ..."}.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    kinds: dict[str, list[str]] = {}
    for row in rows:
        kind = _kind(row["method"])
        kinds.setdefault(kind, [])
        kinds[kind] += [] if row["method"] in kinds[kind] else [row["method"]]
        groups.setdefault((kind, row["topology"]), []).append(row)
    shown = []
    for (kind, topology), same in groups.items():
        first = same[0]
        unstable = ", ".join(row["method"] for row in same if row["stable"] is False)
        line = {"methods": kind, "topology": topology, "ms": first["iteration_ms"]}
        line |= {part: first[f"{part}_ms"] for part in ("compute", "exposed", "update")}
        line |= {"late": first["straggler_ms"], "speed_up": first["speed_up"]}
        line |= {"MB": first["sent_MB"], "gap": first["spectral_gap"]}
        if "samples_per_second" in first:
            line["per_second"] = first["samples_per_second"]
        asked = all(row["stable"] is not None for row in same)
        shown.append(line | {"unstable": unstable or ("none" if asked else None)})
    return shown, {kind: ", ".join(names) for kind, names in kinds.items() if len(names) > 1}


def _kind(method: str) -> str:
    algorithm = make(method)
    if reaches(algorithm) != {Reach.NEIGHBORS} or not algorithm.needs_gradient:
        return method
    return "one message" if algorithm.payloads(0) == 1 else "two messages"


def over_nodes(
    link: Link, compute: Compute, job: Job, overlap: str, calibration: Calibration
) -> list[Record]:
    """Seconds per iteration of DecentLaM and of an all-reduce, with 4 to 4096 nodes."""
    records = []
    ddp = _as_ddp(overlap)
    everyone = {EVERYONE: job.as_ddp(), HALVING: replace(job.as_ddp(), all_reduce="halving")}
    for n in SIZES:
        for name, how in everyone.items():
            cost = predict("pmsgd", ring(n), link, compute, how, ddp, calibration)
            records.append({"nodes": n, "topology": name, "seconds": cost.seconds})
        for name in SENSIBLE[:5]:
            network = TOPOLOGIES[name](n)
            cost = predict("decentlam", network, link, compute, job, overlap, calibration)
            records.append({"nodes": n, "topology": name, "seconds": cost.seconds})
    return records


def paper(
    compute_ms: Sequence[float], latency_seconds: float, calibration: Calibration
) -> list[Record]:
    """Speed-ups over PmSGD under the conditions of the paper's Figure 6, by compute time."""
    job = Job(PAPER_BYTES, processes_per_node=PAPER_GPUS).as_ddp()  # "we follow DDP's design"
    records = []
    for bandwidth in PAPER_BANDWIDTHS:
        link = Link(latency_seconds, bandwidth / 8)
        for milliseconds in compute_ms:
            compute = Compute.split(milliseconds / 1e3)
            args = (link, compute, job, "backward", calibration)
            reference = predict("pmsgd", complete(PAPER_NODES), *args).seconds
            row: Record = {
                "bandwidth_gbit": bandwidth / 1e9,
                "compute_ms": milliseconds,
                "pmsgd_ms": 1e3 * reference,
            }
            for name in PAPER_TOPOLOGIES:
                ours = predict("decentlam", TOPOLOGIES[name](PAPER_NODES), *args).seconds
                row[name] = reference / ours
            records.append(row | {"paper": "1.2 to 1.9"})
    return records

"""Iteration times of DDP, decent-dp and ours on hosts with limited links, interleaved in one run.

    python benchmarks/network.py --bandwidth 1Gbit                       # n = 4, real compute
    python benchmarks/network.py --parameters 10e6 --compute sleep:300 --bandwidth 1Gbit
    python benchmarks/network.py --iterations 16 --bandwidth 100Mbit     # rounds of LocalSteps
    python benchmarks/network.py --nodes 8 --straggler 50 --only "DecentLaM one-peer, overlap"
    python benchmarks/network.py --loopback                              # without root

Every node is a process in a network namespace of its own, which needs Linux and root. Printed is
the time relative to DDP in the same round: median and, in brackets, lowest and highest round.
Lower is faster. *exposed* is the communication that nothing hides, *MB* what a node sends, *CPU*
the processor time of a step over all nodes; all but the last two in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from decentlam.lab.network.contenders import INNER, available, has_decent_dp
from decentlam.lab.network.models import MODELS
from decentlam.lab.network.results import left_out, limits, machine, summary
from decentlam.lab.network.timing import Benchmark, measure
from decentlam.lab.values import Record


def report(records: list[Record], benchmark: Benchmark, where: str, nodes: int) -> None:
    late = benchmark.straggler_ms
    slow = f", one node {late:g} ms behind" if late else ""
    size = f"{benchmark.size / 1e6:.3g}M parameters"
    print(f"{nodes} nodes, {where}; {size}, compute {benchmark.compute}{slow}; {machine()}")
    print(limits(nodes, benchmark.size))
    if rows := summary(records):
        print(f"Forward and backward alone take {rows[0]['compute_ms']:.0f} ms.\n")
        print_table([cells(row) for row in rows])
    for line in left_out(records):
        print(line)


def print_table(rows: list[dict[str, str]]) -> None:
    widths = {name: max(len(row[name]) for row in [*rows, {name: name}]) for name in rows[0]}
    for row in [dict(zip(widths, widths, strict=True)), *rows]:
        first, *others = (row[name].rjust(width) for name, width in widths.items())
        print(first.strip().ljust(len(first)), *others)


def cells(row: Record) -> dict[str, str]:
    """Return what the table says of a contender, by the heads of its columns."""
    return {
        "contender": row["contender"],
        "ms": f"{row['ms']:.0f}",
        "of DDP": f"{row['of_DDP']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f})",
        "exposed": f"{row['exposed_ms']:.0f}",
        "update": f"{row['update_ms']:.0f}",
        "wait": f"{row['wait_ms']:.0f}",
        "MB": f"{row['MB_sent']:.3g}",
        "CPU ms": f"{row['cpu_ms']:.0f}",
    }


def tell(done: int) -> None:
    print(f"\r\x1b[K{done} rounds", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--nodes", type=int, default=4)
    parser.add_argument("--bandwidth", help="of each link, such as 100Mbit; default: no limit")
    parser.add_argument("--model", default=Benchmark.model, choices=MODELS)
    parser.add_argument("--parameters", type=float, help="of a sleeping model")
    parser.add_argument("--compute", default="real", help="real, or sleep:MILLISECONDS")
    parser.add_argument("--optimizer", default=Benchmark.optimizer, choices=INNER)
    parser.add_argument("--only", nargs="*", default=[], help="contenders; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--straggler", type=float, default=0.0, metavar="MS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loopback", action="store_true", help="no namespaces, no root")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="print the contenders and stop")
    given = parser.parse_args()
    if given.list:
        print("\n".join(available(given.optimizer)))
        return
    if given.loopback and given.bandwidth:
        parser.error("loopback has no bandwidth to set; leave one of the two out")
    if not has_decent_dp():
        print("decent-dp is not installed and left out; `uv pip install decent-dp` adds it")
    try:
        benchmark = Benchmark(
            model=given.model,
            parameters=None if given.parameters is None else int(given.parameters),
            compute=given.compute,
            rounds=given.rounds,
            iterations=given.iterations,
            straggler_ms=given.straggler,
            only=tuple(given.only),
            optimizer=given.optimizer,
            seed=given.seed,
        )
        records = measure(
            benchmark,
            given.nodes,
            given.bandwidth,
            given.loopback,
            given.timeout,
            tell if sys.stderr.isatty() else None,
        )
    except (ValueError, RuntimeError) as error:
        sys.exit(f"network.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    where = "loopback" if given.loopback else f"links of {given.bandwidth or 'any speed'}"
    report(records, benchmark, where, given.nodes)
    if given.json:
        names = ("nodes", "bandwidth", "loopback")
        about = {name: getattr(given, name) for name in names}
        text = {"benchmark": asdict(benchmark), **about, "machine": machine(), "records": records}
        given.json.write_text(json.dumps(text, indent=1))


if __name__ == "__main__":
    main()

"""Iteration times of DDP, decent-dp and ours on hosts with limited links, interleaved in one run.

    python benchmarks/network.py --bandwidth 1Gbit                       # n = 4, real compute
    python benchmarks/network.py --parameters 10e6 --compute sleep:300 --bandwidth 1Gbit
    python benchmarks/network.py --nodes 8 --straggler 50 --only "DecentLaM one-peer, overlap"
    python benchmarks/network.py --loopback                              # without root

Every node is a process in a network namespace of its own, which needs Linux and root. Printed is
the time relative to DDP in the same round: median and, in brackets, lowest and highest round.
Lower is faster. *bound* is the least that its bytes and its overlap allow, *times* how many times
that it takes, *MB* what a node sends, *CPU ms* the processor time of a step over all nodes, *of
bare* its ratio to that of bare buckets with one peer in the same round, if they take part. What
--json writes, benchmarks/calibrate.py fits the cost model to.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from decentlam.lab.emulation.contenders import choose, contenders, have_rivals
from decentlam.lab.emulation.facts import Record
from decentlam.lab.emulation.models import MODELS
from decentlam.lab.emulation.results import left_out, limits, machine, summary
from decentlam.lab.emulation.setting import Setting
from decentlam.lab.emulation.timing import MeasurementError, measure, unheard


def report(records: list[Record], setting: Setting, where: str, nodes: int) -> None:
    slow = f", one node {setting.straggler_ms:g} ms behind" if setting.straggler_ms else ""
    size = f"{setting.size / 1e6:.3g}M parameters"
    print(f"{nodes} nodes, {where}; {size}, compute {setting.compute}{slow}; {machine()}")
    print(limits(nodes, setting.size))
    if rows := summary(records):
        print(f"Forward and backward alone take {rows[0]['compute_ms']:.0f} ms.\n")
        print_table([cells(row) for row in rows])
    for line in left_out(records):
        print(line)


def print_table(rows: list[dict[str, str]]) -> None:
    """Without the columns in which nothing is said."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = [max(len(row[name]) for row in [*rows, {name: name}]) for name in names]
    for row in [dict(zip(names, names, strict=True)), *rows]:
        first, *others = (row[name] for name in names)
        numbers = (text.rjust(width) for text, width in zip(others, widths[1:], strict=True))
        print(first.ljust(widths[0]), *numbers)


def cells(row: Record) -> dict[str, str]:
    """What the table says of a contender, by the heads of its columns."""
    bare = row["cpu_of_bare"]
    return {
        "contender": row["contender"],
        "ms": f"{row['ms']:.0f}",
        "of DDP": f"{row['of_DDP']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f})",
        "bound": f"{row['bound_of_DDP']:.2f}",
        "times": f"{row['of_bound']:.2f}",
        "exposed": f"{row['exposed_ms']:.0f}",
        "update": f"{row['update_ms']:.0f}",
        "wait": f"{row['wait_ms']:.0f}",
        "MB": f"{row['MB_sent']:.3g}",
        "CPU ms": f"{row['cpu_ms']:.0f} ({row['cpu_lowest_ms']:.0f}-{row['cpu_highest_ms']:.0f})",
        "of bare": "" if bare is None else "{:.2f} ({:.2f}-{:.2f})".format(*bare),
    }


def progress(total: int) -> Callable[[Record], None]:
    """A line on stderr that tells what was timed last."""
    done = 0

    def heard(record: Record) -> None:
        nonlocal done
        done += 1
        spent = f"{1e3 * record['seconds']:.0f} ms" if "seconds" in record else "left out"
        line = f"{done} of {total}: {record['contender']}, {spent}" if done < total else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    return heard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--nodes", type=int, default=4)
    parser.add_argument("--bandwidth", help="of each link, such as 100Mbit; default: no limit")
    parser.add_argument(
        "--unsent", type=int, metavar="KIB", help="that a connection takes ahead of the wire"
    )
    parser.add_argument("--model", default=Setting.model, choices=MODELS)
    parser.add_argument("--parameters", type=float, help="of a sleeping model")
    parser.add_argument("--compute", default="real", help="real, or sleep:MILLISECONDS")
    parser.add_argument(
        "--forward-share", type=float, default=Setting.forward_share, help="of a sleep; 1/3"
    )
    parser.add_argument(
        "--buckets", type=int, help="messages per peer of ours, bare buckets and decent-dp"
    )
    parser.add_argument("--only", nargs="*", default=[], help="contenders; default: nearly all")
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
        print("\n".join(contenders(have_rivals())))
        return
    if given.loopback and (given.bandwidth or given.unsent):
        parser.error("loopback has no bandwidth and no connection to set; leave one of the two out")
    unsent = given.unsent and 1024 * given.unsent
    if not have_rivals():
        print("decent-dp is not installed and left out; `uv pip install decent-dp` adds it")
    try:
        setting = Setting(
            model=given.model,
            parameters=None if given.parameters is None else int(given.parameters),
            compute=given.compute,
            forward_share=given.forward_share,
            buckets=given.buckets,
            rounds=given.rounds,
            iterations=given.iterations,
            straggler_ms=given.straggler,
            only=tuple(given.only),
            seed=given.seed,
        )
        total = setting.rounds * len(choose(setting.only))
        heard = progress(total) if sys.stderr.isatty() else unheard
        records = measure(
            setting, given.nodes, given.bandwidth, given.loopback, given.timeout, heard, unsent
        )
    except ValueError as error:
        sys.exit(f"network.py: {error}")
    except MeasurementError as error:
        if not error.records:
            sys.exit(f"network.py: {error}")
        print(f"network.py: stopped early: {error}", file=sys.stderr)
        records = error.records
    except KeyboardInterrupt:
        sys.exit(130)
    where = "loopback" if given.loopback else f"links of {given.bandwidth or 'any speed'}"
    report(records, setting, where, given.nodes)
    if given.json:
        names = ("nodes", "bandwidth", "unsent", "loopback")
        about = {name: getattr(given, name) for name in names}
        text = {"setting": asdict(setting), **about, "machine": machine(), "records": records}
        given.json.write_text(json.dumps(text, indent=1))


if __name__ == "__main__":
    main()

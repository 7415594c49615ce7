"""What all processes tell each other, short or long, arrives as it was said."""

from __future__ import annotations

from typing import Any

import runs
import torch.distributed as dist

from decentlam.exchange.network import connect

# JSON of as many bytes as go along with their length, of one more and one less, and of many more.
LENGTHS = (1013, 1014, 1015, 5000)


def gathered() -> list[list[Any]]:
    rank, network = dist.get_rank(), connect()
    values: list[Any] = [None, True, rank, {"rank": rank}, "ä" * rank]
    values += ["x" * length for length in LENGTHS]
    values += [["y" * 3000] if rank == 1 else "short"]  # one alone has more to say
    return [network.gather(value) for value in values]


def test_everyone_gets_what_everyone_said():
    everyone = runs.run_processes(gathered, 3, ())
    expected: list[Any] = [[None] * 3, [True] * 3, [0, 1, 2], [{"rank": k} for k in range(3)]]
    expected += [["", "ä", "ää"], *([["x" * length] * 3 for length in LENGTHS])]
    expected += [["short", ["y" * 3000], "short"]]
    for found in everyone:
        assert found == expected


def test_a_process_alone_hears_itself():
    assert connect().gather({"a": (1, 2)}) == [{"a": (1, 2)}]

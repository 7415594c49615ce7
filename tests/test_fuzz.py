"""The short form of `make fuzz`."""

from __future__ import annotations

from tests.fuzzing import fuzz


def test_no_input_ends_in_a_traceback() -> None:
    counts, finds = fuzz(105, seed=7)
    assert not finds, finds[0]
    assert all(found["refused"] for found in counts.values()), counts

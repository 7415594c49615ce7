"""Numbers as a reader wants them."""

from __future__ import annotations

from decentlam.lab import formatting


def test_numbers_read_well():
    assert [
        formatting.quantity(v if v is None else (v, None))
        for v in (1234.5, 12.345, 0.0012345, 1.2e-7, 0, None)
    ] == [
        "1,234", "12.3", "0.00123", "1.2e-07", "0", "–",
    ]  # fmt: skip
    assert formatting.quantity((0.04774, 0.00327)) == "0.0477 ± 0.0033"
    assert formatting.percent((0.96739, 0.00541)) == "96.74 ± 0.54"
    assert [formatting.duration(v) for v in (0.0042, 12, 200, 7500)] == [
        "4.20 ms", "12.0 s", "3 min 20 s", "2 h 5 min",
    ]  # fmt: skip

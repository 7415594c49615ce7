"""Bandwidths as people write them."""

from __future__ import annotations

import pytest

from decentlam.lab.network.bandwidth import parse_bandwidth


@pytest.mark.parametrize(
    ("text", "bits"),
    [("100Mbit", 1e8), ("1Gbit", 1e9), ("25Gbit/s", 25e9), ("10Gbps", 1e10), ("1e9", 1e9)],
)
def test_bandwidths(text: str, bits: float):
    assert parse_bandwidth(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "-1Gbit", "0", "25GB", "1.2.3Mbit", "nan", "1e999"])
def test_bad_bandwidths_list_what_is_allowed(text: str):
    with pytest.raises(ValueError, match="such as 100Mbit, 1Gbit, 25Gbit/s"):
        parse_bandwidth(text)

"""Bandwidths as people write them."""

from __future__ import annotations

import pytest

from decentlam.lab.network.bandwidth import bits_per_second, parse_bandwidth


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


def test_a_link_has_a_bandwidth_that_can_be_emulated():
    assert bits_per_second("100Mbit") == bits_per_second("0.1Gbit/s") == bits_per_second(1e8) == 1e8
    for wrong in ("fast", "10", "-1Gbit", "1..2Gbit", "100MB"):
        with pytest.raises(ValueError, match=f"{wrong}.*100Mbit"):
            bits_per_second(wrong)

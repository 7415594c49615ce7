"""Bandwidths as people write them."""

from __future__ import annotations

import pytest

from decentlam.lab.network.bandwidth import parse_bandwidth


def test_bandwidths_are_read_or_refused_with_what_is_allowed():
    written = {"100Mbit": 1e8, "25Gbit/s": 25e9, "10Gbps": 1e10, "1e9": 1e9}
    assert {text: parse_bandwidth(text) for text in written} == written
    for text in ("", "fast", "-1Gbit", "0", "25GB", "1.2.3Mbit", "nan", "1e999"):
        with pytest.raises(ValueError, match="such as 100Mbit, 1Gbit, 25Gbit/s"):
            parse_bandwidth(text)

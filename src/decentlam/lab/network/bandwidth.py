"""Bandwidths as people write them, in bits per second."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BANDWIDTH = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(?:([KMGT]?)(?:bit|bps|b)(?:/s|ps)?)?\s*")


def parse_bandwidth(text: str | float) -> float:
    """Return the bits per second of "100Mbit", "25Gbit/s", "10Gbps", or of a plain number.

    >>> parse_bandwidth("25Gbit/s"), parse_bandwidth("1e9")
    (25000000000.0, 1000000000.0)
    """
    match = _BANDWIDTH.fullmatch(str(text))
    try:
        value = float(match[1]) * _UNITS[match[2] or ""] if match else math.nan
    except ValueError:  # two dots
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"cannot read the bandwidth {text!r}; write a number above 0 and a unit in bits per "
            "second, such as 100Mbit, 1Gbit, 25Gbit/s or 10Gbps (Kbit, Mbit, Gbit, Tbit), or a "
            "plain number of bits per second"
        )
    return value

"""Numbers and words as a reader wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

NOTHING = "–"
Spread = tuple[float, float | None]  # a mean over runs, and the standard deviation between several


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return mean and deviation, or None if a value is missing: that would be another mean."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    mean = sum(known) / len(known)
    squares = sum((value - mean) ** 2 for value in known)
    return mean, math.sqrt(squares / (len(known) - 1)) if len(known) > 1 else None


def percent(value: Spread | None, digits: int = 2) -> str:
    """Return percent without the sign: 84.12 ± 0.31."""
    if value is None:
        return NOTHING
    return " ± ".join(f"{100 * part:.{digits}f}" for part in value if part is not None)


def quantity(value: Spread | None) -> str:
    """Return three significant digits, the deviation to the same decimal: 0.0477 ± 0.0033."""
    if value is None:
        return NOTHING
    mean, deviation = value
    if mean == 0 or not 1e-4 <= abs(mean) < 1e6:
        return f"{mean:.3g}" + (f" ± {deviation:.1g}" if deviation else "")
    digits = max(0, 2 - math.floor(math.log10(abs(mean))))
    return f"{mean:,.{digits}f}" + (f" ± {deviation:,.{digits}f}" if deviation else "")


def value_text(value: Any) -> str:
    """Return a setting's value as text: 1024, 0.05, ring."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(
            " ".join(map(value_text, item)) if isinstance(item, (list, tuple)) else value_text(item)
            for item in value
        )
    return str(value)


def short(value: float) -> float:
    """Return the value to six digits, which is enough for a curve."""
    return float(f"{value:.6g}")


def bytes_of(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a time as text: 4.20 ms, 12.0 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 1:
        return f"{quantity((1000 * seconds, None))} ms"
    if seconds < 60:
        return f"{quantity((seconds, None))} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def listed(words: Sequence[str]) -> str:
    """Return a list as text: a, b and c."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def counted(count: int, thing: str) -> str:
    """Return a count as text: one run, 3 runs."""
    return f"{count if count != 1 else 'one'} {thing if count == 1 else thing + 's'}"

"""Numbers and words as a reader wants them, and HTML that cannot be broken out of."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

NOTHING = "–"


@dataclass(frozen=True)
class Spread:
    """A mean over runs, and the standard deviation between them where there are several."""

    mean: float
    deviation: float | None = None


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return mean and deviation, or None if a value is missing: that would be another mean."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    mean = sum(known) / len(known)
    if len(known) == 1:
        return Spread(mean)
    squares = sum((value - mean) ** 2 for value in known)
    return Spread(mean, math.sqrt(squares / (len(known) - 1)))


def escape(value: Any) -> str:
    return html.escape(str(value), quote=True)


def embedded(value: Any) -> str:
    """Return JSON that may stand in a script element: no character in it can end the element."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def percent(share: float | None, digits: int = 2) -> str:
    return NOTHING if share is None else f"{100 * share:.{digits}f}"


def percent_spread(value: Spread | None, digits: int = 2) -> str:
    """Return percent without the sign: 84.12 ± 0.31."""
    if value is None:
        return NOTHING
    after = "" if value.deviation is None else f" ± {percent(value.deviation, digits)}"
    return percent(value.mean, digits) + after


def quantity(value: float | None) -> str:
    """Return three significant digits: 1,230, 12.3, 0.00123, 1.23e-05."""
    if value is None:
        return NOTHING
    if value == 0 or not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def quantity_spread(value: Spread | None) -> str:
    """Return both to the same decimal, three digits of the mean: 0.0477 ± 0.0033."""
    if value is None:
        return NOTHING
    mean, deviation = value.mean, value.deviation
    if not deviation:
        return quantity(mean)
    if not 1e-4 <= abs(mean) < 1e6:
        return f"{mean:.3g} ± {deviation:.1g}"
    digits = max(0, 2 - math.floor(math.log10(abs(mean))))
    return f"{mean:,.{digits}f} ± {deviation:,.{digits}f}"


def value_text(value: Any) -> str:
    """Return a setting's value as text: 1024, 0.05, ring."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(
            " ".join(value_text(part) for part in item)
            if isinstance(item, (list, tuple))
            else value_text(item)
            for item in value
        )
    return str(value)


def bytes_of(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.3g} {unit}" if unit != "bytes" else f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a time as text: 4.20 ms, 12.0 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 1:
        return f"{quantity(1000 * seconds)} ms"
    if seconds < 60:
        return f"{quantity(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def listed(words: Sequence[str]) -> str:
    """Return a list as text: a, b and c."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def counted(count: int, thing: str, things: str | None = None) -> str:
    """Return a count as text: one run, 3 runs."""
    return f"{count if count != 1 else 'one'} {thing if count == 1 else things or thing + 's'}"

"""Which part of an averaged state travels in a step: a seventeenth of every parameter, in turn."""

from __future__ import annotations

from collections.abc import Sequence

TURNS = 17  # a prime: on weights that repeat, every element meets every phase of the period


def parts(
    spans: Sequence[slice], window: slice, index: int, extents: Sequence[slice] | None = None
) -> list[slice]:
    """Return the elements whose turn comes at step `index`, as slices of `window`.

    `spans` are the places of the parameters in one flat tensor, `window` is a stretch of it. A turn
    is a stretch of each parameter, so it does not matter how parameters are laid out or cut. Where
    a span holds a part of a parameter, `extents` say where all of it would lie.
    """
    turn, found = index % TURNS, []
    for span, whole in zip(spans, extents or spans, strict=True):
        size = whole.stop - whole.start
        start = max(whole.start + turn * size // TURNS, window.start, span.start)
        stop = min(whole.start + (turn + 1) * size // TURNS, window.stop, span.stop)
        if start < stop:
            found.append(slice(start - window.start, stop - window.start))
    return found

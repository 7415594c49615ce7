"""DecentLaM's message and update as compiled loops: one pass over memory each.

Where the package was installed from source beside a C compiler, `hatch_build.py` made a library of
loops.c. Without it, on a GPU, and for every other method, torch's own operations do the same for
more CPU time. Numbers differ by rounding alone.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decentlam.algorithms.base import Algorithm, State, Step
from decentlam.algorithms.decentlam import DecentLaM
from decentlam.algorithms.steady import SteadyDecentLaM

HERE = Path(__file__).parent
SOURCES = ("loops.c", "loops.h")
LIBRARY = "loops.library"
_KINDS = {torch.bfloat16: 1, torch.float16: 2}  # of terms; 0 has the precision of x
_MOST_THREADS = 2  # a loop has one; with more, torch's operations take less time, if not less CPU


class Mix(ctypes.Structure):
    """The terms of a weighted sum."""

    _fields_ = (
        ("count", c_size_t),
        ("terms", POINTER(c_void_p)),
        ("weights", POINTER(c_double)),
        ("kinds", POINTER(c_int)),
    )


class Loops(NamedTuple):
    """Of one precision."""

    message: Any
    update: Any
    steady_update: Any


def load(place: Path = HERE) -> dict[torch.dtype, Loops]:
    """The loops by precision; none where there is no library for this machine, or one that was made
    of other sources, by an older checkout."""
    try:
        library = ctypes.CDLL(str(place / LIBRARY))
        if c_char_p.in_dll(library, "digest").value != digest().encode():
            return {}
    except (OSError, ValueError):
        return {}
    return {dtype: _declared(library, str(dtype)) for dtype in (torch.float32, torch.float64)}


def digest() -> str:
    """Of the sources."""
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in SOURCES)).hexdigest()


def _declared(library: ctypes.CDLL, dtype: str) -> Loops:
    loops = Loops(*(library[f"{name}_{dtype.removeprefix('torch.')}"] for name in Loops._fields))
    place, number, span = c_void_p, c_double, [c_size_t] * 2
    loops.message.argtypes = [*[place] * 4, *span, *[number] * 3]
    loops.update.argtypes = [*[place] * 2, *span, POINTER(Mix), number]
    loops.steady_update.argtypes = [*[place] * 5, *span, POINTER(Mix), *[number] * 7]
    loops.update.restype = loops.steady_update.restype = None
    return loops


_loops = load()


def available() -> bool:
    """Whether there are loops on this machine."""
    return bool(_loops)


def form(
    algorithm: Algorithm,
    message: Tensor,
    x: Tensor,
    gradients: Sequence[Tensor],
    state: State,
    step: Step,
) -> bool | None:
    """Fills the message, (1, size), with weight decay for x; whether all of it is finite. None, and
    nothing is done, where there is no loop for it. The gradients are those of x in order."""
    found = _with_loops(algorithm)
    if found is None or not _fit(x, message, *state.values(), *gradients):
        return None
    assert sum(map(len, gradients)) == len(x) == message.numel()
    loop, v, kept = _loops[x.dtype].message, None, 0.0
    if isinstance(found, SteadyDecentLaM):
        v, kept = state["v"].data_ptr(), found.beta * step.lr_ratio
    out, of_x, finite, start = message.data_ptr(), x.data_ptr(), True, 0
    rates = (step.lr, step.weight_decay, kept)
    for g in gradients:
        finite = bool(loop(out, of_x, g.data_ptr(), v, start, len(g), *rates)) and finite
        start += len(g)
    return finite


def update(
    algorithm: Algorithm,
    terms: Sequence[tuple[float, Tensor]],
    x: Tensor,
    gradients: Sequence[Tensor],
    state: State,
    step: Step,
) -> bool:
    """Mixes the terms, each (1, size), and makes x and state new, with weight decay for x. False,
    and nothing is done, where there is no loop for it."""
    found = _with_loops(algorithm)
    whole = [term for _, term in terms if term.dtype not in _KINDS]
    if found is None or not terms or not _fit(x, *state.values(), *gradients, *whole):
        return False
    if not all(term.is_contiguous() for _, term in terms):
        return False
    assert sum(map(len, gradients)) == len(x)
    if isinstance(found, DecentLaM):
        kept, v = found.beta * step.lr_ratio, state["v"].data_ptr()
        _loops[x.dtype].update(x.data_ptr(), v, 0, len(x), _mix(terms), kept)
        return True
    return _update_steadily(found, _mix(terms), x, gradients, state, step)


def _update_steadily(
    algorithm: SteadyDecentLaM,
    mix: Mix,
    x: Tensor,
    gradients: Sequence[Tensor],
    state: State,
    step: Step,
) -> bool:
    if step.sent is None or not _fit(x, step.sent):
        return False
    c, mu, start = algorithm.at_once, algorithm.filter, 0
    rates = (step.lr, step.weight_decay, algorithm.beta * step.lr_ratio)
    shares = (mu * step.lr_ratio, 1 - mu, c, 1 - c)
    loop, of_x = _loops[x.dtype].steady_update, x.data_ptr()
    of_state = (state["v"].data_ptr(), state["s"].data_ptr(), step.sent.data_ptr())
    for g in gradients:
        loop(of_x, g.data_ptr(), *of_state, start, len(g), mix, *rates, *shares)
        start += len(g)
    return True


def _with_loops(algorithm: Algorithm) -> DecentLaM | SteadyDecentLaM | None:
    """The algorithm itself, if there are loops of its recursion; a subclass may have another."""
    if type(algorithm) is DecentLaM or type(algorithm) is SteadyDecentLaM:
        slow = algorithm.nesterov or not _loops or torch.get_num_threads() > _MOST_THREADS
        return None if slow else algorithm
    return None


def _fit(*tensors: Tensor) -> bool:
    """Whether the loops take these: dense memory of one precision, and as it is read."""
    first = tensors[0].dtype
    return first in _loops and all(
        t.dtype is first and type(t) is Tensor and t.is_cpu and t.is_contiguous() and not t.is_neg()
        for t in tensors
    )


def _mix(terms: Sequence[tuple[float, Tensor]]) -> Mix:
    count = len(terms)
    return Mix(
        count,
        (c_void_p * count)(*(term.data_ptr() for _, term in terms)),
        (c_double * count)(*(weight for weight, _ in terms)),
        (c_int * count)(*(_KINDS.get(term.dtype, 0) for _, term in terms)),
    )

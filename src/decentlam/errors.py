"""Errors of the library that a program may want to tell apart."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NonFiniteError(ValueError):
    """A gradient or a parameter became NaN or infinite; nothing of it reached a neighbor."""


class ExchangeError(RuntimeError):
    """A neighbor did not answer: it died, stopped or took longer than the timeout."""


class RunOverError(ExchangeError):
    """The elastic run that a process wanted to join, or to join again, has ended."""


class MinorityError(ExchangeError):
    """Too few members of an elastic run are left: the others may have gone on without them."""


class LaunchError(RuntimeError):
    """A process of a run died, or could not join the others."""


class StaleMessageError(RuntimeError):
    """Something changed between backward and step() after the messages had left."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what is on disk cannot be read."""


def unknown(kind: str, name: object, names: Iterable[str]) -> str:
    """Return what to say of a name that does not exist: the nearest one, and all there are."""
    there = list(names)
    near = difflib.get_close_matches(str(name), there, 1, cutoff=0.7)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}; {meant}choose from {', '.join(there)}"

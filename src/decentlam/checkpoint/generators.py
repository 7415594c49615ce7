"""Random generators as objects with a state_dict, so that a checkpoint can hold them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class _Generator:
    get: Callable[[], Any]
    set: Callable[[Any], Any]

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set(state["state"])


def stateful(thing: Any) -> Any:
    """Return something with a state_dict for a random generator, and anything else as it is.

    Generators are a torch.Generator, a numpy Generator, the module numpy.random, a random.Random,
    and the module random.
    """
    if isinstance(thing, torch.Generator):
        return _Generator(thing.get_state, thing.set_state)
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return _Generator(lambda: _plain(bits.state), lambda s: setattr(bits, "state", s))
    if thing is np.random:
        return _Generator(lambda: _plain(np.random.get_state(legacy=False)), np.random.set_state)
    if isinstance(thing, random.Random) or thing is random:
        return _Generator(thing.getstate, thing.setstate)
    return thing


def _plain(state: Any) -> Any:
    """Return the same without arrays, which a checkpoint refuses to load."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, np.ndarray) else state

"""Decentralized data-parallel training: each node averages with a few neighbors every step.

A public name is imported when it is first used, so that `import decentlam` takes no time and
`decentlam --help` needs no torch. The names stand here twice: for type checkers and for Python.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

# There is a package of that name, too: bound here, the name is the function for good.
from decentlam.launch import launch as launch

if TYPE_CHECKING:
    from decentlam import algorithms as algorithms
    from decentlam import topology as topology
    from decentlam.algorithms import ALGORITHMS as ALGORITHMS
    from decentlam.analysis.stability import growth as growth
    from decentlam.checkpoint import Resumed as Resumed
    from decentlam.checkpoint import Saving as Saving
    from decentlam.checkpoint import load_checkpoint as load_checkpoint
    from decentlam.checkpoint import save_checkpoint as save_checkpoint
    from decentlam.data import Deal as Deal
    from decentlam.data import ResumableLoader as ResumableLoader
    from decentlam.errors import CheckpointError as CheckpointError
    from decentlam.errors import ExchangeError as ExchangeError
    from decentlam.errors import LaunchError as LaunchError
    from decentlam.errors import NonFiniteError as NonFiniteError
    from decentlam.errors import StaleMessageError as StaleMessageError
    from decentlam.exchange.base import Pending as Pending
    from decentlam.exchange.neighbors import neighbor_exchange as neighbor_exchange
    from decentlam.launch.init import init as init
    from decentlam.launch.init import leave as leave
    from decentlam.local_steps import LocalSteps as LocalSteps
    from decentlam.monitoring import Monitor as Monitor
    from decentlam.monitoring import monitor as monitor
    from decentlam.optim import DSGD as DSGD
    from decentlam.optim import AdamW as AdamW
    from decentlam.optim import AWCDmSGD as AWCDmSGD
    from decentlam.optim import D2DmSGD as D2DmSGD
    from decentlam.optim import DADmSGD as DADmSGD
    from decentlam.optim import DecentLaM as DecentLaM
    from decentlam.optim import DmSGD as DmSGD
    from decentlam.optim import ExactDecentLaM as ExactDecentLaM
    from decentlam.optim import GTDmSGD as GTDmSGD
    from decentlam.optim import PmAdamW as PmAdamW
    from decentlam.optim import PmSGD as PmSGD
    from decentlam.optim import QGDmSGD as QGDmSGD
    from decentlam.optim import SlowMo as SlowMo
    from decentlam.optim import SteadyDecentLaM as SteadyDecentLaM
    from decentlam.optimizer import DecentralizedOptimizer as DecentralizedOptimizer
    from decentlam.simulation.module import SimulatedModule as SimulatedModule
    from decentlam.simulation.simulate import Nodes as Nodes
    from decentlam.simulation.simulate import simulate as simulate
    from decentlam.topology import TOPOLOGIES as TOPOLOGIES
    from decentlam.topology import Topology as Topology

__version__ = "0.1.0"

_NAMES = {
    "algorithms": ("ALGORITHMS",),
    "analysis.stability": ("growth",),
    "checkpoint": ("Resumed", "Saving", "load_checkpoint", "save_checkpoint"),
    "data": ("Deal", "ResumableLoader"),
    "errors": (
        "CheckpointError", "ExchangeError", "LaunchError", "NonFiniteError", "StaleMessageError",
    ),
    "exchange.base": ("Pending",),
    "exchange.neighbors": ("neighbor_exchange",),
    "launch.init": ("init", "leave"),
    "local_steps": ("LocalSteps",),
    "monitoring": ("Monitor", "monitor"),
    "optim": (
        "DSGD", "AWCDmSGD", "AdamW", "D2DmSGD", "DADmSGD", "DecentLaM", "DmSGD", "ExactDecentLaM",
        "GTDmSGD", "PmAdamW", "PmSGD", "QGDmSGD", "SlowMo", "SteadyDecentLaM",
    ),
    "optimizer": ("DecentralizedOptimizer",),
    "simulation.module": ("SimulatedModule",),
    "simulation.simulate": ("Nodes", "simulate"),
    "topology": ("TOPOLOGIES", "Topology"),
}  # fmt: skip
_HOME = {name: f"decentlam.{module}" for module, names in _NAMES.items() for name in names}
__all__ = ["algorithms", "launch", "topology", *_HOME]


if not TYPE_CHECKING:  # with it, type checkers would take any name for a public one

    def __getattr__(name: str) -> Any:
        """A public name, or a part of the library such as `decentlam.topology`."""
        if name in _HOME:
            value = getattr(importlib.import_module(_HOME[name]), name)
        elif (
            not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None
        ):
            value = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

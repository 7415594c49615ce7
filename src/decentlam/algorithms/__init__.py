"""What a node computes: the ten methods of the paper and five of ours, one file each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from decentlam.algorithms.adamw import AdamW as AdamW
from decentlam.algorithms.awc_dmsgd import AWCDmSGD as AWCDmSGD
from decentlam.algorithms.base import Algorithm as Algorithm
from decentlam.algorithms.base import Message as Message
from decentlam.algorithms.base import Reach as Reach
from decentlam.algorithms.base import State as State
from decentlam.algorithms.base import Step as Step
from decentlam.algorithms.base import always_everyone as always_everyone
from decentlam.algorithms.base import check_count as check_count
from decentlam.algorithms.base import check_number as check_number
from decentlam.algorithms.base import check_period as check_period
from decentlam.algorithms.base import lr_ratio as lr_ratio
from decentlam.algorithms.base import most_payloads as most_payloads
from decentlam.algorithms.base import reaches as reaches
from decentlam.algorithms.base import shown as shown
from decentlam.algorithms.d2_dmsgd import D2DmSGD as D2DmSGD
from decentlam.algorithms.da_dmsgd import DADmSGD as DADmSGD
from decentlam.algorithms.decentlam import DecentLaM as DecentLaM
from decentlam.algorithms.dmsgd import DmSGD as DmSGD
from decentlam.algorithms.dsgd import DSGD as DSGD
from decentlam.algorithms.exact import ExactDecentLaM as ExactDecentLaM
from decentlam.algorithms.gt_dmsgd import GTDmSGD as GTDmSGD
from decentlam.algorithms.pmadamw import PmAdamW as PmAdamW
from decentlam.algorithms.pmsgd import PmSGD as PmSGD
from decentlam.algorithms.qg_dmsgd import QGDmSGD as QGDmSGD
from decentlam.algorithms.slowmo import SlowMo as SlowMo
from decentlam.algorithms.steady import SteadyDecentLaM as SteadyDecentLaM
from decentlam.errors import unknown
from decentlam.topology import Topology

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "pmsgd": PmSGD,
    "pmsgd-lars": partial(PmSGD, lars=True),
    "dsgd": DSGD,
    "dmsgd": DmSGD,
    "da-dmsgd": DADmSGD,
    "awc-dmsgd": AWCDmSGD,
    "slowmo": SlowMo,
    "qg-dmsgd": QGDmSGD,
    "d2-dmsgd": D2DmSGD,
    "decentlam": DecentLaM,
    "decentlam-exact": ExactDecentLaM,
    "decentlam-steady": SteadyDecentLaM,
    "gt-dmsgd": GTDmSGD,
    "adamw": AdamW,
    "pmadamw": PmAdamW,
}


def make(algorithm: str | Algorithm, momentum: float | None = None, **hyper: Any) -> Algorithm:
    """The algorithm of that name with these hyper-parameters; DSGD has no momentum to set.

    >>> make("qg-dmsgd", momentum=0.8, mu=0.5)
    QGDmSGD(beta=0.8, nesterov=False, mu=0.5)
    """
    if isinstance(algorithm, Algorithm):
        if hyper or momentum is not None:
            given = ", ".join([*hyper, *(["momentum"] if momentum is not None else [])])
            raise ValueError(
                f"{algorithm!r} has its hyper-parameters already; pass {given} to its constructor"
            )
        return algorithm
    if not isinstance(algorithm, str):
        names = ", ".join(ALGORITHMS)
        given = f"{algorithm!r}: call it" if isinstance(algorithm, type) else repr(algorithm)
        raise TypeError(f"algorithm must be an Algorithm or one of {names}; got {given}")
    if algorithm not in ALGORITHMS:
        raise ValueError(unknown("algorithm", algorithm, sorted(ALGORITHMS)))
    constructor = ALGORITHMS[algorithm]
    kind: Any = getattr(constructor, "func", constructor)
    fields = [f.name for f in dataclasses.fields(kind)]
    allowed = [name for name in fields if name != "beta"]
    for name in hyper:
        if name not in allowed:
            raise ValueError(
                f"{algorithm} has no hyper-parameter {name!r}; it takes "
                f"{', '.join(allowed) or 'none'} besides lr and momentum"
            )
    if momentum is not None and "beta" in fields:
        hyper["beta"] = momentum
    return constructor(**hyper)


def check_compatible(algorithm: Algorithm, topology: Topology) -> None:
    """Refuses weights on which the algorithm's recursion is not sound."""
    if algorithm.needs_symmetric and not topology.symmetric:
        raise ValueError(
            f"{type(algorithm).__name__} needs symmetric weights; {topology!r} is directed. "
            'Try topology="symmetric-exponential" or "one-peer-symmetric-exponential", or DmSGD, '
            "which runs on directed weights."
        )

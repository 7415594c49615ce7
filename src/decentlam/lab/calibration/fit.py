"""The model's constants from measured iterations, and how far it is off on others."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from decentlam.analysis.cost import Calibration
from decentlam.lab.calibration.measurements import Measurement
from decentlam.lab.values import parse_json

_ROUNDS = 60
_STARTS = [np.array(x) for x in ([0, 1.0, 1, 0, 0, 0], [0.1, 1.1, 1.1, 0.1, 0.2, 0.05])]


@dataclass(frozen=True)
class Error:
    """How far the model is off on one contender: (predicted - measured) / measured."""

    measurement: Measurement
    predicted: float

    @property
    def contender(self) -> str:
        return self.measurement.contender

    @property
    def measured(self) -> float:
        return self.measurement.median

    @property
    def relative(self) -> float:
        return (self.predicted - self.measured) / self.measured


def fit(measurements: Iterable[Measurement]) -> Calibration:
    """The calibration with the least squares of relative errors, no constant below zero.

    The model is made of sums and maxima, so that it is linear piece by piece in its constants:
    every round solves the linear problem of the current piece exactly, and goes as far towards
    its solution as that makes things better. Several starts, since pieces can trap.
    """
    given = [m for m in measurements if m.kind != "none"]
    if not given:
        raise ValueError("nothing to fit: no measurement exchanges anything")
    return _calibration(_fitted(given, _STARTS), given)


def check(calibration: Calibration, measurements: Iterable[Measurement]) -> list[Error]:
    """The relative errors on measurements, which had better not be those of the fit."""
    return [Error(m, m.predicted(calibration)) for m in measurements]


def held_out(measurements: Sequence[Measurement]) -> list[Error]:
    """The error on every measurement of a model that was fitted to all the others."""
    given = [m for m in measurements if m.kind != "none"]
    whole = [_fitted(given, _STARTS)]
    errors = []
    for left in given:
        others = [m for m in given if m is not left]
        units = _units(given) / _units(others)
        found = _calibration(_fitted(others, [x * units for x in whole]), others)
        errors += check(found, [left])
    return errors


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    Path(path).write_text(json.dumps(asdict(calibration), indent=2) + "\n", encoding="utf-8")


def load_calibration(path: str | Path) -> Calibration:
    """What `save_calibration` wrote."""
    found = parse_json(Path(path).read_text(encoding="utf-8"))
    names = list(Calibration.__dataclass_fields__)
    if not isinstance(found, dict) or set(found) - set(names):
        raise ValueError(f"{path} is no calibration; it may hold {', '.join(names)}")
    return Calibration(**found)


# Constants travel as vectors in units of about one: of the mean iteration, per wire, byte, round.


def _units(given: Sequence[Measurement]) -> np.ndarray:
    second = statistics.fmean(m.median for m in given)
    byte = second / statistics.fmean(m.model_bytes for m in given)
    return np.array([second / 100, 1.0, 1.0, byte, byte, second])


def _calibration(x: np.ndarray, given: Sequence[Measurement]) -> Calibration:
    return Calibration(*(float(v) for v in x * _units(given)))


def _fitted(given: Sequence[Measurement], starts: Sequence[np.ndarray]) -> np.ndarray:
    x = min((_descend(given, start) for start in starts), key=lambda x: _squares(given, x))
    for i, nominal in enumerate(_STARTS[0]):  # what the measurements do not tell stays nominal
        plain = np.where(np.arange(len(x)) == i, nominal, x)
        if _squares(given, plain) <= _squares(given, x):
            x = plain
    return x


def _residuals(given: Sequence[Measurement], x: np.ndarray) -> np.ndarray:
    calibration = _calibration(x, given)
    return np.array([e.relative for e in check(calibration, given)])


def _squares(given: Sequence[Measurement], x: np.ndarray) -> float:
    return float(np.square(_residuals(given, x)).sum())


def _descend(given: Sequence[Measurement], x: np.ndarray) -> np.ndarray:
    for _ in range(_ROUNDS):
        here = _residuals(given, x)
        width = 1e-6
        steps = [x + width * unit for unit in np.eye(len(x))]
        slopes = np.stack([(_residuals(given, s) - here) / width for s in steps], axis=1)
        target = _non_negative(slopes, slopes @ x - here, x)
        for part in (1.0, 0.5, 0.25, 0.1, 0.01):
            nearer = x + part * (target - x)
            if _squares(given, nearer) < np.square(here).sum() * (1 - 1e-12):
                break
        else:
            return x
        x = nearer
    return x


def _non_negative(slopes: np.ndarray, values: np.ndarray, now: np.ndarray) -> np.ndarray:
    """argmin |slopes x - values| over x >= 0; what no measurement tells stays as it is."""
    told = np.abs(slopes).max(axis=0) > 1e-12
    x = now.copy()
    x[told] = nnls(slopes[:, told], values)[0]
    return x

"""What the paper predicts: the exact limits on quadratics."""

from __future__ import annotations

from decentlam.lab.theory.fixed_point import fixed_point as fixed_point
from decentlam.lab.theory.quadratic import Quadratic as Quadratic

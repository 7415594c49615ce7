"""What the paper predicts: learning rates, bias terms, and the exact limits on quadratics."""

from __future__ import annotations

from decentlam.lab.theory.bias import inconsistency_bias as inconsistency_bias
from decentlam.lab.theory.bias import momentum_power as momentum_power
from decentlam.lab.theory.fixed_point import fixed_point as fixed_point
from decentlam.lab.theory.quadratic import Quadratic as Quadratic
from decentlam.lab.theory.step_size import largest_momentum as largest_momentum
from decentlam.lab.theory.step_size import lr_nonconvex as lr_nonconvex
from decentlam.lab.theory.step_size import lr_strongly_convex as lr_strongly_convex

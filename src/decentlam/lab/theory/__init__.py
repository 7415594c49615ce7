"""What the paper predicts: step sizes, bias terms, and the exact limits on quadratics."""

from __future__ import annotations

from decentlam.lab.theory.bias import StochasticBias as StochasticBias
from decentlam.lab.theory.bias import inconsistency_bias as inconsistency_bias
from decentlam.lab.theory.bias import inconsistency_bound as inconsistency_bound
from decentlam.lab.theory.bias import momentum_power as momentum_power
from decentlam.lab.theory.bias import stochastic_bias as stochastic_bias
from decentlam.lab.theory.fixed_point import fixed_point as fixed_point
from decentlam.lab.theory.fixed_point import leading_bias as leading_bias
from decentlam.lab.theory.quadratic import Quadratic as Quadratic
from decentlam.lab.theory.step_size import Condition as Condition
from decentlam.lab.theory.step_size import StepSize as StepSize
from decentlam.lab.theory.step_size import largest_momentum as largest_momentum
from decentlam.lab.theory.step_size import lr_nonconvex as lr_nonconvex
from decentlam.lab.theory.step_size import lr_strongly_convex as lr_strongly_convex
from decentlam.lab.theory.step_size import step_size_nonconvex as step_size_nonconvex
from decentlam.lab.theory.step_size import (
    step_size_strongly_convex as step_size_strongly_convex,
)

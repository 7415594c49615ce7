"""What must not change while a message is on its way: its gradient, its parameters, the lr.

A message formed from another gradient than the one step() sees would be silently wrong. So changes
are noticed, by the versions that torch counts for each tensor, and refused with the cure. It does
not count writes through `.data`: in the first steps values are compared, too, because a script that
writes so does it from the start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from decentlam.errors import StaleMessageError

Hyper = Mapping[str, float]
_VALUED = 3  # first steps in which values are compared


def hyper_of(group: Mapping[str, Any]) -> dict[str, float]:
    """What a message is made with, besides tensors."""
    names = ("lr", "weight_decay", "momentum", "nesterov")
    return {name: float(group[name]) for name in names if name in group}


class Freshness:
    """Of one bucket, in one step."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._steps = -1  # `reset` begins the first one

    def reset(self) -> None:
        self._steps += 1
        self._gradients: dict[int, tuple[Tensor | None, int, float]] = {}
        self._parameters: tuple[int, float] | None = None
        self._hyper: Hyper | None = None

    # Notes --------------------------------------------------------------------------------------

    def note_gradient(self, i: int) -> bool:
        """Remembers the gradient of parameter i as it is; False if it was noted before."""
        again = i in self._gradients
        self._gradients[i] = self._noted(self._params[i].grad)
        return not again

    def note_gradients(self) -> None:
        self._gradients = {i: self._noted(p.grad) for i, p in enumerate(self._params)}

    def note_parameters(self) -> None:
        self._parameters = self._parameter_versions()

    def forget_parameters(self) -> None:
        """They may change again: no message is made of them."""
        self._parameters = None

    def note_hyper(self, hyper: Hyper) -> None:
        self._hyper = hyper

    # Looks --------------------------------------------------------------------------------------

    def gradients_changed(self) -> bool:
        """Whether a noted gradient was replaced or written to."""
        return any(
            self._params[i].grad is not noted[0] or self._noted(noted[0])[1:] != noted[1:]
            for i, noted in self._gradients.items()
        )

    def parameters_changed(self) -> bool:
        return self._parameters is not None and self._parameters != self._parameter_versions()

    def check_parameters(self) -> None:
        if self.parameters_changed():
            raise StaleMessageError(
                "a parameter changed while its message was on the way (by load_state_dict or an "
                "assignment between backward and step(), or with AWC-DmSGD after step()). Change "
                "parameters between step() and backward, and with AWC-DmSGD use overlap='none'."
            )

    def check_hyper(self, hyper: Hyper) -> None:
        if self._hyper != hyper:
            raise StaleMessageError(
                "lr, momentum or weight decay changed between backward and step(): the message "
                f"left with {self._hyper}, the group now has {hyper}. Change them after step(), as "
                "schedulers do, or use overlap='none'."
            )

    def check_gradients(self) -> None:
        if self.gradients_changed():
            raise StaleMessageError(
                "a gradient changed between backward and step(), but its message had left "
                "already. To clip, use max_grad_norm=... with overlap='none'; for any other change "
                "use overlap='none'."
            )

    def check_values_used(self) -> None:
        """The gradients that an update reads after step() may be dropped, but not written to."""
        noted = self._gradients.values()
        if any(grad is not None and grad._version != version for grad, version, _ in noted):
            raise StaleMessageError(
                "a gradient was changed after step(), while its update waited for messages "
                "(overlap='forward'). Use zero_grad() of the optimizer, or overlap='backward'."
            )

    def _parameter_versions(self) -> tuple[int, float]:
        return sum(p._version for p in self._params), sum(map(self._value, self._params))

    def _noted(self, grad: Tensor | None) -> tuple[Tensor | None, int, float]:
        return (None, -1, 0.0) if grad is None else (grad, grad._version, self._value(grad))

    def _value(self, tensor: Tensor) -> float:
        """What tells a tensor from what it was; 0 later, on a GPU, and if it is not finite."""
        if self._steps >= _VALUED or tensor.device.type != "cpu" or tensor.is_sparse:
            return 0.0
        total = tensor.detach().sum().item()
        return total if math.isfinite(total) else 0.0

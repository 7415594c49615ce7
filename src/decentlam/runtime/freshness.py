"""What must not change while a message is on its way: its gradient, its parameters, the lr.

A message formed from another gradient than the one step() sees would be silently wrong, so every
change is noticed, by the versions that torch counts for each tensor, and refused with the cure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from decentlam.errors import StaleMessageError

Hyper = Mapping[str, float]


def hyper_of(group: Mapping[str, Any]) -> dict[str, float]:
    """What a message is made with, besides tensors."""
    names = ("lr", "weight_decay", "momentum", "nesterov")
    return {name: float(group[name]) for name in names if name in group}


class Freshness:
    """Of one bucket, in one step."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self.reset()

    def reset(self) -> None:
        self._gradients: dict[int, tuple[Tensor | None, int]] = {}
        self._parameters: int | None = None
        self._hyper: Hyper | None = None

    # Notes --------------------------------------------------------------------------------------

    def note_gradient(self, i: int) -> bool:
        """Remembers the gradient of parameter i as it is; False if it was noted before."""
        again = i in self._gradients
        self._gradients[i] = _version(self._params[i].grad)
        return not again

    def note_gradients(self) -> None:
        self._gradients = {i: _version(p.grad) for i, p in enumerate(self._params)}

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
        for i, (noted, version) in self._gradients.items():
            grad = self._params[i].grad
            if grad is not noted or (grad is not None and grad._version != version):
                return True
        return False

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
        if any(grad is not None and grad._version != version for grad, version in noted):
            raise StaleMessageError(
                "a gradient was changed after step(), while its update waited for messages "
                "(overlap='forward'). Use zero_grad() of the optimizer, or overlap='backward'."
            )

    def _parameter_versions(self) -> int:
        return sum(p._version for p in self._params)  # ours are writes to the bucket, not to p


def _version(grad: Tensor | None) -> tuple[Tensor | None, int]:
    return grad, -1 if grad is None else grad._version

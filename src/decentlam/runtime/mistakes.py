"""Two mistakes that would pass unnoticed: DDP around the model, and equal data on all nodes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger(__name__)

_LOOKED_AT = 2  # first steps that tell
_TRIED = 10  # first steps, whether they tell or not: every look waits for a GPU


class WrapperCheck:
    """Looks at the modules that run before the first step: DDP may not be among them."""

    def __init__(self) -> None:
        self._hook: Any = None
        self._found: list[bool] = []

    def watch(self, params: Iterable[Tensor]) -> None:
        ours, found = {id(p) for p in params}, self._found

        def look(module: nn.Module, args: Any) -> None:
            inner = getattr(module, "_orig_mod", module)  # of a compiled module
            if isinstance(inner, DistributedDataParallel) and not found:
                found.extend([True for p in inner.parameters() if id(p) in ours][:1])

        self._hook = nn.modules.module.register_module_forward_pre_hook(look)
        weakref.finalize(self, self._hook.remove)

    def check(self) -> None:
        """Refuses DDP; called in every step, of which the first one ends the watch."""
        if self._hook is None:
            return
        self.stop()
        if self._found == [True]:
            raise RuntimeError(
                "the model is wrapped in DistributedDataParallel, which averages the gradients of "
                "all processes before this optimizer sees them: the nodes never differ, and both "
                "kinds of communication are paid for. Train the model without the wrapper: "
                "remove DistributedDataParallel(model); with Accelerate do not pass the model to "
                "prepare(); with Ray call prepare_model(model, parallel_strategy=None). For "
                "Lightning and Hugging Face, decentlam.integrations has a strategy and a Trainer "
                "that do not wrap."
            )

    def stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class EqualMessages:
    """Says so if a node and its neighbors send the very same messages in the first steps."""

    def __init__(self) -> None:
        self._looked = self._equal = self._tried = 0

    @property
    def looking(self) -> bool:
        return self._looked < _LOOKED_AT and self._tried < _TRIED

    def note(self, equal: bool | None, node: int) -> None:
        self._tried += 1
        if equal is None:
            return
        self._looked += 1
        self._equal += equal
        if self._equal == _LOOKED_AT:
            log.warning(
                "node %d: all nodes that it averaged with had the very same gradients in the first "
                "%d steps. Do all processes train on the same data? Give each its own, for "
                "instance with torch.utils.data.DistributedSampler, or seed them differently.",
                node,
                _LOOKED_AT,
            )

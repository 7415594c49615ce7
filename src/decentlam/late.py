"""Parameters whose new value is still on its way: whoever touches one waits for it first.

With `overlap="forward"` a step returns before the neighbors' messages are there. Until then a
parameter is a `LateParameter`: every torch function, method or attribute that takes it finishes its
bucket's update first. So the next forward waits layer by layer, and everybody else who looks, be it
state_dict, an evaluation or another optimizer, sees the finished value too.

What passes unseen is a read outside of torch's Python functions: through a tensor made before
(p.data, p.detach()), in a scripted function, an extension or a CUDA graph. It may see the value
before the update, after it or in its midst. The gradient of a parameter that nobody asked for is
refused.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from decentlam.exchange.clerk import dismiss_all

_SETTLE = "_decentlam_settle"  # where a late parameter keeps what finishes its update


class Unfinished(Protocol):
    """An optimizer that has left something under way."""

    def finish(self) -> None: ...


_unfinished: weakref.WeakSet[Unfinished] = weakref.WeakSet()
_hook: Any = None  # before every module's forward, while anything is unfinished

_HARMLESS = {  # they read no value; taking the gradient away leaves the update its own reference
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad")
    ),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_floating_point")),
    vars(torch._C.TensorBase)["grad"].__set__,
}


class LateParameter(nn.Parameter):
    """What a parameter is while its update waits for messages."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        found = list(_late_in((args, kwargs)))
        for p in found:
            settle(p)
        if not found:  # inside something unknown
            finish_all()
        return function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settle(self)  # else the copy would be late for ever
        return copy.deepcopy(self, memo)


def postpone(params: Iterable[Tensor], finish: Callable[[], None]) -> bool:
    """Makes the parameters late until `finish` was called; False if one of them cannot be."""
    params = list(params)
    if any(type(p) is not nn.Parameter for p in params):
        return False
    for p in params:
        setattr(p, _SETTLE, finish)
        p.__class__ = LateParameter
    return True


def release(params: Iterable[Tensor]) -> None:
    """The parameters are what they say again."""
    for p in params:
        if isinstance(p, LateParameter):
            p.__class__ = nn.Parameter  # type: ignore[assignment]
            vars(p).pop(_SETTLE, None)


def settle(p: Tensor) -> None:
    """Finishes the update of a parameter, if it is late."""
    if isinstance(p, LateParameter):
        finish = vars(p).get(_SETTLE)
        if finish is not None:
            finish()
        release([p])


def watch(optimizer: Unfinished) -> None:
    """From here on, compiled models and the end of the process wait for `optimizer.finish()`."""
    global _hook
    _unfinished.add(optimizer)
    if _hook is None:
        _hook = nn.modules.module.register_module_forward_pre_hook(_before_forward)


def forget(optimizer: Unfinished) -> None:
    global _hook
    _unfinished.discard(optimizer)
    if _hook is not None and not _unfinished:
        _hook.remove()
        _hook = None


def _before_forward(module: nn.Module, args: Any) -> None:
    """A compiled model guards on the type of its parameters, and would be compiled anew; a
    scripted one reads them unseen."""
    if isinstance(module, torch.jit.ScriptModule) or type(module).__name__ == "OptimizedModule":
        finish_all()


def finish_all() -> None:
    """Finishes what every optimizer has under way; the first error is raised at the end."""
    errors = []
    for optimizer in list(_unfinished):
        try:
            optimizer.finish()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@atexit.register
def _at_exit() -> None:
    """Neighbors still wait for this process's last messages."""
    try:
        if dist.is_available() and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                finish_all()
    finally:
        dismiss_all()


def _late_in(value: Any) -> Iterator[LateParameter]:
    if isinstance(value, LateParameter):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _late_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _late_in(item)

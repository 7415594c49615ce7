"""Parameters whose new value is still on its way: whoever reads one waits for it first.

Until then a parameter is an `AwaitedParameter`: every torch function, method or attribute that
takes it finishes its bucket's update first. So the next forward waits layer by layer, and everybody
else who looks, be it state_dict, an evaluation or another optimizer, sees the finished value too.

What passes unseen is a read outside of torch's Python functions: through a tensor made before
(p.data, p.detach()), in a scripted function, an extension or a CUDA graph. It may see the value
before the update, after it or in its midst. The gradient of a parameter that nobody asked for is
refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_FINISH = "_decentlam_finish"  # where an awaited parameter keeps what finishes its update

_HARMLESS = {  # they read no value; taking the gradient away leaves the update its own reference
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad")
    ),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_floating_point")),
    vars(torch._C.TensorBase)["grad"].__set__,
}


class AwaitedParameter(nn.Parameter):
    """What a parameter is while its update waits for messages."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        for p in list(_awaited_in((args, kwargs))):
            finish(p)
        return function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        finish(self)  # else the copy would be awaited for ever
        return copy.deepcopy(self, memo)


def await_all(params: Iterable[Tensor], update: Callable[[], None]) -> bool:
    """Makes the parameters awaited until `update` was called; False if one of them cannot be."""
    params = list(params)
    if any(type(p) is not nn.Parameter for p in params):
        return False
    for p in params:
        setattr(p, _FINISH, update)
        p.__class__ = AwaitedParameter
    return True


def release(params: Iterable[Tensor]) -> None:
    """The parameters are what they say again."""
    for p in params:
        if isinstance(p, AwaitedParameter):
            p.__class__ = nn.Parameter  # type: ignore[assignment]
            vars(p).pop(_FINISH, None)


@torch.compiler.disable
def finish(p: Tensor) -> None:
    """Finishes the update of a parameter, if it is awaited."""
    if isinstance(p, AwaitedParameter):
        update = vars(p).get(_FINISH)
        if update is not None:
            update()
        release([p])


def _awaited_in(value: Any) -> Iterator[AwaitedParameter]:
    if isinstance(value, AwaitedParameter):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _awaited_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _awaited_in(item)

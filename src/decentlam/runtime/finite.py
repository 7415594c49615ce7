"""Nothing that is NaN or infinite reaches a neighbor.

On a CPU a look at a message costs little while it is in the cache, and the step is refused at once.
On a GPU a look would wait for the device: there a gradient that is not finite counts as zero, and
the script is told one step later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decentlam.errors import NonFiniteError


def all_finite(tensor: Tensor) -> bool:
    """One read without a temporary; a sum that overflowed is looked at again, element-wise."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def refuse(node: int, step: int, names: Sequence[str]) -> None:
    """Raises if there are names of parameters that are not finite."""
    if names:
        raise NonFiniteError(
            f"node {node}, step {step}: {', '.join(names)} became NaN or infinite; nothing of it "
            "was sent. Lower lr, or pass nonfinite='skip' with overlap='none' to leave such "
            "gradients out."
        )


def flag(tensors: Sequence[Tensor], earlier: Tensor | None) -> Tensor:
    """Whether these, and what was flagged earlier, are finite, as a tensor on their device."""
    largest = [torch.linalg.vector_norm(t, ord=math.inf) for t in tensors]
    finite = torch.stack(largest).isfinite().all()
    return finite if earlier is None else finite & earlier


def leave_out(gradients: Sequence[Tensor], finite: Tensor) -> None:
    """Makes the gradients zero if the flag says that they are not finite."""
    for g in gradients:
        g.data.masked_fill_(~finite, 0.0)  # .data: not a change by the script


class DeferredLook:
    """Whether the buckets of a step were finite, looked at one step later: by then the GPU has
    long copied it to the host, and nobody waits."""

    def __init__(self) -> None:
        self._noted: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def note(self, step: int, finite: Sequence[Tensor | None]) -> None:
        flags = [flag for flag in finite if flag is not None]
        if not flags:
            return
        together = torch.stack(flags)
        on_host = together.to("cpu", non_blocking=True)
        copied = None
        if together.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._noted = step, on_host, copied

    def look(self, node: int) -> None:
        """Raises if a bucket of the step that was noted last was not finite."""
        if self._noted is None:
            return
        (step, on_host, copied), self._noted = self._noted, None
        if copied is not None:
            copied.synchronize()
        bad = [str(bucket) for bucket, finite in enumerate(on_host.tolist()) if not finite]
        if bad:
            raise NonFiniteError(
                f"node {node}, step {step}: the gradient or message of bucket {', '.join(bad)} "
                "became NaN or infinite. Such a gradient counted as zero, and no neighbor got it. "
                "Lower lr, or pass nonfinite='skip' with overlap='none' to leave it out."
            )

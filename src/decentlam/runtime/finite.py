"""What is NaN or infinite does not reach a neighbor.

On a CPU a look at a message costs little while it is in the cache, and the step is refused at once.
On a GPU a look would wait for the device: there a gradient that is not finite counts as zero, and
the script is told one step later. It is also told there of a message that overflowed with a finite
gradient, but that was sent.
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
    """Whether these, and what was flagged earlier, are finite; a tensor on the first's device."""
    norms = [torch.linalg.vector_norm(t, ord=math.inf) for t in tensors]
    largest = norms[0]
    if len(norms) > 1:
        largest = torch.stack([n.to(largest.device) for n in norms]).amax()
    finite = largest.isfinite()
    return finite if earlier is None else finite & earlier


def leave_out(gradients: Sequence[Tensor], finite: Tensor) -> None:
    """Makes the gradients zero if the flag says that they are not finite."""
    bad = ~finite
    for g in gradients:
        g.data.masked_fill_(bad, 0.0)  # .data: not a change by the script


class DeferredLook:
    """Whether the buckets of a step were finite, looked at one step later: by then the GPU has
    long copied it to the host, and nobody waits."""

    def __init__(self) -> None:
        self._noted: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def note(self, step: int, finite: Sequence[Tensor | None]) -> None:
        flags = [flag for flag in finite if flag is not None]
        if not flags:
            return
        together = torch.stack([flag.to(flags[0].device, non_blocking=True) for flag in flags])
        on_host = together.to("cpu", non_blocking=True)
        copied = None
        if together.is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(together.device))
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
                "became NaN or infinite. Such a gradient counted as zero, and no neighbor got it; "
                "a message that overflowed with a finite gradient was sent. Lower lr, or pass "
                "nonfinite='skip' with overlap='none' to leave such gradients out."
            )

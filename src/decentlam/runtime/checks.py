"""What watches the user's script: mistakes that would otherwise train something else in silence.

`Checks.before` runs before a step sends or changes anything, `Checks.after` when all mixes are
there. Between backward and step() a message must stay true to its gradient, parameters and lr:
changes are noticed by the versions that torch counts for each tensor. It does not count writes
through `.data`, so in the first steps values are compared, too, because a script that writes so
does it from the start.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from decentlam.algorithms import Algorithm, Step
from decentlam.errors import NonFiniteError, StaleMessageError
from decentlam.exchange.base import combine
from decentlam.network.network import Network
from decentlam.runtime.bucket import Bucket, Plan, Version, Versions, decayed

log = logging.getLogger(__name__)

_COMPARED = 3  # first steps in which the values of tensors are compared, not only their versions
_EQUAL = 2  # steps with equal messages after which the script is told
_TRIED = 10  # first steps in which messages are compared: every look waits for a GPU
_SEEN = 8  # elements that a step must move for messages of 16 bits to tell whether it is the same


class Checks:
    """The checks of one runtime; most of them look in the first steps only."""

    def __init__(
        self, network: Network, buckets: Sequence[Bucket], frozen: Sequence[Tensor], first: bool
    ) -> None:
        self._network, self._buckets, self._frozen = network, buckets, frozen
        self._params = [p for bucket in buckets for p in bucket.wholes]
        self._largest = max(buckets, key=lambda bucket: len(bucket.shard_x), default=None)
        # A look at all objects takes long, and members of an elastic run change often.
        self._looks_for_ddp = first and network.num_processes > 1
        self._compared = self._equal = self._tried = 0
        self._flags: tuple[int, Tensor, torch.cuda.Event | None] | None = None
        self._steps = 0  # taken since the runtime was built
        # Whether `after` has still something to look at.
        self.watching = any(bucket.pieces for bucket in buckets) and _TRIED > 0

    def before(self, absent: bool, begun: bool) -> None:
        """Refuse what would train nothing, or something else than it seems to."""
        if self._flags is not None:
            self.look()
        for p in self._frozen:
            if p.grad is not None:
                raise RuntimeError(
                    "a parameter that was frozen when the optimizer was built now has a gradient; "
                    "build the optimizer after unfreezing it, or leave it out at first and pass it "
                    "to add_param_group when it is unfrozen"
                )
        self.reclaim()
        if not (absent or begun or any(p.grad is not None for p in self._params)) and self._params:
            raise RuntimeError(
                "step() without any gradient: no parameter of this optimizer got one since "
                "zero_grad(). Call backward() first. If the model's parameters were replaced (by "
                "load_state_dict(assign=True) or a new module), build the optimizer anew; a node "
                "without data goes on inside torch.distributed.algorithms.Join, or with zero "
                "gradients."
            )
        if self._looks_for_ddp:
            self._looks_for_ddp = False
            self._refuse_ddp()

    def reclaim(self) -> None:
        """Go on with parameters that were moved to other memory, if they are as they were."""
        for bucket in self._buckets:
            for i in range(len(bucket.params)):
                if not bucket.holds(i):
                    bucket.reclaim(i)

    def versions(self, bucket: Bucket) -> Versions:
        """Return what tells gradients and parameters of a bucket from what they become."""
        compare = self._steps < _COMPARED
        gradients = [version(p.grad, compare) for p in bucket.params]
        return gradients, [version(p, compare) for p in bucket.params]

    def fresh(self, bucket: Bucket, plan: Plan) -> None:
        """Refuse a message that was made of something else than step() sees."""
        assert bucket.versions is not None
        (gradients, parameters), now = bucket.versions, self.versions(bucket)
        if parameters != now[1]:
            raise StaleMessageError(
                "a parameter changed while its message was on the way (by load_state_dict or an "
                "assignment between backward and step(), or with AWC-DmSGD after step()). Change "
                "parameters between step() and backward, and with AWC-DmSGD use overlap='none'."
            )
        if not bucket.gathered:  # it needed no gradient, which may even have been replaced
            return
        if bucket.plan != plan:
            raise StaleMessageError(
                "lr, momentum or weight decay changed between backward and step(): the message "
                f"left with {_rates(bucket.plan)}, the group now has {_rates(plan)}. Change them "
                "after step(), as schedulers do, or use overlap='none'."
            )
        if gradients != now[0]:
            raise StaleMessageError(
                "a gradient changed between backward and step(), but its message had left "
                "already. To clip, use max_grad_norm=... with overlap='none'; for any other "
                "change use overlap='none'."
            )

    def _refuse_ddp(self) -> None:
        ours = set(map(id, self._params))
        for thing in gc.get_objects():  # once in a run; a hook on all modules disturbs compilers
            if issubclass(type(thing), DistributedDataParallel) and any(
                id(p) in ours for p in thing.parameters()
            ):
                raise RuntimeError(
                    "the model is wrapped in DistributedDataParallel, which averages the gradients "
                    "of all processes before this optimizer sees them: the nodes never differ, and "
                    "both kinds of communication are paid for. Train the model without the "
                    "wrapper: remove DistributedDataParallel(model); with Accelerate do not pass "
                    "the model to prepare(); with Ray call prepare_model(model, "
                    "parallel_strategy=None). For Lightning and Hugging Face, "
                    "decentlam.integrations has a strategy and a Trainer that do not wrap."
                )

    # Equal data ---------------------------------------------------------------------------------

    def after(self, skip: bool) -> None:
        """Say so if a node and its neighbors send the very same messages in the first steps."""
        self._steps += 1
        bucket = self._largest  # it tells most
        assert bucket is not None
        if bucket.plan[1].lr == 0 or skip:
            return
        self._tried += 1
        self.watching = self._tried < _TRIED
        equal = _mixed_with_the_same(bucket, *bucket.plan) if self._compared < _EQUAL else None
        if equal is None:
            return
        self._compared += 1
        self._equal += equal
        if self._equal == _EQUAL:
            log.warning(
                "node %d: all nodes that it averaged with had the very same gradients in the first "
                "%d steps. Do all processes train on the same data? Give each its own, for "
                "instance with torch.utils.data.DistributedSampler, or seed them differently.",
                self._network.node,
                _EQUAL,
            )

    # Finite values ------------------------------------------------------------------------------
    #
    # On a CPU a look at a message costs little while it is in the cache, and the step is refused at
    # once. On a GPU a look would wait for the device: there a gradient that is not finite counts as
    # zero, and the script is told one step later. It is also told there of a message that
    # overflowed with a finite gradient, but that was sent.

    def leave_out(self, bucket: Bucket) -> None:
        """Make a gradient that is not finite zero, without a look at it."""
        bucket.finite = finite_flag(bucket.gradients, bucket.finite)
        for g in bucket.gradients:
            g.data.masked_fill_(~bucket.finite, 0.0)  # .data: not a change by the script

    def gradient(self, bucket: Bucket, step: int) -> None:
        """Refuse a gradient that is not finite."""
        if not all(map(all_finite, bucket.gradients)):
            self.refuse(bucket, step, torch.cat(bucket.gradients))

    def shards_are_finite(self, step: int) -> NonFiniteError | None:
        """Return the error that names the parameters of whose gradient a shard is not finite."""
        named = [
            (name, p.grad)
            for bucket in self._buckets
            for name, p in zip(bucket.names, bucket.params, strict=True)
            if p.grad is not None and p.grad.numel()
        ]
        if named and named[0][1].is_cuda and finite_flag([g for _, g in named], None).item():
            return None  # the only look that waits for the device
        bad = [name for name, g in named if not all_finite(g)]
        return NonFiniteError(_not_finite(self._network.node, step, bad)) if bad else None

    def refuse(self, bucket: Bucket, step: int, values: Tensor) -> None:
        """Raise an error that names the parameters whose values are not finite."""
        if names := bucket.nonfinite_names(values, step):  # none: only the sum has overflowed
            raise NonFiniteError(_not_finite(self._network.node, step, names))

    def defer(self, step: int) -> None:
        """Note the flags that buckets left on a GPU, for `look`."""
        flags = [bucket.finite for bucket in self._buckets if bucket.finite is not None]
        if flags:
            together = torch.stack([flag.to(flags[0].device, non_blocking=True) for flag in flags])
            on_host = together.to("cpu", non_blocking=True)
            copied = None
            if together.is_cuda:
                copied = torch.cuda.Event()
                copied.record(torch.cuda.current_stream(together.device))
            self._flags = step, on_host, copied

    def look(self) -> None:
        """Raise if a bucket of the last step was not finite: by now the GPU has long copied the
        flags to the host, and nobody waits."""
        if self._flags is None:
            return
        (step, on_host, copied), self._flags = self._flags, None
        if copied is not None:
            copied.synchronize()
        bad = [str(bucket) for bucket, finite in enumerate(on_host.tolist()) if not finite]
        if bad:
            raise NonFiniteError(
                f"node {self._network.node}, step {step}: the gradient or message of bucket "
                f"{', '.join(bad)} became NaN or infinite. Such a gradient counted as zero, and no "
                "neighbor got it; a message that overflowed with a finite gradient was sent. Lower "
                "lr, or pass nonfinite='skip' with overlap='none' to leave such gradients out."
            )


def version(tensor: Tensor | None, compare: bool) -> Version:
    """Return what tells a tensor from what it was: torch's count of writes to it and, if `compare`,
    its sum, unless it is on a GPU or not finite."""
    if tensor is None:
        return None
    if not compare or tensor.device.type != "cpu" or tensor.is_sparse:
        return id(tensor), tensor._version, 0.0
    total = tensor.detach().sum().item()
    return id(tensor), tensor._version, total if math.isfinite(total) else 0.0


def _not_finite(node: int, step: int, names: Sequence[str]) -> str:
    return (
        f"node {node}, step {step}: {', '.join(names)} became NaN or infinite; nothing of it was "
        "sent. Lower lr, or pass nonfinite='skip' with overlap='none' to leave such gradients out."
    )


def _rates(plan: Plan) -> str:
    algorithm, step = plan
    return f"lr={step.lr}, weight_decay={step.weight_decay} and {algorithm!r}"


def _mixed_with_the_same(bucket: Bucket, algorithm: Algorithm, step: Step) -> bool | None:
    """Return whether all others that the message was averaged with sent the very same one, or None
    if that cannot be told."""
    terms = bucket.terms
    if not terms or (len(terms) == 1 and terms[0][0] == 1.0):  # nobody else's
        return None
    if not any(bool(g.any()) for g in bucket.gradients):
        return None
    if len(terms) > 1:
        size = len(bucket.shard_x)
        mine, *others = (t[:size] for _, t in terms)
        rounded = next((t.dtype for t in others if t.dtype is not mine.dtype), None)
        # Of small steps nothing is seen in 16 bits.
        if rounded is not None and algorithm.needs_gradient:
            seen = mine.to(rounded) != bucket.shard_x.to(rounded)
            if int(seen.sum()) < _SEEN:
                return None
        return all(torch.equal(mine.to(t.dtype), t) for t in others)
    piece, g = bucket.pieces[0], decayed(bucket.gradients[0], bucket.pieces[0].x, algorithm, step)
    own = algorithm.message(piece.x, g, piece.state, step)
    return isinstance(own, Tensor) and torch.allclose(own, combine(terms)[piece.span], 1e-5, 0.0)


def all_finite(tensor: Tensor) -> bool:
    """Return True if all is finite: one read without a temporary; a sum that overflowed is looked
    at again, element by element."""
    return math.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def finite_flag(tensors: Sequence[Tensor], earlier: Tensor | None) -> Tensor:
    """Return whether these, and what was flagged earlier, are finite, on the first's device."""
    norms = [torch.linalg.vector_norm(t, ord=math.inf) for t in tensors]
    largest = norms[0]
    if len(norms) > 1:
        largest = torch.stack([n.to(largest.device) for n in norms]).amax()
    finite = largest.isfinite()
    return finite if earlier is None else finite & earlier

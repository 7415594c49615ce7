"""Positive numbers in 8 bits: their logarithms in steps of a quarter octave, over 63 octaves."""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 4  # per octave: a factor of 2 ** 0.25 from one code to the next
HIGHEST = 254  # the code of the largest number; 0 is zero
ABSENT = 255  # the code of a number that is not there


def octave_of(largest: float) -> int:
    """Return the least power of two that is no smaller, as one byte holds it."""
    exponent = torch.tensor(largest, dtype=torch.float64).log2().ceil()
    return int(exponent.nan_to_num(0.0, 127.0, -128.0).clamp(-128, 127))


@torch.no_grad()
def encode(values: Tensor, octave: int, out: Tensor) -> None:
    """Fill `out` with the codes of flat values from 0 to 2 ** octave; tiny ones become 0."""
    codes = values.log2().sub_(octave).mul_(STEPS).add_(HIGHEST).round_()
    out.copy_(codes.nan_to_num_(HIGHEST, HIGHEST, 0.0).clamp_(0, HIGHEST))


@torch.no_grad()
def decode(codes: Tensor, octave: int, dtype: torch.dtype) -> Tensor:
    """Return the values that codes stand for."""
    values = codes.to(dtype).sub_(HIGHEST).div_(STEPS).add_(octave).exp2_()
    return values.masked_fill_(codes == 0, 0)

"""How a change of a message is written down in few bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # elements that share a scale
_SCALE_BYTES = torch.float32.itemsize
_LEAST_SCALE = 1e-30  # smaller ones have no inverse in float32


class Codec(ABC):
    """Called with chunks that stay in the cache; all but the last are multiples of `BLOCK`."""

    @abstractmethod
    def packet_bytes(self, elements: int) -> int:
        """The size of the packet of a change; for multiples of `BLOCK` in proportion to them."""

    @abstractmethod
    def encode(self, change: Tensor, packet: Tensor) -> None:
        """Writes the change, (elements,), into the packet, (bytes,) of uint8."""

    @abstractmethod
    def decode(self, packet: Tensor, elements: int) -> Tensor:
        """The change as the other end will read it, in any floating dtype."""


class Scaled8(Codec):
    """8 bits for each element: whole multiples, from -127 to 127, of a scale that a block shares.

    A block is its scale as float32, then its elements; the last one is filled with zeros.
    """

    def packet_bytes(self, elements: int) -> int:
        return -(-elements // BLOCK) * (_SCALE_BYTES + BLOCK)

    def encode(self, change: Tensor, packet: Tensor) -> None:
        change = F.pad(change.float(), (0, -len(change) % BLOCK)).view(-1, BLOCK)
        scale = change.abs().amax(1, keepdim=True).div_(127).clamp_(min=_LEAST_SCALE)
        blocks = packet.view(-1, _SCALE_BYTES + BLOCK)
        blocks[:, :_SCALE_BYTES] = scale.view(torch.uint8)
        blocks[:, _SCALE_BYTES:].view(torch.int8).copy_(change.div_(scale).round_())

    def decode(self, packet: Tensor, elements: int) -> Tensor:
        blocks = packet.view(-1, _SCALE_BYTES + BLOCK)
        scale = blocks[:, :_SCALE_BYTES].contiguous().view(torch.float32)
        change = blocks[:, _SCALE_BYTES:].view(torch.int8).float().mul_(scale)
        return change.view(-1)[:elements]


CODECS: dict[torch.dtype, Codec] = {torch.int8: Scaled8()}

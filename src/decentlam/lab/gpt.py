"""A small GPT that reads bytes: 0.04M to 10M parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decentlam.lab.models import Shape


class Block(nn.Module):
    """Causal attention, then a layer of four times the width, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        # Written out, because torch.func.vmap runs torch's own function node by node.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        x = x + self.attended(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))


class GPT(nn.Module):
    """From bytes (batch, length) to the logits of those that follow, (batch, 256, length).

    Classes stand before positions, as `F.cross_entropy` wants them. The last layer has the weights
    of the first. GPT-2's start, a deviation of 0.02, is 0.55 / sqrt(width) at its width of 768.
    """

    def __init__(self, classes: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.token = nn.Embedding(classes, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            if p.ndim > 1:
                last = name.endswith(("attended.weight", "narrow.weight"))
                nn.init.normal_(p, std=0.5 / (width * (2 * layers if last else 1)) ** 0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.token(tokens) + self.position(places)))
        return F.linear(x, self.token.weight).transpose(1, 2)


def gpt(layers: int, width: int, heads: int, shape: Shape, classes: int) -> nn.Module:
    """Build a GPT for text of that many kinds of bytes, which sees `shape[2]` of them at once."""
    return GPT(classes, shape[2], layers, width, heads)


GPTS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "gpt-tiny": partial(gpt, 2, 32, 2),  # 0.04M parameters
    "gpt-small": partial(gpt, 2, 64, 4),  # 0.12M
    "gpt-medium": partial(gpt, 4, 128, 4),  # 0.8M
    "gpt-large": partial(gpt, 8, 320, 5),  # 10M
}

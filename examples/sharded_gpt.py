"""A small GPT whose nodes are two processes each: FSDP2 inside a node, DecentLaM's AdamW between.

    torchrun --nproc-per-node 4 examples/sharded_gpt.py [--shards 2] [--steps 60] [--out DIRECTORY]

As in torchtitan: a mesh with the dimensions "replicate" and "shard", `fully_shard` on every block,
a loop, and a checkpoint from which the run goes on if it is there. The text is Python's library,
another part of it on every node.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import decentlam

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 32, 64, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def text_of(node: int, nodes: int) -> Tensor:
    """The bytes of every so many modules of Python's library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[node::nodes]
    return torch.tensor(list(b"".join(file.read_bytes() for file in files[:20])))


def batch_of(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2, help="processes of a node")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", help="directory of the checkpoint")
    options = parser.parse_args()
    decentlam.init()
    rank, nodes = dist.get_rank(), dist.get_world_size() // options.shards
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (nodes, options.shards), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = GPT().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = decentlam.AdamW(
        model.parameters(), lr=3e-3, max_grad_norm=1.0, mesh=mesh["replicate"]
    )
    first = 0
    if options.out and Path(options.out).exists():
        first = decentlam.load_checkpoint(options.out, model=model, optimizer=optimizer).step
    text, loss = text_of(rank // options.shards, nodes), torch.zeros(())
    for step in range(first, options.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs, targets = (t.to(device) for t in batch_of(text, generator))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    if options.out:
        decentlam.save_checkpoint(options.out, model=model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)
    with optimizer.averaged(model), torch.no_grad():
        inputs, targets = (t.to(device) for t in batch_of(text_of(0, 1), generator))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    if rank == 0:
        sent = optimizer.statistics.bytes_sent / 1e6
        print(f"averaged model: loss {loss.item():.3f}; {sent:.3f} MB sent per process and step")
    decentlam.leave()


if __name__ == "__main__":
    main()

"""Your own algorithm in 20 lines: Gossip-PGA (Chen et al., 2021), DmSGD with an exact average
every `period` steps. It runs in the simulator and on real processes alike:

    python examples/own_algorithm.py                               # 8 simulated nodes
    torchrun --nproc-per-node 4 examples/own_algorithm.py          # 4 real ones
"""

import os
from dataclasses import dataclass

import torch
from torch import nn

import decentlam
from decentlam.algorithms import Algorithm, Reach


@dataclass(frozen=True)
class GossipPGA(Algorithm):
    """m+ = beta m + g;  x+ = W (x - lr m+), with the exact average in place of W now and then"""

    beta: float = 0.9
    period: int = 10
    buffers = ("m",)

    def reach(self, index):
        return Reach.EVERYONE if (index + 1) % self.period == 0 else Reach.NEIGHBORS

    def message(self, x, g, state, step):
        return x - step.lr * (self.beta * state["m"] + g)

    def update(self, x, g, mixed, state, step):
        state["m"].mul_(self.beta).add_(g)
        x.copy_(mixed)


def main() -> None:
    algorithm = GossipPGA(beta=0.8)
    if "RANK" not in os.environ:
        targets = torch.arange(8.0).reshape(8, 1)
        x = decentlam.simulate(
            algorithm, "ring", torch.zeros(8, 1), lambda x, step: x - targets, lr=0.1, steps=200
        )
        print(f"8 simulated nodes agree on {x.mean():.3f} within {(x - x.mean()).abs().max():.1e}")
        return
    decentlam.init()
    node = torch.distributed.get_rank()
    weight = nn.Parameter(torch.zeros(1))
    optimizer = decentlam.DecentralizedOptimizer([weight], algorithm, lr=0.1, topology="ring")
    for _ in range(200):
        optimizer.zero_grad()
        (0.5 * (weight - node) ** 2).sum().backward()
        optimizer.step()
    distance = optimizer.consensus_distance()
    optimizer.merge()
    if node == 0:
        print(f"the nodes agree on {weight.item():.3f} within {distance:.1e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

"""DecentLaM as a DDP communication hook, for users who must keep DistributedDataParallel.

    torchrun --nproc-per-node 4 examples/ddp_hook.py

The hook sends x - lr g to the neighbors instead of all-reducing g, and hands DDP the corrected
gradient (x - W (x - lr g)) / lr, so that a plain torch.optim.SGD afterwards is Algorithm 2.
Limits: lr must be above zero (nothing is mixed through a gradient at lr = 0), lr and gradients
must not change between backward and step, and weight decay belongs to the hook, not to SGD.
DDP copies buffers such as BatchNorm's from process 0 unless told otherwise.
`decentlam.DecentLaM` has none of these limits.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import decentlam


class DecentLaMHook:
    """State of `decentlam_hook`: the exchange, the optimizer whose lr is used, what is pending."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, topology: str, weight_decay: float = 0.0
    ) -> None:
        self.optimizer, self.weight_decay = optimizer, weight_decay
        device = optimizer.param_groups[0]["params"][0].device
        self.exchange = decentlam.neighbor_exchange(topology, device=device)
        self.step = 0
        self.pending: list[tuple[Future[Tensor], Tensor, decentlam.Pending]] = []


@torch.no_grad()
def decentlam_hook(state: DecentLaMHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """Sends this bucket's message; the last bucket of a step waits for all answers."""
    lr = state.optimizer.param_groups[0]["lr"]
    if lr <= 0:
        raise ValueError(f"the hook needs lr > 0, got {lr}; use decentlam.DecentLaM for lr = 0")
    x = torch.cat([p.reshape(-1) for p in bucket.parameters()])
    message = torch.add(x, torch.add(bucket.buffer(), x, alpha=state.weight_decay), alpha=-lr)
    state.exchange.receive(bucket.index(), message, state.step)
    pending = state.exchange.send(bucket.index(), message, state.step)
    corrected: Future[Tensor] = Future()
    state.pending.append((corrected, x, pending))
    if bucket.is_last():
        for future, own, mix in state.pending:
            mixed = sum(weight * term for weight, term in mix.wait())
            future.set_result((own - mixed) / lr)
        state.pending.clear()
        state.step += 1
    return corrected


def main() -> None:
    decentlam.init()
    node = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.register_comm_hook(DecentLaMHook(optimizer, "ring"), decentlam_hook)
    generator = torch.Generator().manual_seed(node)
    inputs = torch.randn(64, 10, generator=generator)
    targets = inputs.sum(1, keepdim=True) + node  # every node believes in another offset
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    bias = model.module.bias.detach().clone()
    dist.all_reduce(bias)
    if node == 0:
        print(f"mean offset {bias.item() / dist.get_world_size():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

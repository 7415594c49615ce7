"""Decentralized training in 40 lines. Run it with

torchrun --nproc-per-node 4 examples/train.py
"""

import torch
from torch import nn

import decentlam

decentlam.init()  # reads what torchrun, mpirun or srun set; gloo on CPU, NCCL on GPU
node, num_nodes = torch.distributed.get_rank(), torch.distributed.get_world_size()

# Ten classes; every node sees only two or three of them, the case that hurts DmSGD.
generator = torch.Generator().manual_seed(0)
centers = 2 * torch.randn(10, 20, generator=generator)
labels = torch.arange(4000) % 10
images = centers[labels] + torch.randn(4000, 20, generator=generator)
mine = labels * num_nodes // 10 == node

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
optimizer = decentlam.DecentLaM(model.parameters(), lr=0.05, momentum=0.9, topology="ring")
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)

for _ in range(200):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
    loss.backward()  # each bucket's message leaves as soon as its gradients are there
    optimizer.step()  # waits for the neighbors' messages and updates
    scheduler.step()

with optimizer.averaged(model):  # the mean of all nodes' parameters and BatchNorm statistics
    model.eval()
    accuracy = (model(images).argmax(1) == labels).float().mean().item()
distance, sent = optimizer.consensus_distance(), optimizer.statistics.total_bytes_sent
if node == 0:
    print(f"accuracy of the averaged model {accuracy:.3f}, consensus distance {distance:.2e}")
    print(f"node 0 sent {sent / 1e6:.1f} MB in 200 steps")
torch.distributed.destroy_process_group()

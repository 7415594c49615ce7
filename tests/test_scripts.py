"""A script as pytorch/examples has it, in which only the line with the optimizer is another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.scripts import run_script

# As imagenet/main.py under torchrun: its own process group and samplers, and one file that every
# rank writes, one after the other here, and that every rank resumes from.
IMAGENET = """
import os
import torch, decentlam
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FILE = "DIRECTORY/checkpoint.pth.tar"

def main(start_epoch, epochs, resume):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
                          nn.Linear(144, 5))
    optimizer = decentlam.DecentLaM(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)
    if resume:
        checkpoint = torch.load(FILE)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    images = torch.randn(64, 3, 8, 8)
    data = TensorDataset(images, images.mean((1, 2, 3)).mul(40).long().clamp(0, 4))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, num_workers=1, sampler=sampler)
    for epoch in range(start_epoch, epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            loss = nn.functional.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = torch.tensor([float(model(x).argmax(1).eq(y).sum()) for x, y in loader]).sum()
        dist.all_reduce(total)
        scheduler.step()
        for rank in range(dist.get_world_size()):
            if rank == dist.get_rank():
                torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "scheduler": scheduler.state_dict()}, FILE)
            dist.barrier()
    return start_epoch, optimizer.param_groups[0]["lr"], optimizer.consensus_distance()

dist.init_process_group("gloo", init_method="env://")
torch.save([main(0, 1, False), main(0, 2, True)], f"DIRECTORY/{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


def test_a_script_with_one_checkpoint_for_all_ranks_goes_on_from_it(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(IMAGENET.replace("DIRECTORY", str(tmp_path)))
    run_script(script, tmp_path, nodes=4)
    for rank in range(4):
        first, again = torch.load(tmp_path / f"{rank}.pt")
        assert first[:2] == (0, pytest.approx(0.005)) and first[2] > 0
        assert again[:2] == (1, pytest.approx(0.0005)) and again[2] > 0

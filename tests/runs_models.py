"""Models that do not use everything, in whatever order, and what torch does to them."""

from __future__ import annotations

import copy
import pickle
import unittest.mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from runs import SCALE, flat, targets_of
from runs_steps import Group, build, message_of, quadratic_loss, start, train
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import decentlam
from decentlam.runtime import bucket


class Branches(nn.Module):
    """Two branches over tied weights, taken in a different order or not at all by each node."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(3, 3, bias=False)
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.inner.weight
        self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)
        self.never = nn.Parameter(torch.randn(5))
        self.double()


def branches_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    if node == 2 and step == 3:
        return model.left(x).square().mean()  # nothing before it is used
    x = torch.tanh(model.tied(model.inner(x)))
    if (node + step) % 3 == 0:
        y = model.left(torch.tanh(model.right(x)[:, :3]))
    elif (node + step) % 3 == 1:
        y = model.right(torch.tanh(model.left(x)[:, :3]))
    else:
        y = model.left(x)
    return (y * model.frozen.abs() - 1).square().mean()


def branches(
    process_group: Group, method: str, overlap: bool | str, chatter: bool = False
) -> list[Tensor]:
    """With `chatter` the script communicates by itself between backward and step()."""
    node, n = dist.get_rank(process_group), dist.get_world_size(process_group)
    model = Branches(seed=node)
    optimizer = build(method, model, process_group, overlap=overlap)
    trajectory = []
    for step in range(8):
        optimizer.zero_grad()
        loss = branches_loss(model, node, step)
        loss.backward()
        if chatter:
            _talk(process_group, node, n)
        optimizer.step()
        trajectory.append(trained(model))
    return trajectory


def _talk(process_group: Group, node: int, n: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total, group=process_group)
    assert total.item() == n
    ranks = dist.get_process_group_ranks(process_group)
    received = torch.zeros(1)
    work = dist.irecv(received, ranks[(node - 1) % n], group=process_group)
    dist.send(torch.full((1,), float(node)), ranks[(node + 1) % n], group=process_group)
    work.wait()
    assert received.item() == (node - 1) % n


def trained(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def disjoint(process_group: Group, first: str) -> list[Tensor]:
    """Two losses over different parameters, as actor and critic have, in two backwards."""
    node, model, optimizer = start(process_group, "decentlam", bucket_bytes=200)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        terms = [
            (1 + 0.1 * step) * 0.5 * s * (w - t).square().sum()
            for w, t, s in zip(model.weights, targets_of(node), SCALE, strict=True)
        ]
        halves = [terms[:2], terms[2:]]
        for half in halves if first == "front" else halves[::-1]:
            sum(half).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


class Checkpointed(nn.Module):
    """Forgets what is between its halves and computes it again in backward."""

    def __init__(self, seed: int = 0, reentrant: bool = False) -> None:
        super().__init__()
        self.layers = mlp(seed)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for half in (self.layers[:2], self.layers[2:]):
            x = checkpoint(half, x, use_reentrant=self.reentrant)
        return x


def checkpointed(process_group: Group, reentrant: bool, overlap: str) -> list[Tensor]:
    node = dist.get_rank(process_group)
    model = Checkpointed(node, reentrant)
    optimizer = build("decentlam", model, process_group, overlap=overlap)
    return train(optimizer, model, node, range(4), mlp_loss)


PIECE = 1000  # elements that the runtime handles at once, in place of half a million


class Large(nn.Module):
    """More elements than the runtime handles in one piece, and not a multiple of that."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Parameter(torch.randn(2 * PIECE + 3, dtype=torch.float64))
        self.second = nn.Parameter(torch.randn(402, dtype=torch.float64))


def large_loss(model: nn.Module, node: int, step: int) -> Tensor:
    return sum((p - node - 0.1 * step).square().sum() for p in model.parameters())


def large(process_group: Group, method: str, per_node: int = 1) -> list[Tensor]:
    rank = dist.get_rank(process_group)
    model = Large(seed=rank)
    options = {"bucket_bytes": 10**7, "processes_per_node": per_node}
    with unittest.mock.patch.object(bucket, "CHUNK", PIECE):
        optimizer = build(method, model, process_group, **options)
        (cut,) = cut_parameters(optimizer)
        assert cut is model.first
        return train(optimizer, model, rank, range(4), large_loss)


def cut_parameters(optimizer: decentlam.DecentralizedOptimizer) -> list[Tensor]:
    """Those that this process updates in more than one piece."""
    found = []
    for round in optimizer.runtime.rounds:
        its, shard = round.bucket, round.shard
        cuts = [shard.place.start + piece.start for _, _, piece in shard._pieces[1:]]
        found += [
            p
            for p, span in zip(its.params, its.spans, strict=True)
            if any(span.start < cut < span.stop for cut in cuts)
        ]
    return found


def no_backward_at_all(process_group: Group) -> list[Tensor]:
    """Node 1 has nothing to learn from at odd steps: its gradients are zero, or it is refused."""
    node, model, optimizer = start(process_group, "dmsgd", weight_decay=0.0)
    trajectory = []
    for step in range(6):
        optimizer.zero_grad()
        if node == 1 and step % 2:
            assert "without any gradient" in message_of(optimizer.step)
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        else:
            quadratic_loss(model, node, step).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def channels_last(process_group: Group) -> tuple[list[Tensor], bool]:
    """Convolutions, one of them frozen, in channels-last memory."""
    node = dist.get_rank(process_group)
    model = conv_model(seed=node)
    optimizer = build("decentlam", model, process_group)
    trajectory = []
    for step in range(4):
        optimizer.zero_grad()
        conv_loss(model, node, step).backward()
        optimizer.step()
        trajectory.append(trained(model))
    convs = [m for m in model if isinstance(m, nn.Conv2d)]
    kept = all(m.weight.is_contiguous(memory_format=torch.channels_last) for m in convs)
    return trajectory, kept


def conv_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 3), nn.Conv2d(3, 2, 3))
    model[2].weight.requires_grad_(False)
    return model.double().to(memory_format=torch.channels_last)


def conv_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(2, 3, 9, 9, generator=generator, dtype=torch.float64)
    return model(x.to(memory_format=torch.channels_last)).square().mean()


def compiled(process_group: Group, backend: str) -> list[Tensor]:
    node = dist.get_rank(process_group)
    model = mlp(seed=node)
    optimizer = build("decentlam", model, process_group)
    fast = torch.compile(model, backend=backend)
    trajectory = []
    for step in range(5):
        optimizer.zero_grad()
        mlp_loss(fast, node, step).backward()
        optimizer.step()
        trajectory.append(flat(model))
    return trajectory


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    ).double()


def mlp_loss(model: nn.Module, node: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * node + step)
    x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
    return (model(x) - x[:, :2]).square().mean()


class Tagger(nn.Module):
    """An LSTM whose output layer is its embedding, and a frozen layer with a low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lstm(self.embed(x))[0]
        h = self.frozen(h) + self.up(self.down(h))
        return h @ self.embed.weight.T


def habits(process_group: Group, overlap: str) -> list[Tensor]:
    """What scripts do around an optimizer, all at once: groups by decay, a schedule, moving
    averages of the model, forked workers, and copies in the midst of training."""
    node = dist.get_rank(process_group)
    model = Tagger()
    decayed = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = decentlam.DecentLaM(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        lr=0.1,
        topology="ring",
        overlap=overlap,
        process_group=process_group,
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
    ema = AveragedModel(model, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)
    swa = AveragedModel(model)
    data = torch.randint(11, (24, 5), generator=torch.Generator().manual_seed(node))
    for (x,) in DataLoader(TensorDataset(data), batch_size=4, num_workers=1):
        optimizer.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten()).backward()
        optimizer.step()
        schedule.step()
        ema.update_parameters(model)
        swa.update_parameters(model)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert torch.equal(flat(copied), flat(model))
    return [flat(model), flat(ema), flat(swa)]


def swa(process_group: Group, overlap: str) -> list[Tensor]:
    """Averages the weights of the last steps, and then takes the statistics of batch norm anew,
    in the midst of training and after it."""
    node = dist.get_rank(process_group)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()
    optimizer = build("decentlam", model, process_group, overlap=overlap)
    averaged = AveragedModel(model)
    generator = torch.Generator().manual_seed(node)
    x = torch.randn(8, 6, 4, generator=generator, dtype=torch.float64)
    for step in range(8):
        optimizer.zero_grad()
        (model(x[step]) - x[step, :, :2]).square().mean().backward()
        optimizer.step()
        if step >= 3:
            averaged.update_parameters(model)
        if step in (5, 7):
            update_bn(x, averaged)
    own = model[1].running_mean
    expected = (x @ averaged.module[0].weight.T + averaged.module[0].bias).mean((0, 1))
    assert torch.allclose(averaged.module[1].running_mean, expected.detach())
    assert not torch.allclose(own, expected.detach())  # those of training are left alone
    return [flat(model), flat(averaged), *(b.clone() for b in averaged.module.buffers())]


def twins(process_group: Group, overlap: str, how: str) -> list[list[Tensor]]:
    """A copy made right after a step, whose messages may still be under way, and its original."""
    node, model, optimizer = start(process_group, "decentlam", overlap=overlap)
    train(optimizer, model, node, range(2))
    optimizer.zero_grad()
    quadratic_loss(model, node, 2).backward()
    optimizer.step()
    both = (model, optimizer)
    twin, theirs = copy.deepcopy(both) if how == "deepcopy" else pickle.loads(pickle.dumps(both))
    return [
        train(theirs, twin, node, range(3, 6)),
        train(optimizer, model, node, range(3, 6)),
    ]

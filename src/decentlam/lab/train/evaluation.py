"""Top-1, top-5 and loss of a model on a test set, and what batch norm needs before that."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from decentlam.lab.data import Data
from decentlam.lab.train.numerics import Numerics

_VALUES = 2**23  # input values per batch: 1,000 small images, 55 of ImageNet
_ESTIMATE_BATCHES, _ESTIMATE_BATCH = 8, 256
_ESTIMATE = 4  # a stream of random numbers apart from those of shards and batches

Scores = list[float]  # summed over samples: loss, top-1 hits, top-5 hits, samples


def batch_size(data: Data) -> int:
    return max(1, min(1000, _VALUES // prod(data.shape)))


@torch.no_grad()
def score(model: nn.Module, batch: tuple[Tensor, Tensor], numerics: Numerics) -> Scores:
    """Sums over the samples of a batch; the model is left in evaluation mode."""
    model.eval()
    inputs, labels = numerics.inputs(batch[0]), batch[1].to(numerics.device)
    with numerics.autocast():
        outputs = model(inputs)
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices == labels[:, None]
    loss = F.cross_entropy(outputs.double(), labels, reduction="sum")
    return [loss.item(), best[:, 0].sum().item(), best.sum().item(), float(len(labels))]


@torch.no_grad()
def estimate_batch_norm(model: nn.Module, data: Data, numerics: Numerics, seed: int) -> None:
    """Sets batch norm's statistics to those of this model on some training samples.

    The samples are drawn from the whole training set, the same ones on every node and at every
    evaluation: all nodes get the same statistics without talking.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean over the batches
        layer.train()
    generator = torch.Generator().manual_seed(seed * 8 + _ESTIMATE)
    order = torch.randperm(len(data.labels), generator=generator)
    for indices in order[: _ESTIMATE_BATCHES * _ESTIMATE_BATCH].split(_ESTIMATE_BATCH):
        if len(indices) > 1:  # a single sample has no variance
            inputs, _ = data.train_batch(indices, generator)
            with numerics.autocast():
                model(numerics.inputs(inputs))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.eval()

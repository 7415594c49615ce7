"""The GPT: its sizes, what it may see, and that it is trained like other models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from decentlam.lab.gpt import GPT, GPTS
from decentlam.lab.models import make_model
from decentlam.lab.recipes import make
from decentlam.lab.train import train
from tests.lab.helpers import records

SIZES = {"gpt-tiny": 0.036, "gpt-small": 0.12, "gpt-medium": 0.83, "gpt-large": 9.97}  # millions


@pytest.mark.parametrize("name", GPTS)
def test_sizes(name: str) -> None:
    model = make_model(name, (1, 1, 64), 256, seed=0)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * SIZES[name], rel=0.05)


def test_no_byte_sees_what_follows() -> None:
    model = GPT(classes=11, context=6, layers=2, width=8, heads=2).double()
    tokens = torch.randint(11, (3, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (3, 11, 6)
    assert torch.equal(before[..., :4], after[..., :4])
    assert (before[..., 4:] != after[..., 4:]).any(1).all()


def test_attention_is_that_of_torch() -> None:
    block = GPT(classes=11, context=6, layers=1, width=8, heads=2).double().blocks[0]
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    q, k, v = block.qkv(block.norms[0](x)).view(3, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = x + block.attended(heads.transpose(1, 2).reshape(3, 6, 8))
    expected = y + block.narrow(F.gelu(block.wide(block.norms[1](y))))
    assert torch.allclose(block(x), expected, rtol=0, atol=1e-12)


def test_recipe_reads_any_text_and_counts_bytes(tmp_path: Path) -> None:
    for node in "ab":
        (tmp_path / f"{node}.txt").write_bytes(node.encode() * 4000)
    plan = make("gpt-small", nodes=2, batch=4, data="text", data_path=str(tmp_path), epochs=1.0)
    summary = train(plan, tmp_path / "run", simulate=True)
    assert summary.status == "finished"
    last = records(tmp_path / "run", "evaluation")[-1]
    assert last["averaged_top1"] > 0.9 and last["averaged_loss"] < 2  # from log 256 = 5.5

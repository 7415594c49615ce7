"""AWC-DmSGD's message is x itself: it is sent from where x is, and x waits until it has left."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentlam.algorithms import AWCDmSGD, Step
from decentlam.errors import NonFiniteError
from decentlam.exchange.base import Exchange, Pending
from decentlam.exchange.network import ALONE
from decentlam.runtime.bucket import build_buckets
from decentlam.runtime.round import Round
from decentlam.runtime.shard import Plan

SECONDS = timedelta(seconds=1)


class OwnMessage(Exchange):
    """The mix is the own message; it leaves when it is waited for, and is then looked at."""

    def __init__(self, only_reads: bool) -> None:
        self.only_reads = only_reads
        self.buffer = torch.empty(1, 3)
        self.sent: Tensor | None = None
        self.left: list[list[float]] = []

    def message(self, bucket: int, payloads: int) -> Tensor:
        return self.buffer

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        self.sent = message
        return Pending("", SECONDS, terms=[(1.0, message)], sends=[("node 1", self)])

    def wait(self, timeout: timedelta) -> bool:
        assert self.sent is not None
        self.left.append(self.sent[0].tolist())
        return True


def started(**options: Any) -> tuple[nn.Parameter, Round, OwnMessage, Plan]:
    p = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    group = {"params": [p], "lr": 0.5}
    plan = Plan(AWCDmSGD(beta=0.0), Step(0, 0.5))
    bucket = build_buckets([group], bucket_bytes=100)[0]
    round = Round(0, bucket, plan.algorithm, ALONE, SECONDS, **options)
    exchange = OwnMessage(only_reads=True)
    round.send_early(exchange, plan, check=True)
    return p, round, exchange, plan


@torch.no_grad()
def test_an_update_waits_until_the_message_has_left():
    p, round, exchange, plan = started()
    assert exchange.sent is not None and exchange.sent.data_ptr() == p.data_ptr()
    p.grad = torch.ones(3)
    round.complete(skip=False, step=0)
    round.send(exchange, plan, check=True, worker=None)
    assert not exchange.left
    round.update(plan)
    assert exchange.left == [[1.0, 2.0, 3.0]]  # as it was before the update
    assert p.tolist() == [0.5, 1.5, 2.5]


def test_the_message_has_left_before_parameters_are_put_aside():
    _, round, exchange, _ = started()
    round.release_x()
    assert exchange.left == [[1.0, 2.0, 3.0]]
    assert round.sent_early  # its mix is used later


def test_where_a_step_may_be_given_up_the_message_is_a_copy():
    p, round, exchange, _ = started(in_place=False)
    assert exchange.sent is exchange.buffer and exchange.sent[0].tolist() == p.tolist()
    round.release_x()
    assert not exchange.left  # nothing hinders x to change


@torch.no_grad()
def test_parameters_that_are_not_finite_are_not_sent():
    p = nn.Parameter(torch.tensor([1.0, float("inf"), 3.0]))
    bucket = build_buckets([{"params": [p], "lr": 0.5}], bucket_bytes=100)[0]
    plan = Plan(AWCDmSGD(), Step(4, 0.5))
    round, exchange = Round(0, bucket, plan.algorithm, ALONE, SECONDS), OwnMessage(only_reads=True)
    with pytest.raises(NonFiniteError, match="step 4: parameter 0 became NaN or infinite"):
        round.send_early(exchange, plan, check=True)
    assert exchange.sent is None

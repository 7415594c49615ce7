"""Bounded waiting: the message of a neighbor that is late is left out, at both ends of the edge.

An edge of a step is used if both ends say YES, and left out if one says NO. A node says YES when
all messages of the neighbor are there and the neighbor waits for an answer; NO when its patience
is over before. Who says NO goes on at once. Who says YES knows that the other one waits, so the
answer takes no longer than its way. The weight of an edge that is left out stays with the own
message at both ends: the weights remain doubly stochastic, and the average is kept.

What a node tells a neighbor is one stream of words, in this order for a step k that both take:

    DATA k     the messages of all buckets follow
    HERE k     they have left, and the node waits
    YES k      the same, and it has the neighbor's; or NO k

A node that waits for a late one will be late itself, by no fault of its own: after half its
patience it says WAIT to the others, and they allow it as much more as it has lost, up to twice.

After a NO the two send each other no more messages, so a late node is waited for once, and one
message to each neighbor is the most that is ever under way. Both go on telling where they are (AT).
At the end of its step the one that is behind says JOIN with the step after the one that the other
has begun. It skips those between (`Exchange.ahead`), and from that step on both count each other
in. A node that is then late again takes every second step only, or every fourth and so on, which it
tells beforehand, until it is there first: one that is always slow mixes at its own pace. A node
that begins no step any more says BYE and is answered; its edges are left out from then on.

A thread for each neighbor hears its stream and takes in its messages, also while the training is
late: nothing that was sent stays under way. It may touch what `_Lines` and its `_Line` have, with
the lock, and buffers that it took from `_Lines`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from functools import partial
from multiprocessing import util

import torch
from torch import Tensor

from decentlam.algorithms import Algorithm, Reach, reaches
from decentlam.exchange.base import Exchange, Pending, Work, exchange_errors
from decentlam.exchange.network import Network
from decentlam.membership.watch import troubled
from decentlam.topology import Topology

log = logging.getLogger(__name__)

WORDS_TAG = (1 << 14) - 1  # beyond the tags of buckets
_NEVER = math.inf
_FOR_EVER = timedelta(days=1000)  # gloo's own limit would close all connections
_LOOK_SECONDS = 0.1  # between two looks at whether everybody is alive
_LEAVE_SECONDS = 2.0  # for the answers to BYE
_LONGEST_STRIDE = 64
_MOST_UNHEARD = 100  # words; a process that is stopped hears none


class Word(IntEnum):
    DATA = 1
    HERE = 2
    YES = 3
    NO = 4
    AT = 5
    JOIN = 6
    BYE = 7
    WAIT = 8


class _Sent:
    """A word, and for DATA the messages after it, which gloo may still read."""

    def __init__(self, number: int, word: Tensor, work: Work, data: bool) -> None:
        self.number, self.data = number, data
        self.kept: list[tuple[Tensor, Work]] = [(word, work)]


class _Line:
    """What is known of a neighbor, and what it was told."""

    def __init__(self, node: int, rank: int) -> None:
        self.node, self.rank = node, rank
        # The step from which on the two count each other in; never, while one of them is late.
        self.first: float = 0
        self.at = -1  # the last step that it has begun
        self.done = 0  # it takes part in no step before this one any more
        self.here = self.yes = self.no = -1  # steps of its last words
        self.said_yes = -1
        self.heard = 0  # words
        self.told = 0  # words
        self.unheard: deque[_Sent] = deque()  # by it, as far as is known
        self.messages: dict[int, list[Tensor]] = {}  # that came, by step
        self.waits_in = -1  # the step in which it waits for others
        self.freed = -math.inf  # when it was known to go on
        self.said_bye = self.left = False
        self.failure: RuntimeError | None = None
        self.thread: threading.Thread | None = None

    @property
    def takes(self) -> bool:
        """Whether messages to it are still under way."""
        return any(sent.data for sent in self.unheard)


class _Lines:
    """The lines to all neighbors, and what their threads share; kept alive by those threads."""

    def __init__(self, network: Network, nodes: Sequence[int], tag: int, likes: Sequence[Tensor]):
        assert network.group is not None
        self._group, self._tag = network.group, tag
        self._likes = likes  # the messages of a step look like these
        self._free: list[list[Tensor]] = []
        self.received_bytes = 0
        self.changed = threading.Condition()
        self.begun = -1  # the last step that this node has begun
        self.done = 0
        self.by_node = {j: _Line(j, network.rank_of(j)) for j in nodes}

    def start(self) -> None:
        for line in self.by_node.values():
            line.thread = threading.Thread(
                target=self._hear, args=(line,), name=f"decentlam line {line.node}", daemon=True
            )
            line.thread.start()

    def tell(self, line: _Line, word: Word, step: int) -> _Sent:
        """With the lock."""
        said = torch.tensor([word, step, self.begun, self.done, line.heard])
        work = self._group.send([said], line.rank, self._tag + WORDS_TAG)
        line.told += 1
        line.unheard.append(_Sent(line.told, said, work, word is Word.DATA))
        return line.unheard[-1]

    def send(self, line: _Line, sent: _Sent, bucket: int, message: Tensor) -> None:
        """With the lock; the messages that belong to a DATA, in order."""
        work = self._group.send([message], line.rank, self._tag + bucket)
        sent.kept.append((message, work))

    def free(self, buffers: list[Tensor]) -> None:
        """With the lock; these messages are not needed any more."""
        self._free.append(buffers)

    # In the threads -----------------------------------------------------------------------------

    def _hear(self, line: _Line) -> None:
        try:
            while not line.left:
                heard = torch.empty(5, dtype=torch.int64)
                self._group.recv([heard], line.rank, self._tag + WORDS_TAG).wait(_FOR_EVER)
                word, step, *where = heard.tolist()
                buffers = self._take_in(line) if word == Word.DATA else None
                with self.changed:
                    self._note(line, Word(word), step, where, buffers)
                    self.changed.notify_all()
        except RuntimeError as error:
            with self.changed:
                line.failure = error
                self.changed.notify_all()

    def _take_in(self, line: _Line) -> list[Tensor]:
        with self.changed:
            buffers = self._free.pop() if self._free else None
        if buffers is None:
            buffers = [torch.empty_like(like) for like in self._likes]
            self.received_bytes += sum(buffer.nbytes for buffer in buffers)
        group, tag = self._group, self._tag
        works = [group.recv([b], line.rank, tag + bucket) for bucket, b in enumerate(buffers)]
        for work in works:
            work.wait(_FOR_EVER)
        return buffers

    def _note(
        self, line: _Line, word: Word, step: int, where: list[int], buffers: list[Tensor] | None
    ) -> None:
        line.heard += 1  # it has taken in the messages, too
        line.at, line.done, its_heard = where
        if -1 < line.waits_in < line.done:
            line.waits_in, line.freed = -1, time.monotonic()
        while line.unheard and line.unheard[0].number <= its_heard:
            for _, work in line.unheard.popleft().kept:
                work.wait(_FOR_EVER)  # it is there; gloo must know it, too
        if buffers is not None:
            for k in [k for k in line.messages if k < self.done]:
                self.free(line.messages.pop(k))
            line.messages[step] = buffers
        elif word is Word.WAIT:
            line.waits_in = step
        elif word in (Word.HERE, Word.YES):
            line.here = step
            line.yes = step if word is Word.YES else line.yes
        elif word is Word.NO:
            line.no = step
            if step >= line.first:
                line.first = _NEVER
        elif word is Word.JOIN:
            self._let_join(line, step)
        elif word is Word.BYE:
            line.left, line.first = True, _NEVER
            if not line.said_bye:
                line.said_bye = True
                self.tell(line, Word.BYE, step)

    def _let_join(self, line: _Line, step: int) -> None:
        if line.first == _NEVER and step <= self.begun:  # too late again
            self.tell(line, Word.NO, step)
        elif line.first == _NEVER or self.begun < line.first < step:
            line.first = step

    # The end ------------------------------------------------------------------------------------

    def say_bye(self) -> None:
        with self.changed:
            for line in self.by_node.values():
                if line.thread is not None and line.failure is None and not line.said_bye:
                    line.said_bye = True
                    with contextlib.suppress(RuntimeError):
                        self.tell(line, Word.BYE, self.done)

    def close(self) -> None:
        """Leaves in order, and waits for the answers: a thread must not be inside of gloo when the
        process ends."""
        self.say_bye()
        deadline = time.monotonic() + _LEAVE_SECONDS
        for line in self.by_node.values():
            if line.thread is not None:
                line.thread.join(max(0.0, deadline - time.monotonic()))


_open: weakref.WeakSet[_Lines] = weakref.WeakSet()


def _close_all() -> None:
    for lines in list(_open):
        lines.close()


class Patience(Exchange):
    """Messages to neighbors and back, as far as they come within `patience_seconds`."""

    only_reads = threaded = True

    def __init__(
        self,
        network: Network,
        topology: Topology,
        buffers: Sequence[Tensor],
        timeout: timedelta,
        tag: int,
        patience_seconds: float,
    ) -> None:
        self._network, self._topology = network, topology
        self._timeout, self._patience = timeout, patience_seconds
        self._usual = self._messages = buffers
        self._lines = _Lines(network, _partners(topology, network.node), tag, buffers)
        self._started = False
        self._taking: dict[_Line, _Sent] = {}  # who takes part in this step, as it seems so far
        self._agreed: dict[int, list[Tensor]] | None = None  # by node; None: not yet
        self._said_wait = False
        self._joins = False  # after it was late, this node is counted in again at this step
        self._first = False  # it waited for others, and nobody for it
        self._stride = 1  # which steps it takes
        self._ended = math.inf  # when the last step did
        weakref.finalize(self, self._lines.say_bye)

    def begin(self, step: int) -> None:
        lines = self._lines
        if step <= lines.begun:
            raise RuntimeError(
                f"step {step} comes after step {lines.begun}: with patience_seconds the number of "
                "a step cannot go back, since neighbors tell late messages by it. Load a state "
                "before the first step, or build the optimizer anew"
            )
        self._start()
        self._agreed, self._taking = None, {}
        neighbors = self._topology.neighbors(self._network.node, step)
        with lines.changed:
            lines.begun = lines.done = step
            self._use_free_messages()
            for line in lines.by_node.values():
                if line.left:
                    continue
                self._check(line, step)
                with self._errors(step, line):
                    self._open(line, step, line.node in neighbors)

    def _open(self, line: _Line, step: int, edge: bool) -> None:
        """What a step begins with: messages are announced, or said not to come."""
        lines = self._lines
        if line.first <= step < line.done:  # it has said that it skips this one
            line.first = line.done
        if line.first <= step:
            if edge and line.takes:  # it has not even taken in the last ones
                line.first = _NEVER
                lines.tell(line, Word.NO, step)
            elif edge:
                self._taking[line] = lines.tell(line, Word.DATA, step)
        elif len(line.unheard) < _MOST_UNHEARD:
            lines.tell(line, Word.NO if edge and line.first == _NEVER else Word.AT, step)

    def _use_free_messages(self) -> None:
        """Those that gloo may still read stay as they are."""
        taken = {t.data_ptr() for t in self._under_way()}
        for messages in (self._usual, self._messages):
            if not any(message.data_ptr() in taken for message in messages):
                self._messages = messages
                return
        self._messages = [torch.empty_like(message) for message in self._usual]

    def _under_way(self) -> list[Tensor]:
        """With the lock; the messages that neighbors have yet to take in."""
        every = [sent for line in self._lines.by_node.values() for sent in line.unheard]
        return [message for sent in every for message, _ in sent.kept[1:]]

    def message(self, bucket: int, payloads: int) -> Tensor:
        return self._messages[bucket][:payloads]

    def send(self, bucket: int, message: Tensor, step: int) -> Pending:
        for line, sent in self._taking.items():
            with self._errors(step, line), self._lines.changed:
                self._lines.send(line, sent, bucket, message)
        pending = Pending(self._network.where(step, bucket), self._timeout)
        pending.bytes_sent = message.nbytes * len(self._taking)
        pending.decode = partial(self._mix, pending, bucket, message, step)
        return pending

    def _mix(self, pending: Pending, bucket: int, message: Tensor, step: int) -> None:
        if self._agreed is None:
            self._agreed = self._agree(step)
        node = self._network.node
        row = self._topology.row(node, step)
        left_out = sum(w for j, w in row.items() if j != node and j not in self._agreed)
        pending.terms = [(row.get(node, 0.0) + left_out, message)]
        for j, weight in row.items():
            if j in self._agreed:
                pending.terms.append((weight, self._agreed[j][bucket][: len(message)]))

    def _agree(self, step: int) -> dict[int, list[Tensor]]:
        """Waits for neighbors as long as patience allows; the messages of those in time."""
        lines, agreed = self._lines, dict[int, list[Tensor]]()
        waiting = list(self._taking)
        begun = time.monotonic()
        self._said_wait = False
        self._first = all(line.here != step for line in waiting)
        with lines.changed:
            for line in waiting:
                if line.here != step:
                    with self._errors(step, line):
                        lines.tell(line, Word.HERE, step)
            while waiting:
                waited = time.monotonic() - begun
                waiting = [
                    line
                    for line in waiting
                    if not self._settle(line, step, waited > self._allowed(line), agreed)
                ]
                if waiting:
                    self._check_all(waiting, step, waited)
                    if waited > self._patience / 2 and not self._said_wait:
                        self._said_wait = True
                        self._tell_others(Word.WAIT, step)
                    lines.changed.wait(self._next_look(waiting, waited))
        return agreed

    def _allowed(self, line: _Line) -> float:
        """Seconds that a neighbor is waited for: as much more as it has lost by waiting itself."""
        if line.waits_in >= 0:
            return 2 * self._patience
        return self._patience + min(max(line.freed - self._ended, 0.0), self._patience)

    def _next_look(self, waiting: list[_Line], waited: float) -> float:
        limits = [self._patience / 2, *map(self._allowed, waiting)]
        left = [limit - waited for limit in limits if limit >= waited]
        return min([_LOOK_SECONDS, *(seconds + 1e-3 for seconds in left)])

    def _tell_others(self, word: Word, step: int) -> None:
        """Those who count this node in."""
        for line in self._lines.by_node.values():
            if line.first < _NEVER and not line.left:
                with self._errors(step, line):
                    self._lines.tell(line, word, step)

    def _settle(self, line: _Line, step: int, late: bool, agreed: dict[int, list[Tensor]]) -> bool:
        """Says what is to be said; True if it is known whether the edge is used."""
        self._check(line, step)
        tell = self._lines.tell
        with self._errors(step, line):
            if line.said_yes != step and line.here == step:
                line.said_yes = step
                tell(line, Word.YES, step)
            if line.said_yes == line.yes == step:
                agreed[line.node] = line.messages.pop(step)
                return True
            if line.done > step:  # it is ahead, and takes part from there on
                line.first = line.done if line.first <= step else line.first
                return True
            if line.left or line.no == step:
                return True
            if line.said_yes != step and late:
                tell(line, Word.NO, step)
                line.first = _NEVER
                return True
        return False

    def end(self) -> None:
        lines, step, node = self._lines, self._lines.begun, self._network.node
        agreed = self._agreed or {}
        self.left_out = tuple(j for j in self._topology.neighbors(node, step) if j not in agreed)
        self._ended = time.monotonic()
        with lines.changed:
            for buffers in agreed.values():
                lines.free(buffers)
            late = [
                line
                for line in lines.by_node.values()
                if line.first == _NEVER and line.at >= step and not line.left
            ]
            if late and self._joins:
                self._stride = min(2 * self._stride, _LONGEST_STRIDE)
            elif self._first and not self.left_out:
                self._stride = max(1, self._stride - 1)
            self._joins = bool(late) or self._stride > 1
            following = max([step, *(line.at for line in late)]) + self._stride
            self.ahead = following - step - 1
            lines.done = following
            if self.ahead or self._said_wait:  # nobody need wait for the steps between
                self._tell_others(Word.AT, step)
            for line in late:
                line.first = following
                with self._errors(step, line):
                    lines.tell(line, Word.JOIN, following)

    def close(self) -> None:
        self._lines.close()

    def memory_bytes(self) -> dict[str, int]:
        """Messages: those that took the place of some that are still under way."""
        with self._lines.changed:
            held = {t.data_ptr(): t.nbytes for t in [*self._messages, *self._under_way()]}
        usual = {t.data_ptr() for t in self._usual}
        extra = sum(size for place, size in held.items() if place not in usual)
        return {"messages": extra, "received": self._lines.received_bytes}

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self._lines.start()
            if not len(_open):  # after the group was formed: before it is left
                atexit.register(_close_all)
                util.Finalize(None, _close_all, exitpriority=10)
            _open.add(self._lines)

    def _errors(self, step: int, line: _Line) -> contextlib.AbstractContextManager[None]:
        where = f"node {self._network.node}, step {step}"
        return exchange_errors(where, f"node {line.node}", self._timeout)

    def _check(self, line: _Line, step: int) -> None:
        if line.failure is not None:
            with self._errors(step, line):
                raise RuntimeError(*line.failure.args)

    def _check_all(self, waiting: list[_Line], step: int, waited: float) -> None:
        with self._errors(step, waiting[0]):
            if troubled():
                raise RuntimeError("another process is gone")
            if waited > 2 * self._patience + self._timeout.total_seconds():
                raise RuntimeError("timed out")


def _partners(topology: Topology, node: int) -> list[int]:
    """All whom a node ever meets."""
    if topology.period is None:
        return [j for j in range(topology.num_nodes) if j != node]
    return sorted({j for k in range(topology.period) for j in topology.neighbors(node, k)})


def check_patience(algorithm: Algorithm, network: Network, topology: Topology) -> None:
    """Refuses what cannot be left out, on every node alike."""
    if network.is_nccl:
        raise ValueError("patience_seconds works with gloo on CPUs; with NCCL leave it out")
    alike = algorithm.period == 1 and algorithm.warm_up == 0
    if reaches(algorithm) != {Reach.NEIGHBORS} or not alike or not algorithm.needs_gradient:
        raise ValueError(
            f"patience_seconds is for methods that average with neighbors in every step, after the "
            f"gradient; {algorithm!r} does not. Use DecentLaM or DmSGD, or leave it out"
        )
    if not topology.symmetric:
        raise ValueError(
            "patience_seconds needs weights that are the same in both directions, so that an edge "
            f"can be left out at both ends; {topology!r} has not. Try ring, "
            "one-peer-symmetric-exponential or bipartite-random-match"
        )

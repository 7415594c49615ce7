"""The heartbeat: a process that dies, freezes or is cut off is noticed by all others, and named.

Every process writes a counter to the store a few times within `heartbeat_seconds` and reads those
of the others. Who was silent for that long is lost; on one machine the end of a process is seen at
once. The first to find out writes down who was lost, so that all name the same cause. Then every
process closes its connections: whoever waits gets its error now and not after a timeout.

    thread                may touch
    decentlam store       the store
    decentlam heartbeat   what this class keeps, and the groups that it closes
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import util
from typing import Any, TypeVar

import torch.distributed as dist

from decentlam.errors import ExchangeError
from decentlam.network import peers, waiting
from decentlam.network.beats import Interruption, declare, read_beat, read_interruption
from decentlam.network.groups import GroupStore, close_connections
from decentlam.network.peers import Peer
from decentlam.network.store import StoreCalls, StoreError, StoreGoneError, address_of

log = logging.getLogger(__name__)
T = TypeVar("T")

USUAL_SECONDS = 10.0
_BEATS = 8  # within the limit
_STORE_LIMITS = 2  # the store, which many ask, may take this many times the limit
_LONGEST_BEAT = 1.0
_MOMENT = 1 / 6  # of the limit
_GONE = 2  # answers in a row without which the store counts as gone
_READ_SECONDS = 10.0  # that the process of the store stays for others to read that it leaves
_FIRST_SECONDS = 60.0  # of a store that answers for the first time
_END_SECONDS = 3.0  # for a thread to end; one that asks a store that is frozen does not


class Heartbeat:
    """Beats for this process and watches the others. Processes have numbers that never change."""

    def __init__(self, store: dist.Store, me: int, members: Sequence[int], generation: int) -> None:
        self.me = me
        self._store = store  # which ends, if it is in this process, when nobody knows it any more
        self.calls = StoreCalls(store)
        self.limit = USUAL_SECONDS
        self._facts = peers.own_facts()
        self._count = 0
        self._looked = time.monotonic()  # when it last heard of the others
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
        self.waits_for_nccl = False  # which nobody can interrupt
        self._seen: dict[int, Peer] = {}
        self._heard: set[int] = set()  # who has beaten in this store
        self._ignored: set[str] = set()  # keys with a value that makes no sense
        self.host = 0  # whose process the store is in, perhaps
        self.moves = False  # whether the store may be exchanged for another
        self.store_error: StoreError | None = None  # why the store is of no use any more
        self._lost: dict[int, str] = {}
        self._unheard: dict[int, float] = {}  # members nobody here ever heard, since the last move
        self._concerned: set[int] = set()  # whose loss matters here; empty: everyone's
        self._lock = threading.Lock()
        self.interrupted_at = 0.0
        self._leaves = False  # this process ends in order
        self.position: Callable[[], int] = lambda: 0  # grows while this process trains
        self._meets = False  # it waits for all members to make the same call
        self._passed_at = math.inf  # when some were first seen to have gone past that call
        self._wake, self._stopped, self._closed = os.pipe(), False, False
        self.follow(members, generation)
        self.calls.call(self._beat, _FIRST_SECONDS)  # others may look for it from here on
        self._thread = threading.Thread(target=self._run, name="decentlam heartbeat", daemon=True)
        self._thread.start()

    def follow(self, members: Sequence[int], generation: int) -> None:
        """From here on these are watched, and what troubled the generation before is over."""
        with self._lock:
            self.members, self.generation = list(members), generation
            self.interruption: Interruption | None = None
            self._known = threading.Event()
            self._groups.clear()
            self._concerned.clear()
            now = time.monotonic()
            for seen in list(self._seen.values()):
                seen.since = now

    def use(
        self, calls: StoreCalls, members: Sequence[int], generation: int, host: int | None
    ) -> None:
        """Go on in another store. Members that do not come there in time are lost.

        `host`, in whose process the store before was, has been silent as long as that store, and
        gets only what is left of its limit, or a moment if nothing is.
        """
        heard = self._seen[host].since if host in self._seen else -math.inf
        self.follow(members, generation)
        with self._lock:
            self._looked = now = time.monotonic()
            if host in self._seen:
                self._seen[host].since = max(heard, now - (1 - _MOMENT) * self.limit)
            left, self.calls, self._heard = self.calls, calls, set()
            unknown = [m for m in members if m != self.me and m not in self._seen]
            self._lost, self._unheard = {}, dict.fromkeys(unknown, now)
            self.store_error = None
        left.close()  # the thread may be waiting there
        calls.call(self._beat, max(self.limit, 5.0))
        self._wake_up()

    @contextlib.contextmanager
    def meeting(self) -> Iterator[None]:
        """Inside, this process waits for all members to make the same call. It is interrupted if
        one of them has gone on to a later position: who was behind, or is new, skips calls."""
        self._passed_at, self._meets = math.inf, True
        try:
            yield
        finally:
            self._meets = False

    def concern(self, ranks: Sequence[int] | None) -> None:
        """Note whom this process trains with; None is everyone. Others may be lost silently, and
        who was lost is forgotten when the script goes on without it."""
        with self._lock:
            wanted = set(self.members if ranks is None else ranks)
            lost = set() if self.interruption is None else set(self.interruption.lost)
            if lost and not lost & wanted:
                self.interruption, self._known = None, threading.Event()
                self._groups.clear()
                self._concerned = wanted
            self._concerned |= wanted

    def guard(self, *groups: dist.ProcessGroup | None) -> None:
        """Connections of these groups are closed when somebody is lost; those of NCCL cannot be."""
        for group in groups:
            if group is not None and "gloo" in dist.get_backend_config(group):
                with self._lock:
                    self._groups.add(group)
                if self.interruption is not None:  # it came while the group was formed
                    close_connections(group)

    def group_store(self, prefix: str) -> dist.Store:
        """Return a store for torch to form the default group in; see `GroupStore`."""
        global _group_store
        _group_store = GroupStore(self)
        return dist.PrefixStore(prefix, _group_store)

    @property
    def lost(self) -> dict[int, str]:
        """Members that are gone, and how that was seen."""
        return dict(self._lost)

    @property
    def left(self) -> list[int]:
        """Members that have ended in order."""
        return [m for m in self.lost if m in self._seen and self._seen[m].beat["left"]]

    def report(self, text: str, lost: Sequence[int] = ()) -> None:
        """Tells all members that this generation cannot go on; the first report counts."""
        with contextlib.suppress(ExchangeError):
            found, generation = Interruption(text, tuple(lost)), self.generation
            self.calls.call(
                lambda store: declare(store, f"trouble/{generation}", found), self.limit
            )
        self._wake_up()

    def wait_for_cause(self, patience: float) -> Interruption | None:
        """Return why an exchange failed, or None if nobody is lost; silence takes a while."""
        if all(member == self.me for member in self.members):
            return self.interruption  # there is nobody who could be lost
        deadline = time.monotonic() + min(patience, 1.5 * self.limit + 1.0)
        while not self._known.wait(0.1) and not self.left and time.monotonic() < deadline:
            continue
        if self.left:  # perhaps because of what is about to be known here, too
            self._known.wait(1.0)
        return self.interruption

    def wait_until_all_are_seen(self, seconds: float) -> None:
        """Blocks until every member was there; an error if one of those who were is lost."""
        deadline = time.monotonic() + seconds
        while missing := [m for m in self.members if m not in self._seen and m != self.me]:
            if self._lost or self.interruption is not None:
                break
            if time.monotonic() > deadline:
                names = ", ".join(map(str, missing))
                raise ExchangeError(f"process {names} did not come within {seconds:g} s")
            self._wake_up()
            time.sleep(0.1)
        if self._lost:
            gone = "; ".join(f"{self.name(m)}: {how}" for m, how in self.lost.items())
            raise ExchangeError(f"lost before the run began: {gone}")
        if self.interruption is not None:  # the store is gone
            raise ExchangeError(f"before the run began: {self.interruption.text}")

    def name(self, member: int) -> str:
        """A process, as a user would look for it."""
        seen = self._seen.get(member)
        where = f" (pid {seen.beat['pid']} on {seen.beat['host']})" if seen is not None else ""
        return f"process {member}{where}"

    def leave(self) -> None:
        """This process ends in order: nobody should call it lost."""
        if not self._leaves:
            self._leaves = True
            with contextlib.suppress(ExchangeError):
                self.calls.call(self._beat, 1.0)
                self._let_others_read()  # meanwhile the thread sees who is lost
            self._stopped = True
            self.calls.close()
            self._wake_up()
            self._thread.join(_END_SECONDS)
            self.calls.join(_END_SECONDS)

    def _let_others_read(self) -> None:
        """The store may end with this process; before, all should know that it left in order."""
        first: dict[int, int] = {}
        deadline = time.monotonic() + min(self.limit, _READ_SECONDS)
        while self.me == self.host and time.monotonic() < deadline:
            gone = {*self._lost, *(self.interruption.lost if self.interruption else ())}
            others = [m for m, seen in list(self._seen.items()) if not (m in gone or seen.ended)]
            beats = self.calls.call(partial(self._beats, members=others), 1.0)
            behind = [
                m
                for m, beat in beats.items()
                if not beat["left"] and beat["count"] < first.setdefault(m, beat["count"]) + 2
            ]
            if not behind:
                return
            time.sleep(0.1)

    def _wake_up(self) -> None:
        with self._lock:
            if not self._closed:
                os.write(self._wake[1], b".")

    @property
    def _interval(self) -> float:
        """Seconds between two beats, at most."""
        return min(_LONGEST_BEAT, self.limit / _BEATS)

    # In the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        gone = 0
        while not self._stopped and (gone < _GONE or self.moves):
            with self._lock:
                calls, heard = self.calls, self._heard
            try:
                self._look_round(calls, heard)
                gone = 0
            except StoreGoneError as error:
                gone += 1
                self._sleep(self._interval / 2)  # or until the end of its process is seen
                host = self._seen.get(self.host)
                dead = host is not None and host.ended
                if calls is self.calls and self.host not in self.left and (dead or gone >= _GONE):
                    self.store_error = error  # its process did not end in order
                    text = f"{error}. Perhaps its process has died"
                    if dead:
                        text = f"{self.name(self.host)} died or stopped: it has ended, and {error}"
                    self._stop_waiting(Interruption(text))
            except StoreError as error:
                if calls is self.calls and not self._stopped:
                    self.store_error = error
                    text = f"{error}. Perhaps this process itself was cut off"
                    if self._host_is_stopped():
                        text = f"{self.name(self.host)} died or stopped: {error}"
                    self._stop_waiting(Interruption(text))
                time.sleep(0.0 if self._stopped else self._interval)
            except Exception:  # whatever it is, the others must go on hearing this process
                log.exception("the heartbeat could not look at the others")
                time.sleep(self._interval)
        with self._lock:
            self._closed = True
            for descriptor in self._wake:
                os.close(descriptor)
        for seen in self._seen.values():
            seen.end()

    def _look_round(self, calls: StoreCalls, heard: set[int]) -> None:
        """Beat, judge the others, and sleep."""
        exchange = partial(self._exchange, heard)
        try:
            reading = calls.call(exchange, self.limit)
        except StoreGoneError:
            raise
        except StoreError:
            if self.moves or self._host_is_stopped():  # moving too early costs one step
                raise
            reading = calls.call(exchange, (_STORE_LIMITS - 1) * self.limit)
        now = time.monotonic()
        if calls is self.calls:
            self.store_error = None
        stalled, self._looked = now - self._looked > self.limit / 2, now
        self._judge(*reading, now, stalled)
        self._tell_of_wait()
        self._sleep(self._interval)

    def _tell_of_wait(self) -> None:
        """Say for whom this process waits if it has waited for long, and what others do."""
        if (overdue := waiting.overdue()) is None:
            return
        wait, seconds = overdue
        others = [m for m in self.members if m != self.me and m in self._seen]
        mine = f"waits in {wait.what}"
        doing = {m: self._seen[m].beat["doing"] for m in others}
        said = [f"{self.name(m)} {what[:100]}" for m, what in doing.items() if what != mine]
        log.warning(
            "still waiting for %s in %s, for %.0f s: %s",
            ", ".join(dict.fromkeys(wait.whom())) or "others",
            wait.what,
            seconds,
            "; ".join(said[:8]) or "all others wait there, too",
        )

    def _host_is_stopped(self) -> bool:
        """Return True if the process that may have the store is frozen, on this machine."""
        host = self._seen.get(self.host)
        return host is not None and host.stopped

    def _sleep(self, seconds: float) -> None:
        """Sleep until the next beat, or until a process of this machine ends."""
        waited = select.poll()
        waited.register(self._wake[0], select.POLLIN)
        watched = {seen.pidfd: seen for seen in self._seen.values() if seen.pidfd is not None}
        for pidfd in watched:
            waited.register(pidfd, select.POLLIN)
        for descriptor, _ in waited.poll(1e3 * seconds):
            if descriptor == self._wake[0]:
                os.read(descriptor, 4096)
            else:
                watched[descriptor].end()

    def _beat(self, store: Any) -> None:
        self._count += 1
        at = [self.generation, self.position()]
        beat = {**self._facts, "count": self._count, "left": self._leaves, "at": at}
        beat["doing"] = waiting.doing()
        store.set(f"beat/{self.me}", json.dumps(beat))

    def _exchange(
        self, heard: set[int], store: Any
    ) -> tuple[int, dict[int, dict[str, Any]], Interruption | None]:
        """Beats, and reads the beats of the others and what troubles the generation."""
        with self._lock:
            generation, others = self.generation, [m for m in self.members if m != self.me]
        self._beat(store)
        there = [m for m in others if m in heard or store.check([f"beat/{m}"])]
        beats = self._beats(store, there)
        heard.update(beats)
        key = f"trouble/{generation}"  # after the beats: who left because of it had written it down
        interruption = None
        if store.check([key]):
            interruption = self._known_value(key, store.get(key), read_interruption)
        return generation, beats, interruption

    def _beats(self, store: Any, members: Sequence[int]) -> dict[int, dict[str, Any]]:
        keys = [f"beat/{m}" for m in members]
        values = store.multi_get(keys) if keys else []
        beats = [self._known_value(k, v, read_beat) for k, v in zip(keys, values, strict=True)]
        return {m: beat for m, beat in zip(members, beats, strict=True) if beat is not None}

    def _known_value(self, key: str, value: bytes, read: Callable[[bytes], T | None]) -> T | None:
        """One bad value must not end the watch: it counts as none at all."""
        found = read(value)
        if found is None and key not in self._ignored:
            self._ignored.add(key)
            log.error(
                "the rendezvous store has %s = %.80r, which no process of this run wrote; it is "
                "ignored. Only processes of the run should reach the store: does another run or "
                "program use its port?",
                key,
                value,
            )
        return found

    def _judge(
        self,
        generation: int,
        beats: dict[int, dict[str, Any]],
        interruption: Interruption | None,
        now: float,
        stalled: bool,
    ) -> None:
        for member, beat in beats.items():
            seen = self._seen.get(member)
            if seen is None:
                self._seen[member] = peers.meet(beat, self._facts, now)
            elif beat != seen.beat:
                seen.beat, seen.since = beat, now
            else:
                continue
            self._lost.pop(member, None)
            self._unheard.pop(member, None)
        if stalled:
            self._unheard = dict.fromkeys(self._unheard, now)
        for member, since in self._unheard.items():
            if now - since > self.limit:
                self._lost[member] = "it was never heard"
        for member in [m for m in self.members if m in self._seen]:
            seen = self._seen[member]
            if stalled:  # while this process was stopped it heard nothing
                seen.since = now
                self._lost.pop(member, None)
            how = seen.how_lost(self._facts, self.limit, now)
            if how is not None:
                self._lost[member] = how
        with self._lock:
            if generation != self.generation:
                return
            concerned = self._concerned or set(self.members)
        gone = [m for m in self.members if m in self._lost and m in concerned - set(self.left)]
        if (
            interruption is not None
            and interruption.lost
            and not concerned & set(interruption.lost)
        ):
            interruption = None  # of those who train something else
        passed = self._who_passed(generation, now)
        if interruption is None and (gone or passed):
            lines = [f"{self.name(m)} died or stopped: {self._lost[m]}" for m in gone]
            lines += [f"{self.name(m)} has gone on without this call" for m in passed]
            text = "; ".join(lines)
            interruption = found = Interruption(text, tuple(gone))
            with contextlib.suppress(ExchangeError):
                first = self.calls.call(
                    lambda store: declare(store, f"trouble/{generation}", found), 5.0
                )
                interruption = first if passed or concerned & set(first.lost) else found
        if interruption is not None and self.interruption is None:
            self._stop_waiting(interruption)

    def _who_passed(self, generation: int, now: float) -> list[int]:
        """Members that do not come to where this process waits for them, as it seems for a while:
        it may just not have seen yet that they have come and gone."""
        at = {m: self._seen[m].beat["at"] for m in self.members if m in self._seen}
        here = self.position()
        passed = [m for m, (its, there) in at.items() if its == generation and there > here]
        if not self._meets or not passed:
            return []
        self._passed_at = min(self._passed_at, now)
        return passed if now - self._passed_at > self.limit / 2 else []

    def _stop_waiting(self, interruption: Interruption) -> None:
        """Whoever waits, in whatever collective, gets its error now."""
        if self.interruption is None:
            self.interruption = interruption
            self.interrupted_at = time.monotonic()
            self._known.set()
            with self._lock:
                groups = list(self._groups)
            for group in groups:
                close_connections(group)
            if self.waits_for_nccl:  # there may be no error that could tell
                log.error(
                    "%s; who waits in NCCL goes on waiting until its timeout", interruption.text
                )


# The one of this process ------------------------------------------------------------------------

_current: Heartbeat | None = None
_watched: weakref.ref[dist.ProcessGroup] | None = None  # the default group that it is for
_group_store: dist.Store | None = None  # torch alone does not keep a store written in Python


def start(store: dist.Store, me: int, members: Sequence[int], generation: int = 0) -> Heartbeat:
    """Begins to watch; the watch before, if there was one, ends."""
    global _current
    stop()
    _current = Heartbeat(store, me, members, generation)
    # Processes that multiprocessing forks end without atexit.
    util.Finalize(None, stop, exitpriority=0)
    return _current


def of_default_group() -> Heartbeat | None:
    """The watch over torch's default group, begun if there is none. None: it has no TCPStore."""
    global _watched
    world = dist.group.WORLD
    assert world is not None
    if _current is None or _watched is None or _watched() is not world:
        store = dist.distributed_c10d._get_default_store()
        if address_of(store) is None:
            return None  # MPI, or a file that every beat would make longer
        started = start(store, dist.get_rank(), range(dist.get_world_size()))
        _watched = weakref.ref(world)
        return started
    return _current


def watches_default_group(watch: Heartbeat) -> None:
    """The watch is for the group that was just formed."""
    global _watched
    assert dist.group.WORLD is not None
    _watched = weakref.ref(dist.group.WORLD)
    watch.guard(dist.group.WORLD)


@atexit.register
def stop() -> None:
    """This process ends, or is about to watch another group."""
    global _current
    if _current is not None:
        _current.leave()
        _current = None


def use_limit(heartbeat_seconds: float) -> None:
    """Set how long a process may be silent before it counts as lost."""
    if _current is not None:
        _current.limit = heartbeat_seconds


def interrupted() -> bool:
    """Return True if somebody is known to be lost; asked by whoever waits without torch."""
    return _current is not None and _current.interruption is not None


def meeting() -> contextlib.AbstractContextManager[None]:
    """Around a wait for all members to make the same call."""
    return contextlib.nullcontext() if _current is None else _current.meeting()


def explain(peer: str, patience: float) -> str | None:
    """The first cause of a failed exchange with a peer, as far as it can be found; else None."""
    if _current is None:
        return None
    interruption = _current.wait_for_cause(patience)
    if interruption is not None:
        named = peer[0].upper() + peer[1:]
        return f"{interruption.text}. {named} may itself have been waiting for it."
    left = [_current.name(member) for member in _current.left]
    if not left:
        return None
    return (
        f"{', '.join(left)} has left: its script has ended. Either it had fewer batches (give all "
        "processes as many, or use torch.distributed.algorithms.Join), or it has not made a call "
        "that every process must make, such as averaged, merge or save_checkpoint."
    )

"""Who is left, and who has come: one decision of all members, through the store.

The members of a run are a generation. When one is lost, leaves or wants to join, the generation is
interrupted (see `network/heartbeat.py`): everyone stops waiting, completes its step alone, and says
in the store that it is ready for the next generation, and at which step. Whoever sees first that
all members are ready or lost proposes the next generation; of several proposals the store keeps the
first (`compare_set`). A process that was left out, because it was silent for too long, joins again.

    latest                 the number of the generation
    generation/<g>         its members, the step at which they begin, who gives its state to whom
    trouble/<g>            why it ended
    ready/<g>/<member>     a member of the last generation, or a newcomer, is ready for this one
    candidate/<k>          newcomers
    beat/<member>          heartbeats

    facts                  what newcomers must have alike
    joined                 how many have come

Every member has a spare store (see `spare_stores.py`). When the store is gone, each moves to the
spare of the first member that it can reach, writes down the generation it knows, and agrees there
as before. So that two parts of a run never go on at once, a generation needs half of the members of
the last one that was formed, and more than half after a move. Who has left in order does not count;
who has ended otherwise does, because it may have gone on with others before it did.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from decentlam.data import Change
from decentlam.elastic import generation as records
from decentlam.elastic import spare_stores
from decentlam.elastic.generation import Generation, are_enough
from decentlam.errors import ExchangeError, MinorityError, RunOverError
from decentlam.network import groups, heartbeat
from decentlam.network.store import StoreCalls, StoreError, address_of, ask, open_store, within

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02  # between two looks whether all are ready
_MINORITY_LIMITS = 6  # heartbeats for which a part that is too small waits for the others


class Membership:
    """This process's place in an elastic run. `enter` comes first."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_processes: int,
        timeout: float,
        wait: float,
        host: str | None = None,  # the address at which a spare store listens, if there is one
        notes: Path | None = None,
    ) -> None:
        self._store = dist.PrefixStore(spare_stores.PREFIX, store)
        self._spare = None if host is None else open_store(host)
        self._first = store  # others may be in it as long as this process lives
        self._addresses = [a for a in (address_of(store),) if a is not None]
        self._moved = False  # since the last generation was formed
        self._formed: Generation | None = None
        self._notes = notes  # where newcomers find the stores
        self.description: dict[str, str] = {}  # what newcomers must have alike
        self._timeout = timeout
        self._wait = wait  # for the last process to come, at the start
        number = within(wait, ask(partial(_new_number, self._store)), "the rendezvous store")
        self.joins = number is not None  # whether it comes into a run that is under way
        self.has_state = not self.joins  # whether its parameters are those of the run
        self.me = rank if number is None else number
        self._heartbeat = heartbeat.start(self._store, self.me, [self.me], -1)
        self._heartbeat.moves = self._spare is not None
        self.generation = Generation(-1, (self.me,), 0, self.me, (), ())
        self._optimizer: weakref.ref[Any] | None = None  # which changes the generation
        self.changed_at = (0.0, 0.0)  # when the last trouble was noticed, and when it was over
        if not self.joins:
            self._heartbeat.follow(range(num_processes), -1)

    @property
    def hosts_store(self) -> bool:
        """True if the store of the run is in this process."""
        return self._heartbeat.host == self.me

    @property
    def can_move(self) -> bool:
        """True if the run goes on when its store is gone."""
        return self._spare is not None

    @property
    def interrupted(self) -> bool:
        """True if the generation must change."""
        return self._heartbeat.interruption is not None

    @property
    def has_optimizer(self) -> bool:
        """True if an optimizer changes the generation already."""
        return self._optimizer is not None and self._optimizer() is not None

    def use_optimizer(self, optimizer: object) -> None:
        """From here on this optimizer changes the generation, as long as it lives."""
        self._optimizer = weakref.ref(optimizer)

    def use_position(self, position: Callable[[], int]) -> None:
        """From here on others can see how far this process is; see `Heartbeat.meeting`."""
        self._heartbeat.position = position

    def report(self, text: str) -> None:
        """Says that this generation cannot go on."""
        self._heartbeat.report(text)

    # Agreement ----------------------------------------------------------------------------------

    def enter(self) -> None:
        """The first generation, of all processes that were started; or the next one of a run that
        is under way."""
        if not self.joins:
            self._agree(0, {"step": 0, "whole": True, "everyone": False})
            self._form()
            return
        self._join()
        while True:
            try:
                return self._form()
            except ExchangeError as error:
                self.report(str(error))
                self._renew(0, whole=True, everyone=False)  # who never formed one does not move

    def renew(self, step: int, whole: bool, everyone: bool) -> None:
        """The next generation. `whole`: the last step of this process was mixed as it should be;
        `everyone`: it was an average over all, which must be the same on all."""
        failed_at: float | None = None
        while True:
            try:
                if failed_at is not None:
                    self._move()
                self._renew(step, whole, everyone)
                break
            except (StoreError, MinorityError) as error:
                if self._spare is None:
                    raise
                failed_at = failed_at or time.monotonic()
                waited = time.monotonic() - failed_at
                if waited > _MINORITY_LIMITS * self._heartbeat.limit:
                    text = f"process {self.me} stops after {waited:.0f} s: {error}"
                    raise MinorityError(text) from error
                log.warning("%s", error)
        self._form()

    def _renew(self, step: int, whole: bool, everyone: bool) -> None:
        if self._spare is not None and self._heartbeat.store_error is not None:
            raise self._heartbeat.store_error
        if self.me in self.generation.members:
            number = self.generation.number + 1
            self._heartbeat.report(f"process {self.me} is ready for generation {number}")
            reached = step if self.has_state else None
            self._agree(number, {"step": reached, "whole": whole, "everyone": everyone})
        if self.me not in self.generation.members:
            log.warning("process %d was given up by the others; it joins again", self.me)
            self._join()

    def _move(self) -> None:
        """Move to the store that the others are in, or will come to, if there is another."""
        spares = [address for address in self.generation.stores if address]
        used = [a for a in self._addresses if a not in spares]
        found = spare_stores.find(
            used, spares, self.generation.run, min(max(self._heartbeat.limit / 2, 1.5), 3.0)
        )
        if found is None or (found[1] == self._address and self._heartbeat.store_error is None):
            time.sleep(self._heartbeat.limit / 4)
            return
        _, address, store = found
        silent = self._host()
        inner = dist.PrefixStore(spare_stores.PREFIX, store)
        calls = StoreCalls(inner)
        try:
            calls.call(self._carry, max(self._heartbeat.limit, 5.0))
        except Exception:
            calls.close()
            raise
        self._moved, self._store = True, inner
        self._addresses = [a for a in self._addresses if a != address] + [address]
        self._heartbeat.use(calls, self.generation.members, self.generation.number, silent)
        log.warning("process %d goes on with the store at %s", self.me, address)

    def _carry(self, store: Any) -> None:
        """Writes down what this process knows of the run, and reads what is newer."""
        known = self.generation
        kept = records.read(
            store.compare_set(f"generation/{known.number}", "", known.as_json())
        )  # another one, if that of before was decided in a store that nobody else heard any more
        if self.description:
            store.set("facts", json.dumps(self.description))
        latest = int(store.get("latest")) if store.check(["latest"]) else -1
        if latest < known.number:
            store.set("latest", str(known.number))
        newest = self._newest(store)
        if newest > known.number:
            kept = records.read(store.get(f"generation/{newest}"))
        self.generation = kept

    def _newest(self, store: Any) -> int:
        """The number of the generation that was decided last in this store."""
        number = max(int(store.get("latest")), self.generation.number)
        while store.check([f"generation/{number + 1}"]):
            number += 1
        return number

    def _host(self) -> int | None:
        """Return the member whose process has the store; None if that is a process of torchrun."""
        hosts = dict(zip(self.generation.stores, self.generation.members, strict=False))
        first = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        return hosts.get(self._address, first)

    @property
    def _address(self) -> str:
        return self._addresses[-1] if self._addresses else "?"

    def _check_enough(self, here: Iterable[int], left: Iterable[int]) -> None:
        if self._spare is None or self._formed is None:
            return
        for generation in (self._formed, self.generation):
            counted = set(generation.members) - set(left)
            found = counted & set(here)
            if not are_enough(counted, found, self._moved):
                names = ", ".join(map(str, sorted(counted - found)))
                raise MinorityError(
                    f"process {self.me} has met {len(found)} of the {len(counted)} processes of "
                    f"generation {generation.number}, too few to go on: the others (process "
                    f"{names}) may be cut off and go on without them"
                )

    def _join(self) -> None:
        """Asks until a generation takes this process in."""
        self.has_state = False

        def ask(store: Any) -> tuple[int, Generation]:
            number = self._newest(store)
            store.set(f"candidate/{store.add('candidates', 1)}", str(self.me))
            return number, records.read(store.get(f"generation/{number}"))

        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            number, before = self._call(ask)
            self.generation = before
            self._heartbeat.follow([*before.members, self.me], number)
            self._ready(number + 1, {"step": None})
            self._heartbeat.report(f"process {self.me} joins")
            self._agree(number + 1, {"step": None})
            if self.me in self.generation.members:
                return
        raise ExchangeError(f"process {self.me} was not let in within {self._timeout:g} s")

    def _ready(self, number: int, report: dict[str, Any]) -> None:
        address = "" if self._spare is None else address_of(self._spare)
        text = json.dumps({**report, "store": address, "left": self._heartbeat.left})
        self._call(lambda store: store.set(f"ready/{number}/{self.me}", text))

    def _agree(self, number: int, report: dict[str, Any]) -> None:
        self._ready(number, report)
        limit = self._wait if number == 0 else self._timeout
        deadline = time.monotonic() + limit
        members = self._heartbeat.members if number == 0 else list(self.generation.members)
        while True:
            decided, ready = self._call(lambda store: self._look(store, number, members))
            if decided is not None:
                self.generation = decided
                return
            missing = [m for m in members if m not in ready and m not in self._heartbeat.lost]
            if number == 0 and self._heartbeat.lost:
                gone = ", ".join(map(self._heartbeat.name, self._heartbeat.lost))
                raise ExchangeError(f"{gone} died or stopped before the run began")
            going_on = [m for m in ready if ready[m]["step"] is not None]
            # Who has no state was not in the last one that was formed, and does not decide.
            if not missing and going_on and self.me in members and self.has_state:
                left = {m for each in ready.values() for m in each["left"]}
                self._check_enough(going_on, left.union(self._heartbeat.left))
                proposal = self._propose(number, ready)
                self._call(partial(self._decide, proposal))
                continue
            if not missing and not set(going_on) - set(self._heartbeat.lost):
                raise RunOverError(
                    f"process {self.me}: the run is over, nobody is left whose state it could take"
                )
            if time.monotonic() > deadline:
                who = ", ".join(map(self._heartbeat.name, missing))
                why = "did not come" if number == 0 else "is alive but did not end its step"
                raise ExchangeError(f"process {self.me} waited {limit:g} s for {who}, which {why}")
            time.sleep(_LOOK_SECONDS)

    def _look(
        self, store: Any, number: int, members: list[int]
    ) -> tuple[Generation | None, dict[int, dict[str, Any]]]:
        if store.check([f"generation/{number}"]):
            return records.read(store.get(f"generation/{number}")), {}
        count = store.add("candidates", 0)
        asked = [f"candidate/{k}" for k in range(1, count + 1)]
        newcomers = [
            int(store.get(key)) for key in asked if store.check([key])
        ]  # one may have died
        ready = {}
        for member in dict.fromkeys([*members, *newcomers]):
            key = f"ready/{number}/{member}"
            if store.check([key]):
                ready[member] = json.loads(store.get(key))
        return None, ready

    def _propose(self, number: int, ready: dict[int, dict[str, Any]]) -> Generation:
        """Those who are ready, in the order of their numbers. The furthest of them gives its state
        to those who have none; after an average over all, to everybody."""
        before = self.generation
        reached = {m: r["step"] for m, r in ready.items() if r["step"] is not None}
        furthest = max(reached.values())
        source = min(reached, key=lambda m: (furthest - reached[m], not ready[m]["whole"], m))
        # At the start members may not have been made equal yet.
        everyone = any(ready[m]["everyone"] for m in reached) or (number > 0 and furthest == 0)
        members = tuple(sorted(ready))
        takers = [m for m in members if m != source and (everyone or m not in reached)]
        stores = tuple(ready[m]["store"] for m in members)
        if number == 0:
            change = Change(furthest, len(members))
            first = Generation(0, members, furthest, source, tuple(takers), (change,), stores)
            return replace(first, numbers=members[-1] + 1, run=uuid.uuid4().hex)
        # Never back: whoever was further may have been lost while the generation was formed.
        step = max(before.step, furthest)
        lost = [i for i, m in enumerate(before.members) if m not in reached]
        # Whoever failed in a step may have had the messages of the one before from who was lost.
        since = max(0, min(reached.values()) - 1)
        skipped = [
            (taken, node)
            for node, m in enumerate(before.members)
            if m in reached
            for taken in range(max(before.step, reached[m]), step)
        ]
        change = Change(step, len(members), tuple(lost), since, tuple(skipped))
        return Generation(
            number,
            members,
            step,
            source,
            tuple(takers),
            (*before.history, change),
            stores,
            max(before.numbers, members[-1] + 1),
            before.run,
        )

    def _decide(self, proposal: Generation, store: Any) -> None:
        kept = store.compare_set(f"generation/{proposal.number}", "", proposal.as_json())
        if kept == proposal.as_json().encode():
            store.set("latest", str(proposal.number))

    def _call(self, request: Any) -> Any:
        return self._heartbeat.calls.call(request, max(self._heartbeat.limit, 5.0))

    def use_timeout(self, seconds: float) -> None:
        """Set the timeout of collectives that move whole models; until then they are few bytes."""
        assert dist.group.WORLD is not None
        groups.set_timeout(dist.group.WORLD, seconds)

    # Group --------------------------------------------------------------------------------------

    def _form(self) -> None:
        """torch's default group is the generation; groups of the one before are gone."""
        generation = self.generation
        noticed = self._heartbeat.interrupted_at
        self._heartbeat.follow(generation.members, generation.number)
        groups.destroy_default_group()
        # torch numbers its groups, and those that could not be formed count; all must agree.
        dist.distributed_c10d._world.group_count = 0
        wait = timedelta(seconds=2 * self._heartbeat.limit + 5.0)
        try:
            dist.init_process_group(
                "gloo",
                store=self._heartbeat.group_store(f"group {generation.number}"),
                rank=generation.members.index(self.me),
                world_size=len(generation.members),
                timeout=wait,
            )
        except RuntimeError as error:
            text = (str(error).splitlines() or [repr(error)])[0]
            raise ExchangeError(
                f"process {self.me}: generation {generation.number} could not be formed: {text}"
            ) from error
        heartbeat.watches_default_group(self._heartbeat)
        self.changed_at = (noticed, time.monotonic())
        self._formed, self._moved = generation, False
        self._heartbeat.host = self._host() or 0
        if self._notes is not None and self.me == generation.members[0]:
            self._note(self._notes)
        log.info("generation %d: processes %s", generation.number, generation.members)

    def _note(self, path: Path) -> None:
        try:
            known = [*self._addresses[-1:], *filter(None, self.generation.stores)]
            spare_stores.write_addresses(path, dict.fromkeys(known), self.generation.run)
        except OSError as error:
            log.warning("newcomers will not find the stores of the run in %s: %s", path, error)

    # What newcomers must know ---------------------------------------------------------------------

    def publish(self, key: str, value: Any) -> None:
        self._call(lambda store: store.set(key, json.dumps(value)))

    def read(self, key: str) -> Any:
        """Return what was published, once it is there."""
        deadline = time.monotonic() + self._timeout
        while not self._call(lambda store: store.check([key])):
            if self.interrupted or time.monotonic() > deadline:
                raise ExchangeError(f"process {self.me}: {key} was not published")
            time.sleep(_LOOK_SECONDS)
        return json.loads(self._call(lambda store: store.get(key)))


def _new_number(store: Any) -> int | None:
    """Return the number of a process that joins the run of a store; None if there is no run."""
    if not store.check(["latest"]):
        return None
    latest = records.read(store.get(f"generation/{int(store.get('latest'))}"))
    number: int = latest.numbers + store.add("joined", 1) - 1
    return number


_current: Membership | None = None


def begin(run: Membership) -> Membership:
    """Enters an elastic run, a new one or one that is under way."""
    global _current
    _current = run
    run.enter()
    return run


def current() -> Membership | None:
    """The elastic run that this process takes part in."""
    return _current

"""Who is left, and who has come: one decision of all members, through the store.

The members of a run are a generation. When one is lost, leaves or wants to join, the generation is
troubled (see `watch.py`): everyone stops waiting, completes its step alone, and says in the store
that it is ready for the next generation, and at which step. Whoever sees first that all members are
ready or lost proposes the next generation; of several proposals the store keeps the first
(`compare_set`). A process that was left out, because it was silent for too long, joins again.

    latest                 the number of the generation
    generation/<g>         its members, the step at which they begin, who gives its state to whom
    trouble/<g>            why it ended
    ready/<g>/<member>     a member of the last generation, or a newcomer, is ready for this one
    candidate/<k>          newcomers
    beat/<member>          heartbeats

The store must outlive every member: it belongs to the launcher or to torchrun's agent.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from decentlam.errors import ExchangeError, RunOverError
from decentlam.membership import watch

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02  # between two looks whether all are ready
_PREFIX = "decentlam elastic"


@dataclass(frozen=True)
class Change:
    """What one generation changed; all of them together say who had which samples."""

    step: int  # the first that the new members take together
    size: int  # members from then on
    lost: tuple[int, ...] = ()  # nodes of the generation before that are gone
    since: int = 0  # the first step from which on their batches are dealt again


@dataclass(frozen=True)
class Generation:
    """The members in the order of their nodes."""

    number: int
    members: tuple[int, ...]
    step: int  # the first that all take together
    source: int  # whose state is taken
    takers: tuple[int, ...]  # by whom
    history: tuple[Change, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def _read(text: bytes) -> Generation:
    found = json.loads(text)
    changes = [Change(c["step"], c["size"], tuple(c["lost"]), c["since"]) for c in found["history"]]
    return Generation(
        found["number"],
        tuple(found["members"]),
        found["step"],
        found["source"],
        tuple(found["takers"]),
        tuple(changes),
    )


class Membership:
    """This process's place in an elastic run. `enter` comes first."""

    def __init__(
        self, store: dist.Store, rank: int, num_processes: int, timeout: float, wait: float
    ) -> None:
        if not hasattr(store, "clone"):
            raise RuntimeError(f"elastic runs need torch 2.7 or newer, this is {torch.__version__}")
        self._store = dist.PrefixStore(_PREFIX, store)
        self._timeout = timeout
        self._wait = wait  # for the last process to come, at the start
        started = self._store.check(["latest"])
        self.joins = started  # whether it comes into a run that is under way
        self.has_state = not started  # whether its parameters are those of the run
        self.me = num_processes + self._store.add("joined", 1) - 1 if started else rank
        self._watch = watch.start(self._store, self.me, [self.me], -1)
        self.generation = Generation(-1, (self.me,), 0, self.me, (), ())
        self._past: list[Generation] = []
        self._optimizer: weakref.ref[Any] | None = None  # which changes the generation
        self.changed_at = (0.0, 0.0)  # when the last trouble was noticed, and when it was over
        if not started:
            self._watch.follow(range(num_processes), -1)

    @property
    def troubled(self) -> bool:
        """Whether the generation must change."""
        return self._watch.trouble is not None

    @property
    def has_optimizer(self) -> bool:
        """Whether an optimizer changes the generation already."""
        return self._optimizer is not None and self._optimizer() is not None

    def use_optimizer(self, optimizer: object) -> None:
        """From here on this optimizer changes the generation, as long as it lives."""
        self._optimizer = weakref.ref(optimizer)

    def report(self, text: str) -> None:
        """Says that this generation cannot go on."""
        self._watch.report(text)

    def generation_at(self, step: int) -> Generation:
        """The generation in which this process takes a step: who is behind is still in the last."""
        known = [g for g in self._past if self.me in g.members and g.step <= step]
        return known[-1] if known else self.generation

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
                self._renew(0, whole=True, everyone=False)

    def renew(self, step: int, whole: bool, everyone: bool) -> None:
        """The next generation. `whole`: the last step of this process was mixed as it should be;
        `everyone`: it was an average over all, which must be the same on all."""
        self._renew(step, whole, everyone)
        self._form()

    def _renew(self, step: int, whole: bool, everyone: bool) -> None:
        number = self.generation.number + 1
        self._watch.report(f"process {self.me} is ready for generation {number}")
        reached = step if self.has_state else None
        self._agree(number, {"step": reached, "whole": whole, "everyone": everyone})
        if self.me not in self.generation.members:
            log.warning("process %d was given up by the others; it joins again", self.me)
            self._join()

    def _join(self) -> None:
        """Asks until a generation takes this process in."""
        self.has_state = False

        def ask(store: Any) -> tuple[int, Generation]:
            number = max(int(store.get("latest")), self.generation.number)
            while store.check([f"generation/{number + 1}"]):
                number += 1
            store.set(f"candidate/{store.add('candidates', 1)}", str(self.me))
            return number, _read(store.get(f"generation/{number}"))

        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            number, before = self._call(ask)
            self.generation = before
            self._watch.follow([*before.members, self.me], number)
            self._ready(number + 1, {"step": None})
            self._watch.report(f"process {self.me} joins")
            self._agree(number + 1, {"step": None})
            if self.me in self.generation.members:
                return
        raise ExchangeError(f"process {self.me} was not let in within {self._timeout:g} s")

    def _ready(self, number: int, facts: dict[str, Any]) -> None:
        text = json.dumps(facts)
        self._call(lambda store: store.set(f"ready/{number}/{self.me}", text))

    def _agree(self, number: int, facts: dict[str, Any]) -> None:
        self._ready(number, facts)
        limit = self._wait if number == 0 else self._timeout
        deadline = time.monotonic() + limit
        members = self._watch.members if number == 0 else list(self.generation.members)
        while True:
            decided, ready = self._call(lambda store: self._look(store, number, members))
            if decided is not None:
                self.generation = decided
                self._past.append(decided)
                return
            missing = [m for m in members if m not in ready and m not in self._watch.lost]
            if number == 0 and self._watch.lost:
                gone = ", ".join(map(self._watch.name, self._watch.lost))
                raise ExchangeError(f"{gone} died or stopped before the run began")
            if not missing and any(each["step"] is not None for each in ready.values()):
                proposal = self._propose(number, ready)
                self._call(partial(self._decide, proposal))
                continue
            if not missing:
                raise RunOverError(
                    f"process {self.me}: the run is over, nobody is left whose state it could take"
                )
            if time.monotonic() > deadline:
                who = ", ".join(map(self._watch.name, missing))
                why = "did not come" if number == 0 else "is alive but did not end its step"
                raise ExchangeError(f"process {self.me} waited {limit:g} s for {who}, which {why}")
            time.sleep(_LOOK_SECONDS)

    def _look(
        self, store: Any, number: int, members: list[int]
    ) -> tuple[Generation | None, dict[int, dict[str, Any]]]:
        if store.check([f"generation/{number}"]):
            return _read(store.get(f"generation/{number}")), {}
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
        going_on = {m: r for m, r in ready.items() if r["step"] is not None}
        step = max(r["step"] for r in going_on.values())
        source = min(
            going_on, key=lambda m: (step - going_on[m]["step"], not going_on[m]["whole"], m)
        )
        everyone = any(r["everyone"] for r in going_on.values())
        members = tuple(sorted(ready))
        takers = [m for m in members if m != source and (everyone or m not in going_on)]
        before = self.generation
        lost = [i for i, m in enumerate(before.members) if number > 0 and m not in going_on]
        # Whoever failed in a step may have had the messages of the one before from who was lost.
        since = max(0, min(r["step"] for r in going_on.values()) - 1)
        change = Change(step, len(members), tuple(lost), since)
        history = (*before.history, change) if number > 0 else (change,)
        return Generation(number, members, step, source, tuple(takers), history)

    def _decide(self, proposal: Generation, store: Any) -> None:
        kept = store.compare_set(f"generation/{proposal.number}", "", proposal.as_json())
        if kept == proposal.as_json().encode():
            store.set("latest", str(proposal.number))

    def _call(self, request: Any) -> Any:
        return self._watch.calls.call(request, max(self._watch.limit, 5.0))

    def use_timeout(self, seconds: float) -> None:
        """Of collectives that may move whole models; until then they are few bytes."""
        assert dist.group.WORLD is not None
        watch.set_timeout(dist.group.WORLD, seconds)

    # Group --------------------------------------------------------------------------------------

    def _form(self) -> None:
        """torch's default group is the generation; groups of the one before are gone."""
        generation = self.generation
        noticed = self._watch.troubled_at
        self._watch.follow(generation.members, generation.number)
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch numbers its groups, and those that could not be formed count; all must agree.
        dist.distributed_c10d._world.group_count = 0
        wait = timedelta(seconds=2 * self._watch.limit + 5.0)
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"group {generation.number}", self._store),
                rank=generation.members.index(self.me),
                world_size=len(generation.members),
                timeout=wait,
            )
        except RuntimeError as error:
            text = (str(error).splitlines() or [repr(error)])[0]
            raise ExchangeError(
                f"process {self.me}: generation {generation.number} could not be formed: {text}"
            ) from error
        watch.watches_default_group(self._watch)
        self.changed_at = (noticed, time.monotonic())
        log.info("generation %d: processes %s", generation.number, generation.members)

    # What newcomers must know ---------------------------------------------------------------------

    def publish(self, key: str, value: Any) -> None:
        self._call(lambda store: store.set(key, json.dumps(value)))

    def read(self, key: str) -> Any:
        """What was published; waits for it."""
        deadline = time.monotonic() + self._timeout
        while not self._call(lambda store: store.check([key])):
            if self.troubled or time.monotonic() > deadline:
                raise ExchangeError(f"process {self.me}: {key} was not published")
            time.sleep(_LOOK_SECONDS)
        return json.loads(self._call(lambda store: store.get(key)))


_current: Membership | None = None


def begin(
    store: dist.Store, rank: int, num_processes: int, timeout: float, wait: float
) -> Membership:
    """Enters an elastic run, a new one or one that is under way."""
    global _current
    _current = Membership(store, rank, num_processes, timeout, wait)
    _current.enter()
    return _current


def current() -> Membership | None:
    """The elastic run that this process takes part in."""
    return _current

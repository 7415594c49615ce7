"""What an algorithm needs of the network over a whole run, from what it says of its period."""

from __future__ import annotations

from functools import cache

from decentlam.algorithms.base import Algorithm, Reach

_LOOKED_AT = 4096  # steps at which a declared period is compared with what the algorithm does


@cache
def reaches(algorithm: Algorithm) -> frozenset[Reach]:
    """Whom the algorithm ever reaches."""
    return frozenset(algorithm.reach(k) for k in _cycle(algorithm))


def always_everyone(algorithm: Algorithm) -> bool:
    """Whether every step is an exact average, so that no topology is ever used."""
    return reaches(algorithm) == {Reach.EVERYONE}


@cache
def most_payloads(algorithm: Algorithm, reach: Reach) -> int:
    """Of a message to these; 0 if it never reaches them."""
    found = [algorithm.payloads(k) for k in _cycle(algorithm) if algorithm.reach(k) is reach]
    return max(found, default=0)


@cache
def check_period(algorithm: Algorithm) -> None:
    """Refuses an algorithm whose steps are not what its period and warm-up say."""
    period, warm_up, name = algorithm.period, algorithm.warm_up, type(algorithm).__name__
    if not isinstance(period, int) or period < 1 or not isinstance(warm_up, int) or warm_up < 0:
        raise ValueError(
            f"{name}: period must be a whole number of steps from 1 and warm_up from 0, got "
            f"{period!r} and {warm_up!r}"
        )
    for what in (algorithm.reach, algorithm.payloads):
        found = [what(k) for k in range(_LOOKED_AT)]
        for k in range(warm_up + period, _LOOKED_AT):
            alike = warm_up + (k - warm_up) % period
            if found[k] != found[alike]:
                raise ValueError(
                    f"{name}: {what.__name__}({k}) is {found[k]}, but with period {period} and "
                    f"warm_up {warm_up} it should be {found[alike]} as at step {alike}; say in "
                    "`period` after how many steps reach and payloads repeat"
                )


def _cycle(algorithm: Algorithm) -> range:
    """Steps after which nothing new comes."""
    return range(algorithm.warm_up + algorithm.period)

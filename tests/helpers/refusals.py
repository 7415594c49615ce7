"""What the user may get wrong: each error names what was given and what to do instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# What is wrong, the call, the exception, and words that the message must contain.
Refusal = tuple[str, Callable[[], object], type[Exception], list[str]]


def each_refused(cases: list[Refusal]) -> pytest.MarkDecorator:
    """Parametrize a test over `call`, `kind` and `words`."""
    return pytest.mark.parametrize(
        ("call", "kind", "words"), [case[1:] for case in cases], ids=[case[0] for case in cases]
    )


def assert_refused(call: Callable[[], object], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind
    for word in words:
        assert word in str(caught.value)

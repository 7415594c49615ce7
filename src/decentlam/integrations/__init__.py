"""Thin adapters for other people's trainers; the rest of the library does not know them."""

from __future__ import annotations


def missing(extra: str, error: ImportError) -> ImportError:
    """What to raise where a framework cannot be imported."""
    return ImportError(
        f"decentlam.integrations.{extra} needs {error.name or extra}, which is not installed; "
        f"install it with `pip install decentlam[{extra}]`, or in a checkout with "
        f"`pip install '.[{extra}]'`"
    )

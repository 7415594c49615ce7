"""The valid values of options, read from the source of the tables that hold them.

The command line shows and checks them before it imports torch, which takes seconds. Every table is
a literal in the source, so its names can be read without running it, and stand nowhere else.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]


def _names(file: str, table: str) -> tuple[str, ...]:
    """Return the keys of a dict literal, or the strings of a tuple or Literal, of that name in a
    file."""
    for node in ast.parse((_PACKAGE / file).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not any(isinstance(t, ast.Name) and t.id == table for t in targets):
            continue
        value: Any = node.value  # type: ignore[attr-defined]
        value = value.slice if isinstance(value, ast.Subscript) else value
        items: list[Any] = value.keys if isinstance(value, ast.Dict) else value.elts
        return tuple(str(item.value) for item in items)
    raise LookupError(f"{file} has no table {table}")


ALGORITHMS = _names("algorithms/__init__.py", "ALGORITHMS")
TOPOLOGIES = _names("topology/__init__.py", "TOPOLOGIES")
STABLE = _names("options.py", "Stable")
MODELS = _names("lab/models.py", "MODELS")
GPTS = _names("lab/gpt.py", "GPTS")
DETECTORS = _names("lab/detection/detectors.py", "DETECTORS")
DATASETS = _names("lab/data/__init__.py", "DATASETS")
TEXTS = _names("lab/data/__init__.py", "TEXTS")
DETECTION_DATASETS = _names("lab/detection/__init__.py", "DETECTION_DATASETS")
STUDIES = _names("lab/studies/__init__.py", "STUDIES")

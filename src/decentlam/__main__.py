"""`decentlam` and `python -m decentlam`: the command line, or how to install what it needs."""

from __future__ import annotations

import importlib.util
import sys

# What the extra decentlam[lab] brings; one that is missing is named before a command has begun.
_LAB = (
    "matplotlib",
    "pycocotools",
    "scipy",
    "sklearn",
    "torchvision",
    "typer",
)


def main() -> None:
    """Run the command line."""
    missing = [name for name in _LAB if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"decentlam: the command line needs {', '.join(missing)}, which is not installed. Try: "
            'pip install "decentlam[lab]", or in a checkout: pip install ".[lab]"',
            file=sys.stderr,
        )
        raise SystemExit(2)
    from decentlam.lab.commands.app import app

    app(prog_name="decentlam")


if __name__ == "__main__":
    main()

"""`decentlam` and `python -m decentlam`: the command line, or how to install what it needs."""

from __future__ import annotations

import sys

_LAB = ("matplotlib", "rich", "typer")  # what the extra decentlam[lab] brings


def main() -> None:
    try:
        from decentlam.lab.commands.app import app
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] not in _LAB:
            raise
        print(
            f"decentlam: the command line needs {missing.name}, which is not installed. "
            'Try: pip install "decentlam[lab]"',
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app(prog_name="decentlam")


if __name__ == "__main__":
    main()

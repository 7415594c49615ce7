"""The command line in this process."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from decentlam.lab.commands.app import app

PNG = b"\x89PNG\r\n"


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), prog_name="decentlam")


def run_json(*arguments: str):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


QUICK = ("--simulate", "-n", "2", "--epochs", "0.2", "--log-every", "1")  # 2 steps of digits

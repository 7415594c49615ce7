"""What the command line prints: tables, JSON, and errors in one line."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from decentlam.lab.values import Record, explained, plain, table_text


class Commands(TyperGroup):
    """A command group that prints errors of the user in one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise
            typer.echo(f"decentlam: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None
        except (RuntimeError, MemoryError) as error:
            text = explained(error)
            if text is None:
                raise
            typer.echo(f"decentlam: {text}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("decentlam: interrupted", err=True)
            raise typer.Exit(130) from None


Nodes = Annotated[int, typer.Option("-n", "--nodes", help="Number of nodes.")]
Seed = Annotated[int, typer.Option(help="Equal seeds give equal results.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def out_option(about: str) -> Any:
    """Return the option --out of a command, as text. An empty one, which is what an unset variable
    of a shell script gives, is refused: as a path it would be the current directory."""

    def check(path: str | None) -> str | None:
        if path == "":
            raise ValueError("--out is empty; give a path, or leave it out")
        return path

    return typer.Option("--out", help=about, metavar="PATH", callback=check)


def with_fields(recipe: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add an option for each field of the recipe to a command, which gets those that were given as
    keyword arguments."""

    def command(function: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            function(**{k: v for k, v in given.items() if k not in hints or v is not None})

        hints = get_type_hints(recipe)
        own = get_type_hints(function, include_extras=True)
        parameters = [
            p.replace(kind=p.KEYWORD_ONLY, annotation=own[p.name])
            for p in inspect.signature(function).parameters.values()
            if p.kind != p.VAR_KEYWORD
        ]
        options = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_option(field, hints[field.name]),
            )
            for field in dataclasses.fields(recipe)
        ]
        run.__signature__ = inspect.Signature(parameters + options)  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return run

    return command


def _option(field: dataclasses.Field[Any], hint: Any) -> Any:
    """Return the annotation of a field's option: left out, the recipe's own value counts."""
    names = [f"--{field.name.replace('_', '-')}"]
    about, choices = field.metadata["about"], field.metadata["choices"]
    if field.name == "nodes":
        names.insert(0, "-n")
    if get_origin(hint) is tuple:
        return Annotated[list[str] | None, typer.Option(*names, metavar="NAME=VALUE", help=about)]
    if choices:
        about += f" One of {', '.join(choices)}."
    return Annotated[hint | None, typer.Option(*names, help=about, show_default=False)]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(plain(value), indent=2, allow_nan=False))


def print_table(rows: Sequence[Record]) -> None:
    typer.echo(table_text(rows), nl=False)

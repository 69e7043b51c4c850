"""The command line: one module a command, each with a function, or a program of several, of its own name.

Only the module of the command that is asked for is imported, so that `forerun --help` is quick.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from forerun.errors import ConfigError, ForerunError

EXIT_INTERRUPTED = 130

COMMANDS = {
    "serve": "Serve a model over HTTP, in OpenAI's form.",
    "generate": "Complete a prompt, here and now.",
    "demo": "Show what speculation brings, on the built-in model.",
    "plan": "Say what a server would take of memory, from config files alone.",
    "check": "Check that speculation keeps its promise, on your own models.",
    "config": "List the keys of --speculative-config, or check one.",
    "bench": "Measure a server, or what speculation brings.",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name. A user's mistake is one line on stderr and exit code 1; Ctrl-C is one
    line and 130."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(_run(words))
    except KeyboardInterrupt:
        _end_interrupted()
    except ForerunError as error:
        _fail(str(error))
    except OSError as error:  # a disk that is full, a file that is not there
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}")


def _run(words: list[str]) -> int:
    """The exit code of a command that came to its end."""
    from forerun.cli.flags import repeat_lists, usage_mistake, with_config

    if words:
        from forerun.cli.llama_cpp import translate
        from forerun.cli.speculation import join_dotted

        words = repeat_lists(join_dotted(translate(with_config(words))))
    app = build_app(words[0] if words else None)
    try:
        code = app(args=words or ["--help"], prog_name="forerun", standalone_mode=False)
    except Exception as error:
        if (mistake := usage_mistake(error, words)) is None:
            raise
        raise ConfigError(mistake) from None
    if code == EXIT_INTERRUPTED:
        _end_interrupted()
    return code if isinstance(code, int) else 0


def build_app(wanted: str | None) -> typer.Typer:
    """The program with all commands in its help, of which only `wanted` can be run."""
    app = typer.Typer(
        help="A server for large language models whose core is lossless speculative decoding.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_program)
    for name, about in COMMANDS.items():
        command = _command(name) if name == wanted else _absent
        if isinstance(command, typer.Typer):  # of several commands
            app.add_typer(command, name=name, help=about)
        else:
            app.command(name, short_help=about, help=None if name == wanted else about)(command)
    return app


def _command(name: str) -> Callable[..., Any]:
    command: Callable[..., Any] = getattr(importlib.import_module(f"forerun.cli.{name}"), name)
    return command


def _absent() -> None:
    raise AssertionError("a command that was not asked for")


def _show_version(wanted: bool) -> None:
    if wanted:
        from forerun.version import package_version

        typer.echo(f"forerun {package_version()}")
        raise typer.Exit


def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None: ...


def _end_interrupted() -> NoReturn:
    print("forerun: interrupted", file=sys.stderr)
    sys.exit(EXIT_INTERRUPTED)


def _fail(message: str) -> None:
    print(f"forerun: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)

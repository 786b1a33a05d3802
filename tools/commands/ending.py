"""How a command line ends: its exit code, one line for bad input, never a traceback for Ctrl-C."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import command as bundled
from vllm_livepatch.tools.releases.sources import SourcesError


def end_with(
    app: typer.Typer, name: str = "vllm-livepatch", bare: Sequence[str] = ("--help",), prog_name: str | None = None
) -> NoReturn:
    """Run a command line to the process's end; bad input is one line on stderr, of ``name``, and exit 2.

    ``bare`` is what it does without arguments, ``prog_name`` what its help calls it.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a letter is no reason for a traceback
        sys.stdout.reconfigure(errors="backslashreplace")
    # Rich would exit with 1 where its output is piped into head; typer has consoles of its own.
    Console.on_broken_pipe = lambda self: bundled.drop_output()  # type: ignore[method-assign]
    try:
        code = app(sys.argv[1:] or list(bare), standalone_mode=False, prog_name=prog_name)
        bundled.say("", end="")
    except (UserError, SourcesError) as error:
        _fail(name, str(error))
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):  # click's answer to head, with 1
            raise
        bundled.drop_output()
        sys.exit(0)
    except OSError as error:  # what nobody foresaw: a full disk, a directory that this user may not look into
        bundled.drop_output()
        _fail(name, bundled.named(error))
    except Exception as error:
        # click's errors, wherever this release of typer keeps its click.
        formatted = getattr(error, "format_message", None)
        if formatted is None:
            if type(error).__name__ == "Abort":  # what Ctrl-C becomes within a command
                _interrupted()
            raise
        _fail(name, formatted() or "see --help")
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def needing(extra: str, name: str) -> Iterator[None]:
    """What is imported within comes with an extra: without it, ``name`` says so in one line, and exits with 2."""
    try:
        yield
    except ImportError as error:
        why = error.__cause__ or error  # a module of ours may have said it in its own words
        _fail(name, f"more packages are needed (in the checkout: pip install '.[{extra}]'): {why}")


def _interrupted() -> NoReturn:
    """A second Ctrl-C, while the interpreter ends, ends it at once: without it, that would be a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(130)


def _fail(name: str, message: str) -> NoReturn:
    print(f"{name}: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)

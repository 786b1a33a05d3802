"""What is shown until the load of a run begins: a bar of what is built and started, in a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Stages:
    """Use as ``with Stages(total) as stages``. Shows nothing where stdout is no terminal.

    What is printed on stderr meanwhile appears above the bar, where it goes to a terminal too; a file gets it as ever.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        """``total`` is the number of steps: of calls of ``done``."""
        console = console or Console()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bar = Progress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=total)
        self._begun: dict[str, None] = {}

    def __enter__(self) -> Stages:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """All is built and started, or nothing more will be: the bar goes away. Steps after that are not shown."""
        self._bar.stop()

    def begin(self, what: str) -> None:
        """A step has begun; several may be under way."""
        self._begun[what] = None
        self._show()

    def done(self, what: str) -> None:
        """A step that had begun has ended."""
        if what in self._begun:
            del self._begun[what]
            self._bar.advance(self._task)
            self._show()

    def _show(self) -> None:
        first = next(iter(self._begun), "")
        more = f" and {len(self._begun) - 1} more" if len(self._begun) > 1 else ""
        self._bar.update(self._task, description=first + more)

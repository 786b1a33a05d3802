"""`prove` as a whole: what is asked, what is played, what is shown of it, and the exit code."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands.diagnosing import is_bundle
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle import command, verdicts
from vllm_livepatch.tools.in_bundle.naming import known
from vllm_livepatch.tools.proving import playing, proofs, proving

STYLES = {"proven": "green", "no-fault": "dim", "failed": "bold red", "not-run": "yellow"}


@dataclass(frozen=True)
class Question:
    """The command's options. Without `python` it is about the environment of `site_packages`, or this interpreter."""

    names: Sequence[str] = ()
    python: str | None = None
    site_packages: Path | None = None
    required: Sequence[str] = ()
    patch_dirs: Sequence[Path] = ()
    only: bool = False
    seconds: float = playing.SECONDS
    out: Path | None = None


@dataclass(frozen=True)
class Answer:
    packages: Mapping[str, str | None]
    outcomes: Sequence[proving.Outcome]
    asked: Sequence[str]  # patches that were named, or are required

    @property
    def code(self) -> int:
        """The exit code."""
        failed = any(one.outcome == "failed" for one in self.outcomes)
        return int(failed or any(one.name in self.asked and not one.stands for one in self.outcomes))


def run(question: Question, as_json: bool) -> int:
    """Play, show and keep what was asked for; the exit code. Raises UserError."""
    if question.out is not None:
        proofs.usable(question.out)
    entries = catalogue.load(question.patch_dirs, own=not question.only)
    names = [known(entries, name) for name in question.names]
    required = [known(entries, name) for name in question.required]
    chosen = {name: entries[name] for name in dict.fromkeys([*names, *required])} if names else entries
    diffs = {name: entry for name, entry in entries.items() if entry.patch.diff}
    looked_at = {**diffs, **chosen}
    where, tree = _where(question, sorted({one for entry in looked_at.values() for one in entry.patch.packages}))
    changes = {name: entry.changes() for name, entry in looked_at.items()}
    packages, judged = verdicts.judge([entry.patch for entry in looked_at.values()], tree, changes)
    beneath = {one.patch.name: diffs[one.patch.name] for one in judged if one.patch.diff and one.decision.apply}
    if not packages:
        wanted = sorted({entry.patch.package for entry in chosen.values()})
        raise UserError(f"{where.python} has no {' and no '.join(wanted)}: there is nothing to prove")
    found: list[proving.Outcome] = []
    try:
        with _ending():
            pairs = [(chosen[one.patch.name], one) for one in judged if one.patch.name in chosen]
            for outcome in _played(pairs, where, beneath):
                found.append(outcome)
                if not as_json:
                    _show(outcome)
    finally:
        playing.end_all()
    answer = Answer(packages, found, [*names, *required])
    described = {one.name: one.described() for one in found}
    if question.out is not None:
        proofs.write(question.out, packages, described)
    if as_json:
        listed = [{"name": name, **outcome} for name, outcome in described.items()]
        command.say(json.dumps({"packages": packages, "patches": listed}, indent=1))
    return answer.code


@contextmanager
def _ending() -> Iterator[None]:
    """Within, a signal that ends this process does so as Ctrl-C does: temporary files are removed first."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    ends = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    for one in ends:
        signal.signal(one, end)
    try:
        yield
    finally:
        for one in ends:
            signal.signal(one, signal.SIG_DFL)


def _where(question: Question, packages: Sequence[str]) -> tuple[playing.Interpreter, installed.Tree]:
    """The interpreter to play in, and what it imports from: no bundle that the caller's PYTHONPATH names."""
    directory = question.site_packages
    python = question.python or _own_interpreter(directory) or sys.executable
    if os.sep in python:  # processes are started elsewhere
        python = os.path.abspath(python)
    given = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    path = [entry for entry in given if not is_bundle(Path(entry))]
    if directory is not None:
        check.directory_tree(directory, packages)
        path.insert(0, str(directory.absolute()))
    with tempfile.TemporaryDirectory(prefix="livepatch-prove-") as empty:  # as proofs: not where the caller is
        tree = check.interpreter_tree(python, packages, path, Path(empty))
    version = re.search(r"/python(\d+\.\d+)/", f"{(directory or Path()).absolute()}/")
    running = ".".join(map(str, tree.version))
    if version and version[1] != running:
        raise UserError(f"{directory} is for Python {version[1]}, and {python} is {running}")
    if tree.unserved:
        raise UserError(tree.unserved)
    places = {package: [*tree.places(package)] for package in packages}
    return playing.Interpreter(python, path, question.seconds, places), tree


def _own_interpreter(directory: Path | None) -> str | None:
    """The interpreter of the environment whose site-packages these are; None where they are in none."""
    if directory is None:
        return None
    found = directory.absolute().joinpath("../../..").resolve() / "bin/python"
    return str(found) if found.is_file() else None


def _played(
    pairs: Sequence[tuple[catalogue.Entry, verdicts.Judged]],
    where: playing.Interpreter,
    diffs: Mapping[str, catalogue.Entry],
) -> Iterator[proving.Outcome]:
    """Each patch's outcome, in their order; as many are played at once as there are processors for."""
    outcomes = threads.each(
        lambda pair: proving.prove(*pair, functools.partial(playing.play, where=where), diffs),
        pairs,
        at_once=min(8, len(os.sched_getaffinity(0))),
    )
    columns = (SpinnerColumn(), TextColumn("{task.completed} of {task.total} patches"), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not (sys.stderr and sys.stderr.isatty())
    ) as progress:
        task = progress.add_task("", total=len(pairs))
        for outcome in outcomes:
            yield outcome
            progress.advance(task)


def _show(outcome: proving.Outcome) -> None:
    line = Text.assemble(f"{outcome.name:28}", (f"{outcome.outcome:9}", STYLES[outcome.outcome]), f" {_said(outcome)}")
    Console(soft_wrap=True, highlight=False).print(line)


def _said(outcome: proving.Outcome) -> str:
    if outcome.outcome != "not-run":
        return outcome.detail
    return f"{outcome.reason}: {outcome.detail}"

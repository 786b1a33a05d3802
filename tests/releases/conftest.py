"""What the release tests share: the bundle, the interpreter, and the table at the end of the run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
import tomli_w
from filelock import FileLock
from packaging.version import Version
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import matrix
from vllm_livepatch.tools.lab import environments

REVISION = pytest.StashKey[str]()
"""What a run by hand, whose record is kept, began with."""
CLAIMS = pytest.StashKey[list[str]]()
"""What a whole run found of the matrix's cells."""

OUTCOMES = "outcomes"
"""Name of the property in which a test leaves (release, mode, what each case came to) for the table."""


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """The interpreter that the drivers run in."""
    python: Path = interpreter.engine_python()
    return python


@pytest.fixture(scope="session")
def mooncake(engine_python: Path) -> list[Path]:
    """Mooncake's real transfer engine. It links libraries of Debian's, which are fetched as packages.

    Where it cannot be had these tests fail: a run without them would look like one with them.
    """
    return [environments.mooncake(engine_python)]


@pytest.fixture(scope="session")
def warm(engine_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[interpreter.Interpreter]:
    """Interpreters that start warm: one server for each worker of the test run."""
    opened = interpreter.Interpreter(engine_python, tmp_path_factory.mktemp("warm"))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of all patches."""
    made: Path = interpreter.made_bundle(tmp_path_factory.mktemp("bundle") / "bundle")
    return made


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--keep-record",
        action="store_true",
        help="keep what whole files, or all of them, executed, for the matrix",
    )


def pytest_configure(config: pytest.Config) -> None:
    """The workers of one run leave their record in one place."""
    if not hasattr(config, "workerinput"):
        if config.option.keep_record:
            config.stash[REVISION] = executed.revision()
        os.environ[executed.VARIABLE] = tempfile.mkdtemp(prefix="livepatch-executed-")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A whole run that passed fails where a cell of the matrix is called executed, and was not.

    With `--keep-record` a run of some files, all tests of each, adds to the record, which the next whole run holds. By
    hand, so do chosen proofs.
    """
    config = session.config
    if hasattr(config, "workerinput"):
        return
    place = Path(os.environ.pop(executed.VARIABLE))
    chosen = config.option.keyword or config.option.markexpr or any("::" in word for word in config.args)
    by_hand = executed.by_hand()
    record = executed.read(place, only_proofs=bool(chosen))
    shutil.rmtree(place)
    whole = not chosen and any(Path(word).resolve() == Path(__file__).parent for word in config.args)
    keep = config.option.keep_record and (by_hand or not chosen)
    passed = exitstatus == 0 or (by_hand and chosen)  # a chosen proof that did not pass has left nothing
    if not passed or config.option.collectonly or not (keep or (whole and not by_hand)):
        return
    entries = catalogue.load()
    ran = executed.fully(matrix.make(entry.patch for entry in entries.values()), record)
    with FileLock(f"{tempfile.gettempdir()}/livepatch-executed.lock"):
        if keep and not by_hand:
            kept = ran if whole else executed.both(matrix.executed(), ran)
            matrix.EXECUTED_FILE.write_text(executed.HEAD + tomli_w.dumps(kept), encoding="utf-8")
            matrix.executed.cache_clear()
        if keep:
            code = {name: matrix.code_of(entry.folder) for name, entry in entries.items()}
            new = ran if by_hand else {}
            runs = executed.with_runs(matrix.by_hand(), new, matrix.executed(), code, config.stash[REVISION])
            matrix.BY_HAND_FILE.write_text(executed.HEAD_BY_HAND + tomli_w.dumps(runs), encoding="utf-8")
    if whole and not by_hand:
        config.stash[CLAIMS] = executed.overclaimed(matrix.executed(), ran)
        if config.stash[CLAIMS]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    claims = config.stash.get(CLAIMS, None)
    if claims is not None:
        terminalreporter.section("cells of the matrix that are called executed, against what this run executed")
        for line in claims or ["all of them were"]:
            terminalreporter.write_line(line)
    _print_outcomes(terminalreporter)


def _print_outcomes(terminalreporter: Any) -> None:
    """Print a table: what each release's cases came to on stock, and what with the patch."""
    table: dict[str, dict[str, str]] = {}
    for result in ("passed", "failed"):
        for report in terminalreporter.getreports(result):
            recorded = dict(report.user_properties).get(OUTCOMES)
            if recorded and report.when == "call":
                release, mode, cases = recorded
                cell = _summary(cases) + ("" if result == "passed" else " (NOT AS EXPECTED)")
                table.setdefault(release, {})[mode] = cell
    if not table:
        return
    terminalreporter.section("what stale completions do to each vLLM release")
    width = max(len(cells.get("patched", "")) for cells in table.values())
    terminalreporter.write_line(f"{'release':9}{'patched':{width + 2}}stock")
    for release in sorted(table, key=Version):
        cells = table[release]
        terminalreporter.write_line(f"{release:9}{cells.get('patched', ''):{width + 2}}{cells.get('stock', '')}")


def _summary(cases: list[str]) -> str:
    """Say how many cases survive, and what the others came to."""
    counts = Counter(cases)
    survived = counts.pop("survives", 0)
    rest = ", ".join(f"{count} x {outcome}" for outcome, count in counts.most_common())
    return f"{survived} of {len(cases)} survive" + (f": {rest}" if rest else "")

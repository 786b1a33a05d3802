"""Fixtures of the unit tests, and the line that names the interpreters that this machine lacks."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from tests.unit import interpreters
from tests.unit.support import Sandbox

# The same examples in every run, and none kept on disk: a test that fails, fails for everybody.
hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=150)
hypothesis.settings.load_profile("same")


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A fake engine that no patch is for, yet."""
    return Sandbox(tmp_path / "sandbox")


@pytest.fixture
def patched(sandbox: Sandbox) -> Sandbox:
    """A fake engine, and a bundle whose one patch, `around`, marks what `Scheduler.step` returns."""
    sandbox.patch()
    sandbox.generate()
    return sandbox


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lacking = interpreters.missing((*interpreters.UNSERVED, *interpreters.SERVED))
    if lacking:
        terminalreporter.write_line(f"This machine lacks these interpreters, nothing ran in them: {', '.join(lacking)}")

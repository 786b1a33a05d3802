"""Fixtures of the unit tests, and the lines that name what this machine lacks."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
from vllm_livepatch.tools.bundles import extensions

from tests.unit import debian
from tests.unit.support import PYTHON, Ask, Cli, Sandbox, finish

# The same examples in every run, and none kept on disk: a test that fails, fails for everybody.
hypothesis.settings.register_profile("same", derandomize=True, database=None, deadline=None, max_examples=150)
hypothesis.settings.load_profile("same")

# A shell's background job ignores Ctrl-C, and so would each process that a test starts: tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # likewise under nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """The command line, of somebody who has set none of our variables."""
    for name in [name for name in os.environ if name.startswith("LIVEPATCH")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(extensions, "gathered", lambda wanted, tell: extensions.at_hand(wanted))  # asks no registry
    return Cli(monkeypatch, capfd)


@pytest.fixture(params=["the tool", "the bundle"])
def ask(request: pytest.FixtureRequest, cli: Cli, state: Path) -> Ask:
    """`status` with these options, in either way to ask. `state` is the test's own."""
    if request.param == "the tool":
        return lambda *options: cli("status", "--state-dir", str(state), *options)
    patched: Sandbox = request.getfixturevalue("patched")
    return lambda *options: finish(
        [PYTHON, patched.bundle, "status", "--state-dir", state, *options], patched.environ()
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = (
        report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()) if isinstance(report.longrepr, tuple)
    )
    without = Counter(reason.partition(debian.NOT_HERE)[2] for reason in reasons if debian.NOT_HERE in reason)
    for what, tests in sorted(without.items()):
        terminalreporter.write_line(f"This machine lacks {what}, and cannot fetch it: {tests} tests were not run")

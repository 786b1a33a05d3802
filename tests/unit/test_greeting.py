"""The one line of a process: when it is said, and what of."""

from __future__ import annotations

import subprocess
import time

import pytest
from vllm_livepatch.sitecustomize import context
from vllm_livepatch.sitecustomize.greeting import LATEST_SECONDS, QUIET_SECONDS, Greeting, Outcome
from vllm_livepatch.tools.bundles import bundle

from tests.unit import interpreters
from tests.unit.support import PATCHED, PYTHON, USE_STEP, WORK, Sandbox

ARMED = Outcome("b", "armed", False)
APPLIED = Outcome("a", "applied", False)
REFUSED = Outcome("c", "skipped", True)


class Greeted:
    """A greeting of a process with these outcomes, and the lines that were said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Outcome) -> None:
        self.lines: list[str] = []
        self.outcomes = list(outcomes)
        self.now = 100.0
        monkeypatch.setattr(context, "line", self.lines.append)
        monkeypatch.setattr(context, "before_lines", [])
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.greeting = Greeting("1.2", "1.2+sha256:abc", lambda: self.outcomes, lambda: "; a trouble")


@pytest.fixture
def greeted(monkeypatch: pytest.MonkeyPatch) -> Greeted:
    return Greeted(monkeypatch, APPLIED, ARMED, REFUSED)


def test_what_it_says(greeted: Greeted) -> None:
    greeted.greeting.say()
    assert greeted.lines == []  # no target was imported
    greeted.greeting.begin({"vllm": "0.29.0", "lmcache": None})
    greeted.greeting.say()
    greeted.greeting.say()
    (line,) = greeted.lines
    assert line.partition(", pid ")[0] == "1.2"
    assert line.endswith(
        ", vllm 0.29.0, lmcache of unknown release; applied=a armed=1 skipped=0 failed=c bundle=1.2+sha256:abc; "
        "LIVEPATCH=off turns it off; a trouble"
    )


def test_when_it_is_due(greeted: Greeted) -> None:
    assert greeted.greeting.due_in() == float("inf")
    greeted.greeting.begin({})
    assert greeted.greeting.due_in() == QUIET_SECONDS
    greeted.now += QUIET_SECONDS - 1
    greeted.greeting.wait()
    assert greeted.greeting.due_in() == QUIET_SECONDS
    greeted.outcomes = [ARMED, REFUSED]  # the first module that is a target is often not the last
    assert greeted.greeting.due_in() == LATEST_SECONDS
    greeted.now += LATEST_SECONDS
    assert greeted.greeting.due_in() == 0
    greeted.greeting.say()
    assert greeted.greeting.due_in() == float("inf")


def test_it_comes_before_all_else_that_is_logged(greeted: Greeted) -> None:
    greeted.greeting.begin({})
    greeted.greeting.behind("one")
    assert greeted.lines == []
    context.to_stderr("two")
    greeted.greeting.behind("three")
    assert [line.partition(",")[0] for line in greeted.lines] == ["1.2", "one", "two", "three"]


WAITING = "import sys\n{use}\nprint('ready', flush=True)\nsys.stdin.read()"


def test_a_process_that_lives_says_it(patched: Sandbox) -> None:
    """By itself, once it imports nothing more."""
    command = [PYTHON, "-c", WAITING.format(use=USE_STEP)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=patched.environ(), text=True, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert process.poll() is None
    digest = bundle.digest(bundle.contents(patched.entries()))
    assert f"; applied=around armed=0 skipped=0 failed=- bundle={bundle.version()}+{digest[:19]}; LIVEPATCH=off" in line
    assert process.communicate("")[1] == ""


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_process_that_forks_says_it_before(patched: Sandbox, version: str) -> None:
    code = f"import os\n{USE_STEP}\nif os.fork(): os.wait(); os._exit(0)\nelse: os._exit(0)"
    done = patched.python(code, "-u", python=str(interpreters.find(version)))
    assert (done.code, done.out, len(done.lines)) == (0, PATCHED, 1), done.err
    assert "applied=around" in done.greeting


def test_what_is_imported_later_is_in_it(sandbox: Sandbox) -> None:
    sandbox.patch()
    sandbox.patch("later", [WORK])
    sandbox.generate()
    reported = "glob.glob(os.environ['LIVEPATCH_STATE_DIR'] + '/*.json')"
    done = sandbox.python(
        f"{USE_STEP}\nimport glob, os, time\nwhile not {reported}: time.sleep(0.01)\nimport fakeengine.worker"
    )
    assert "; applied=around,later armed=0 skipped=0 failed=- " in done.greeting
    assert len(done.lines) == 1


def test_a_forked_child_begins_anew(greeted: Greeted) -> None:
    """Its parent's line is its parent's; whoever held the lock does not exist in the child."""
    greeted.greeting.begin({"vllm": "0.29.0"})
    greeted.greeting.say()
    greeted.greeting.behind("before")
    greeted.greeting._lock.acquire()
    greeted.greeting.forked_child()
    greeted.greeting.say()
    assert greeted.greeting.due_in() == float("inf")
    assert len(greeted.lines) == 2  # it has imported nothing
    greeted.greeting.behind("one")
    greeted.greeting.wait()
    assert greeted.greeting.due_in() == QUIET_SECONDS
    context.to_stderr("two")
    assert [line.partition(",")[0] for line in greeted.lines] == ["1.2", "before", "1.2", "one", "two"]
    assert ", vllm 0.29.0; " in greeted.lines[2]


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_forked_child_that_imports_a_target_says_its_own_line(sandbox: Sandbox, version: str) -> None:
    """As an engine core that is forked by an API server, which has imported little."""
    sandbox.patch()
    sandbox.patch("later", [WORK], code="def wrappers(livepatch):\n    raise ValueError('it broke')")
    sandbox.generate()
    code = """
        import multiprocessing, os, sys
        from fakeengine.scheduler import Scheduler

        def child():
            import fakeengine.worker

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        pid = os.fork()
        if not pid:
            child()
            sys.exit()
        os.waitpid(pid, 0)
        pid = os.fork()
        if not pid:  # it imports nothing
            Scheduler().step(1)
            sys.exit()
        os.waitpid(pid, 0)
        """
    done = sandbox.python(code, python=str(interpreters.find(version)))
    assert done.code == 0
    said = [line.partition("; ")[2].partition(" bundle")[0] for line in done.lines if "LIVEPATCH=off" in line]
    assert said == [
        "applied=around armed=1 skipped=0 failed=-",
        *["applied=around armed=0 skipped=0 failed=later"] * 2,
    ]
    assert len({line.partition("pid ")[2].partition(",")[0] for line in done.lines if "pid " in line}) == 3
    assert [line for line in done.lines if "later is not applied (raised): " in line] == done.lines[2::2]

"""A state directory whose file system never answers: imports, forks, the engine and the exit go on."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import cache
from vllm_livepatch.tools.in_bundle import status

from tests.unit import debian, interpreters
from tests.unit.support import PATCHED, PYTHON, USE_STEP, Sandbox, finish

# Stands in for os.open on a hung NFS mount: it never comes back for what is below the state directory.
BLOCKS = """
import os, threading
real = os.open
def stuck(path, *args, **options):
    if str(path).startswith(os.environ["LIVEPATCH_STATE_DIR"]):
        threading.Event().wait()
    return real(path, *args, **options)
os.open = stuck
"""
USE = f"import os\n{USE_STEP}\nimport sys; sys.stdout.flush()\npid = os.fork()\nif not pid: os._exit(Scheduler().step(4)[-1])\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), Scheduler().step(8))"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """A real file system that never answers: FUSE, of which nobody reads the requests."""
    place = tmp_path / "hung"
    place.mkdir()
    library = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        debian.lack(f"FUSE ({error.strerror})")
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if library.mount(b"hung", os.fsencode(place), b"fuse", 0, options.encode()):
        os.close(device)
        debian.lack(f"FUSE ({os.strerror(ctypes.get_errno())})")
    try:
        yield place
    finally:
        library.umount2(os.fsencode(place), 2)
        os.close(device)


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_stand_in_for_a_hung_directory(patched: Sandbox, version: str) -> None:
    patched.write({"sitecustomize.py": BLOCKS})
    done = patched.python(USE, python=str(interpreters.find(version)))
    assert (done.code, done.out) == (0, f"{PATCHED}4 ['patched', 8]\n"), done.err
    assert f"; no report yet in {patched.state}" in done.lines[0]


def test_a_file_system_that_never_answers(patched: Sandbox, hung: Path) -> None:
    done = patched.python(USE, LIVEPATCH_STATE_DIR=str(hung / "state"))
    assert (done.code, done.out) == (0, f"{PATCHED}4 ['patched', 8]\n"), done.err
    assert f"; no report yet in {hung}" in done.lines[0]


def test_a_process_of_another_pid_namespace_is_never_called_ended(patched: Sandbox) -> None:
    """Nor is its report removed; on the host's network its host has our name."""
    patched.python(USE_STEP)
    (file,) = patched.state.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    content = json.loads(file.read_text("ascii"))
    for other in ("pid:[1] another", None):
        file.write_text(json.dumps(content | {"pid_namespace": other}), "ascii")
        found = status.read(patched.state)
        assert [(one["pid_namespace"], one["heartbeat"]) for one in found.live] == [(other, content["heartbeat"])]
        assert (found.seen, status.prune(found)) == ([False], [])
        assert file.exists()
    file.write_text(json.dumps(content), "ascii")
    found = status.read(patched.state)
    assert (found.live, status.prune(found)) == ([], [content["pid"]])


def test_planted_links_and_pipes_are_not_followed(patched: Sandbox) -> None:
    patched.python(USE_STEP)
    (file,) = patched.state.iterdir()
    file.rename(patched.root / "real.json")
    file.symlink_to(patched.root / "real.json")
    os.mkfifo(patched.state / "pipe.json")
    before = (patched.root / "real.json").read_bytes()
    patched.python(USE_STEP)
    assert status.processes(patched.state) == []
    assert (patched.root / "real.json").read_bytes() == before
    assert file.is_symlink()


def test_a_report_has_no_secret(patched: Sandbox) -> None:
    command = [PYTHON, "-c", USE_STEP, "--api-key", "hush", "hush2", "--port", "80"]
    assert finish(command, patched.environ()).out == PATCHED
    assert "hush" not in next(patched.state.iterdir()).read_text("ascii")
    assert patched.report()["argv"][-5:] == ["--api-key", "***", "***", "--port", "80"]


CACHE = """
import os, threading
real = os.lstat, os.mkdir, os.stat, os.open
def stuck(function):
    def call(path, *args, **options):
        if str(path).startswith(os.environ["XDG_CACHE_HOME"]):
            threading.Event().wait()
        return function(path, *args, **options)
    return call
os.lstat, os.mkdir, os.stat, os.open = map(stuck, real)
"""


@pytest.mark.parametrize("real", [True, False])
def test_a_cache_that_never_answers(patched: Sandbox, request: pytest.FixtureRequest, real: bool) -> None:
    """The one wait for it is bounded, whether it hangs before the first look or later."""
    if not real:
        patched.write({"sitecustomize.py": CACHE})
    place = request.getfixturevalue("hung") if real else patched.root
    done = patched.python(USE, XDG_CACHE_HOME=str(place / "cache"))
    assert (done.code, done.out) == (0, f"{PATCHED}4 ['patched', 8]\n"), done.err
    assert len(done.lines) == 1


def test_a_cache_that_hangs_once_it_was_found(patched: Sandbox) -> None:
    late = CACHE.replace('["XDG_CACHE_HOME"]', '["XDG_CACHE_HOME"] + "/vllm-livepatch/"')
    patched.write({"sitecustomize.py": late})
    done = patched.python(USE, XDG_CACHE_HOME=str(patched.root / "cache"))
    assert (done.code, done.out) == (0, f"{PATCHED}4 ['patched', 8]\n"), done.err
    assert len(done.lines) == 1


def test_a_cache_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(cache, "_silent", [])
    answers = threading.Event()
    assert cache.in_time(answers.wait) is None
    assert cache.in_time(os.getpid) is None, "asked again"
    answers.set()

"""Where a process may run: read-only, without a home, as nobody, in any locale, below any path."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import debian
from tests.unit.support import PATCHED, PYTHON, STOCK, USE_STEP, WORK, Done, Sandbox, finish

NOBODY = 65534
SET_USER = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


@functools.cache
def as_nobody() -> list[str]:
    """What makes a command run as somebody who owns nothing here; nothing where these tests run as such a one.

    An interpreter below somebody's home may be out of reach then: the right to read everything, and no other, helps.
    """
    if os.getuid() != 0:
        return []
    reader = [*SET_USER, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    for command in ([*SET_USER, "--inh-caps=-all"], reader):
        if subprocess.run([*command, PYTHON, "-c", "pass"], capture_output=True).returncode == 0:
            return command
    raise AssertionError(f"neither setpriv alone nor with the right to read can run {PYTHON} as nobody")


def as_owner_without_powers() -> list[str]:
    """Root without its power to write where the mode forbids it."""
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.getuid() == 0 else []


@pytest.fixture
def open_sandbox() -> Iterator[Sandbox]:
    """A sandbox that everybody can read, as the directories of pytest are not."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        sandbox = Sandbox(Path(place) / "sandbox")
        sandbox.patch()
        sandbox.generate()
        yield sandbox


@contextlib.contextmanager
def read_only(*places: Path) -> Iterator[None]:
    folders = [folder for place in places for folder in (place, *place.rglob("*")) if folder.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        yield
    finally:
        for folder in folders:
            folder.chmod(0o755)


def applied(sandbox: Sandbox, done: Done) -> None:
    assert (done.code, done.out) == (0, PATCHED), done.err
    assert len(done.lines) == 1, done.err
    assert "no report" not in done.err


def contents(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


def test_everything_read_only_but_the_state_directory(patched: Sandbox) -> None:
    """Bundle, engine and home: nothing is written, and nothing is said."""
    patched.state.mkdir()
    before = contents(patched.root)
    with read_only(patched.bundle, patched.site, patched.home):
        done = finish([*as_owner_without_powers(), PYTHON, "-c", USE_STEP], patched.environ())
    applied(patched, done)
    assert patched.reported()["state"] == "applied"
    assert [path for path in contents(patched.root) if not path.startswith("state/")] == before


def test_a_state_directory_that_cannot_be_written_is_reported_and_no_more(patched: Sandbox) -> None:
    patched.state.mkdir()
    with read_only(patched.state):
        done = finish([*as_owner_without_powers(), PYTHON, "-c", USE_STEP], patched.environ())
    assert (done.code, done.out) == (0, PATCHED)
    (line,) = done.lines
    assert f"; no report in {patched.state}: Permission denied" in line


def test_nothing_is_written_beside_the_engine(patched: Sandbox) -> None:
    before = contents(patched.site)
    patched.python(USE_STEP, PYTHONDONTWRITEBYTECODE="1")
    assert contents(patched.site) == before


def test_an_unprivileged_user(open_sandbox: Sandbox) -> None:
    """Who owns nothing here, has no home, and nothing to write to but the system's temporary directory."""
    environ = open_sandbox.environ(HOME="/nonexistent")
    del environ["LIVEPATCH_STATE_DIR"]
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o1777)
        code = f"import os\n{USE_STEP}\nprint(os.getuid(), os.access({str(open_sandbox.bundle)!r}, os.W_OK))"
        done = finish([*as_nobody(), PYTHON, "-c", code], {**environ, "TMPDIR": temporary})
        uid = NOBODY if os.getuid() == 0 else os.getuid()
        assert (done.code, done.out.splitlines()[0]) == (0, PATCHED.strip()), done.err
        assert done.out.splitlines()[1].split()[0] == str(uid)
        assert len(done.lines) == 1
        (state,) = Path(temporary).glob("vllm-livepatch-*[0-9]")
        assert state.name == f"vllm-livepatch-{uid}"
        assert state.stat().st_mode & 0o777 == 0o700
        assert state.stat().st_uid == uid
        assert len(list(state.iterdir())) == 1


def test_somebody_elses_directory_of_our_name_is_not_used(open_sandbox: Sandbox) -> None:
    """Only root can make one for a test; anybody else stands in for it with a link, as in test_report."""
    uid = NOBODY if os.getuid() == 0 else os.getuid()
    environ = open_sandbox.environ()
    del environ["LIVEPATCH_STATE_DIR"]
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o1777)
        taken = Path(temporary, f"vllm-livepatch-{uid}")
        if os.getuid() == 0:
            taken.mkdir()
            taken.chmod(0o777)
        else:
            taken.symlink_to(open_sandbox.home)
        done = finish([*as_nobody(), PYTHON, "-c", USE_STEP], {**environ, "TMPDIR": temporary})
        assert done.out == PATCHED
        (line,) = done.lines
        assert f"; no report in {taken}: it belongs to somebody else" in line
        assert list(taken.iterdir()) == []


@pytest.mark.parametrize("more", [{"HOME": "/nonexistent/home"}, {"HOME": ""}, None], ids=["absent", "empty", "unset"])
def test_no_home(patched: Sandbox, more: dict[str, str] | None) -> None:
    environ = patched.environ(**(more or {}))
    if more is None:
        del environ["HOME"]
    applied(patched, finish([PYTHON, "-c", USE_STEP], environ, cwd=patched.root))
    assert contents(patched.home) == []


def test_an_empty_environment(patched: Sandbox) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        environ = {"PYTHONPATH": patched.environ()["PYTHONPATH"], "TMPDIR": temporary}
        applied(patched, finish([PYTHON, "-c", USE_STEP], environ))


PATHS = ["with spaces", "mit Umläuten und 漢字", 'quote\'s "and" $dollar %percent', "new\nline", "tab\tand\\backslash"]


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
@pytest.mark.parametrize("name", PATHS)
def test_paths_that_people_have(patched: Sandbox, name: str, locale: str) -> None:
    """The bundle's, the engine's and the state directory's; and the report can say where the bundle is."""
    place = patched.root / name
    place.mkdir()
    for part in ("bundle", "site"):
        shutil.copytree(getattr(patched, part), place / part)
    state = place / "state"
    path = [place / "bundle", place / "site"]
    done = patched.python(USE_STEP, path=path, LC_ALL=locale, LIVEPATCH_STATE_DIR=str(state))
    applied(patched, done)
    patched.state = state
    assert os.fsencode(patched.report()["bundle"]) == os.fsencode(place / "bundle")


@pytest.mark.parametrize(
    "more",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "no_SUCH.locale"},
    ],
    ids=["C", "C, no UTF-8", "POSIX, ascii", "unknown"],
)
def test_the_c_locale(patched: Sandbox, more: dict[str, str]) -> None:
    """The engine's source has letters beyond ASCII, and so has what is to be said."""
    for name in ("scheduler", "worker"):
        file = patched.site / f"fakeengine/{name}.py"
        file.write_text("# für alle: 漢字\n" + file.read_text("utf-8"), "utf-8")
    patched.patch("words", [WORK], "def wrappers(livepatch):\n    raise RuntimeError('für: 漢字')")
    patched.generate()
    done = patched.python(f"{USE_STEP}\nimport fakeengine.worker", **more)
    assert (done.code, done.out) == (0, PATCHED)
    assert len(done.lines) == 2
    assert "RuntimeError while applying: f" in done.lines[1]


@pytest.mark.parametrize(
    "flags", [["-I"], ["-E"], ["-S"], ["-P"], ["-s"], ["-B"], ["-O"], ["-q"], ["-u"], ["-X", "utf8"]]
)
def test_flags(patched: Sandbox, flags: list[str]) -> None:
    """Flags that shut PYTHONPATH or site out shut us out, without a trace; the others change nothing."""
    setup = f"import sys\nsys.path.append({str(patched.site)!r})\n"
    bare, armed = patched.bare(f"{setup}{USE_STEP}", *flags), patched.python(f"{setup}{USE_STEP}", *flags)
    served = flags[0] not in ("-I", "-E", "-S")
    assert bare.out == (STOCK if bare.code == 0 else "")
    assert (armed.code, armed.out) == (bare.code, PATCHED if served and bare.code == 0 else bare.out)
    assert len(armed.lines) == (1 if served and bare.code == 0 else len(bare.lines))


COMMANDS = {
    "venv": ["-m", "venv", "--without-pip", "made"],
    "pip": ["-m", "pip", "--version"],
    "pip list": ["-m", "pip", "--disable-pip-version-check", "list"],
    "compileall": ["-m", "compileall", "-q", "-f", "."],
    "json.tool": ["-m", "json.tool", "--help"],
    "a missing module": ["-m", "no_such_module"],
    "a script": ["script.py", "word"],
    "a missing script": ["no_such_script.py"],
    "a script that fails": ["failing.py"],
    "site": [
        "-c",
        "import sys, site; print([part for part in sys.path if 'bundle' not in part], site.ENABLE_USER_SITE)",
    ],
    "version": ["-VV"],
    "help": ["-h"],
    "uv's probe": ["-I", "-B", "-c", "import sys, json; print(json.dumps([sys.prefix, sys.version_info[:]]))"],
}


@pytest.mark.parametrize("what", list(COMMANDS))
def test_ordinary_commands(patched: Sandbox, what: str) -> None:
    """Exit code, stdout, stderr and what is written are those of a process without the bundle."""
    found = []
    for path in ([patched.site], [patched.bundle, patched.site]):
        place = patched.root / "work"
        place.mkdir()
        patched.write(
            {
                "script.py": "import sys; print(sys.argv, sys.orig_argv[1:], __name__, sys.path[0])",
                "failing.py": "def f():\n    return 1 / 0\nf()\n",
            },
            place,
        )
        done = finish([PYTHON, *COMMANDS[what]], patched.environ(path=path), cwd=place)
        found.append((done, contents(place)))
        shutil.rmtree(place)
    bare, armed = found
    assert armed == bare
    assert not patched.state.exists()
    assert contents(patched.home) == []


def test_in_a_virtual_environment(patched: Sandbox) -> None:
    place = patched.root / "venv"
    assert finish([PYTHON, "-m", "venv", "--without-pip", str(place)], patched.environ()).code == 0
    applied(patched, patched.python(USE_STEP, python=str(place / "bin" / "python")))


def test_multiprocessing_without_a_target_is_as_ever(patched: Sandbox) -> None:
    script = patched.write(
        {
            "pool.py": """\
                import multiprocessing, sys
                def work(number): return number * 2, "sitecustomize" in sys.modules and "wrapt" in sys.modules
                if __name__ == "__main__":
                    for method in ("spawn", "fork", "forkserver"):
                        with multiprocessing.get_context(method).Pool(2) as pool:
                            print(method, pool.map(work, range(3)))
                """
        },
        patched.root / "work",
    )
    command = [PYTHON, str(script / "pool.py")]
    bare, armed = (finish(command, patched.environ(path=path)) for path in ([], [patched.bundle]))
    assert armed == bare
    assert bare.out.count("[(0, False), (2, False), (4, False)]") == 3, bare.err
    assert not patched.state.exists()


def nothing_writable(sandbox: Sandbox, *command: str | Path, **more: str) -> Done:
    """A process in a namespace in which every file system is read-only, its pseudo ones too."""
    mounts = "awk '{print $5}' /proc/self/mountinfo | sort -r | while read m; do mount -o remount,ro,bind $m; done"
    enter = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), "--mount", "sh", "-c"]
    script = f'{mounts} 2>/dev/null; touch {sandbox.root}/x 2>/dev/null && exit 99; cd /; exec "$@"'
    environ = {**sandbox.environ(**more), "LIVEPATCH_STATE_DIR": ""}
    done = finish([*enter, script, "sh", *command], environ)
    if done.code == 99 or "unshare" in done.err:
        debian.lack("the right to mount")
    return done


def test_where_nothing_can_be_written(patched: Sandbox) -> None:
    """Each answer is right, and plain: patched all the same, no report, and nowhere a traceback."""
    place = Path(tempfile.gettempdir(), f"vllm-livepatch-{os.getuid()}")
    done = nothing_writable(patched, PYTHON, "-c", USE_STEP)
    assert (done.code, done.out, len(done.lines)) == (0, PATCHED, 1), done.err
    assert f"; no report in {place}: Read-only file system" in done.greeting
    done = nothing_writable(patched, PYTHON, patched.bundle, "doctor")
    assert (done.code, done.err) == (0, "")
    (state,) = (line for line in done.out.splitlines() if " state directory: " in line)
    assert state.startswith(f"warning  state directory: no report can be left in {place}: ")
    assert state.endswith(" cannot be written to")
    tool = str(Path(sys.executable).with_name("vllm-livepatch"))
    for command in ([PYTHON, str(patched.bundle)], [tool]):
        done = nothing_writable(patched, *command, "status", "--json")
        assert (done.code, done.err) == (0, ""), command
        assert isinstance(json.loads(done.out), list)


def test_run_where_nothing_can_be_written(patched: Sandbox) -> None:
    """It uses the bundle that it wrote earlier, or says what to do."""
    tool = str(Path(sys.executable).with_name("vllm-livepatch"))
    run = [tool, "run", "--patch-dir", str(patched.patches), "--patch", "around", "--", PYTHON, "-c", USE_STEP]
    done = nothing_writable(patched, *run, PYTHONPATH=str(patched.site))
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert done.err.startswith("vllm-livepatch: there is no place for the bundle: ")
    assert finish(run, patched.environ(path=[patched.site])).out == PATCHED
    assert nothing_writable(patched, *run, PYTHONPATH=str(patched.site)).out == PATCHED

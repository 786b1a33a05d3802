"""The command line itself: how it is called, what it says while it waits and how it is ended."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import decision, installed
from vllm_livepatch.tools import threads
from vllm_livepatch.tools.bundles import bundle, catalogue
from vllm_livepatch.tools.compatibility import pairs
from vllm_livepatch.tools.compatibility.cross_package import Problem
from vllm_livepatch.tools.lab import options, printing
from vllm_livepatch.tools.releases import published, registry

from tests.unit.support import DEADLINE, Cli, Sandbox, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The environment's index, which takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://user:secret@127.0.0.1:{server.getsockname()[1]}/simple/")
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        yield server


@pytest.mark.parametrize("module", ["vllm_livepatch", "vllm_livepatch.tools.cli"])
def test_python_m(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"vllm-livepatch {bundle.version()}\n", "")


def test_the_command_starts_the_same() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("vllm-livepatch"), "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"vllm-livepatch {bundle.version()}\n")


@pytest.mark.parametrize("command", [[], ["check"], ["lab"], ["run"]])
def test_h_is_help(cli: Cli, command: list[str]) -> None:
    short, long = cli(*command, "-h"), cli(*command, "--help")
    assert (short.code, short.out) == (0, long.out)
    assert "Usage: vllm-livepatch" in short.out


def test_a_shell_completes_commands_and_names(cli: Cli) -> None:
    def completed(words: str) -> str:
        asked = {"_VLLM_LIVEPATCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        return cli.process(environ={**os.environ, **asked}).out

    assert completed("vllm-livepatch ver").split() == ["verify"]
    assert completed("vllm-livepatch show kv_bl").split() == ["kv_block_reaper"]
    assert completed("vllm-livepatch generate --patch stale").split() == ["stale-finished-recving"]


# Names


def test_names_with_underscores(sandbox: Sandbox, cli: Cli) -> None:
    out = sandbox.root / "new"
    assert cli("show", "kv_block_reaper").out == cli("show", "kv-block-reaper").out
    assert "(kv-block-reaper)" in cli("generate", "--out", str(out), "--patch", "kv_block_reaper").out
    assert cli("run", "--patch", "kv_block_reaper", "--patch", "no_such", "--", "true").err.count("no_such") == 1


def test_a_mistyped_name(cli: Cli) -> None:
    assert cli("show", "kv_blok_reaper").lines == [
        "vllm-livepatch: no patch is called kv_blok_reaper; did you mean kv-block-reaper?"
    ]
    assert cli("show", "Failed-Loads").lines[0].endswith("did you mean failed-loads?")


@pytest.mark.parametrize("name", list(catalogue.load()))
def test_no_variable_is_folded_at_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    patch = catalogue.load()[name].patch
    variables = {decision.variable(name)} | {decision.variable(name, option.name) for option in patch.options}
    monkeypatch.setenv("COLUMNS", "80")
    output = cli("show", name).out
    assert variables <= set(re.findall(r"\bLIVEPATCH_[A-Z0-9_]+\b", output))
    assert max(map(len, output.splitlines())) <= 80


def test_nor_in_what_check_says(sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "a-patch-with-the-longest-of-names-in-the-world"
    sandbox.patch(name, auto="off")
    arguments = ["check", "--site-packages", str(sandbox.site), "--patch-dir", str(sandbox.patches)]
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        output = cli(*arguments, "--verbose").out
        assert f"{decision.variable(name)}=on" in output, columns
    assert re.search(rf"{name} +needed +no +off by default, {decision.variable(name)}=on", output)


# check


def test_check_of_a_place_that_has_nothing(sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "tree", lambda *_: installed.Tree([]))  # what drifted is not looked at
    (sandbox.root / "empty" / "vllm").mkdir(parents=True)  # a folder is not the package
    for arguments in ([], ["--json"]):
        done = cli("check", "--site-packages", str(sandbox.root / "empty"), *arguments)
        assert (done.code, done.out) == (2, "")
        assert done.lines == [
            f"vllm-livepatch: {sandbox.root}/empty has neither lmcache nor vllm: there is nothing to check"
        ]
    sandbox.write({"empty/vllm/__init__.py": ""}, sandbox.root)  # a vLLM without the code that patches are for
    done = cli("check", "--site-packages", str(sandbox.root / "empty"), "--json")
    assert done.code == 1
    patches = json.loads(done.out)["patches"]
    reaper = next(row for row in patches if row["name"] == "kv-block-reaper")
    assert (reaper["verdict"], reaper["reason"]) == ("drifted", "gone")


def test_check_requires(sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.patch()
    arguments = ["check", "--site-packages", str(sandbox.site), "--patch-dir", str(sandbox.patches)]
    done = cli(*arguments, "--require", "around")
    assert (done.code, done.err) == (0, "")
    done = cli(*arguments, "--require", "around", "--require", "kv_block_reaper")
    assert done.code == 1
    (line,) = done.lines
    assert line.startswith("vllm-livepatch: kv-block-reaper is required, and would not be applied (not-present): ")
    monkeypatch.setenv("LIVEPATCH_AROUND", "off")
    done = cli(*arguments, "--require", "around", "--json")
    assert done.code == 1
    assert done.out.startswith("{")
    assert "around is required, and would not be applied (off)" in done.err
    assert cli(*arguments, "--require", "aruond").err.endswith("did you mean around?\n")


def test_check_requires_what_was_not_looked_at(sandbox: Sandbox, cli: Cli) -> None:
    from tests.unit.local_index import make_wheel

    sandbox.patch()
    wheel = sandbox.root / "fakeengine-1.0-py3-none-any.whl"
    files = {file.relative_to(sandbox.site).as_posix(): file.read_bytes() for file in sandbox.site.rglob("*.py")}
    wheel.write_bytes(make_wheel("fakeengine", "1.0", files))
    arguments = ["check", "--wheel", str(wheel), "--patch-dir", str(sandbox.patches), "--require"]
    assert cli(*arguments, "around").code == 0
    done = cli(*arguments, "kv-block-reaper")
    assert (done.code, done.lines) == (
        1,
        ["vllm-livepatch: kv-block-reaper is required, and its package was not looked at"],
    )


# Waiting


def test_a_registry_that_never_answers(silent: socket.socket, cli: Cli) -> None:
    done = cli("check", "--release", "vllm==9.9", "--timeout", "0.3")
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)
    assert done.err.startswith("vllm-livepatch: not done after the 0.3 s of --timeout")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_time_out_names_who_was_asked(silent: socket.socket, cli: Cli) -> None:
    def ring() -> None:  # the alarm, once the request is there, however long that takes
        asked, _ = silent.accept()
        os.kill(os.getpid(), signal.SIGALRM)
        ended.wait(DEADLINE)
        asked.close()

    ended = threading.Event()
    silent.settimeout(DEADLINE)
    threading.Thread(target=ring, daemon=True).start()
    done = cli("check", "--release", "vllm==9.9", "--timeout", "50")
    ended.set()
    assert (done.code, done.out) == (2, "")
    assert done.lines == ["vllm-livepatch: not done after the 50 s of --timeout; 127.0.0.1 did not answer in time"]


def test_a_time_out_that_is_not_needed(sandbox: Sandbox, cli: Cli) -> None:
    sandbox.patch()
    place = ["--site-packages", str(sandbox.site), "--patch-dir", str(sandbox.patches)]
    assert cli("check", *place, "--timeout", "50").code == 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert cli("check", *place, "--timeout", "0").code == 2
    for seconds in ("inf", "1e300", "nan"):
        done = cli("check", *place, "--timeout", seconds)
        assert (done.code, done.out, len(done.lines)) == (2, "", 1), seconds
        assert done.err.startswith("vllm-livepatch: ")
        assert "--timeout" in done.err


def test_what_an_interpreter_started_ends_with_the_time_out(tmp_path: Path, cli: Cli) -> None:
    """A script that starts the interpreter in turn: its child kept the pipe, and ran on."""
    pipe, python = tmp_path / "pipe", tmp_path / "python"
    os.mkfifo(pipe)
    # `cat` holds the pipe open for writing, and waits for what nobody gives. More than a pipe takes: we are read then.
    alarm = "head -c 200000 /dev/zero\nkill -ALRM $PPID\nwait\n"
    python.write_text(f'#!/bin/sh\nexec 3>"{pipe}"\ncat "{tmp_path}/never" &\n{alarm}')
    os.mkfifo(tmp_path / "never")
    never = os.open(tmp_path / "never", os.O_RDWR)
    python.chmod(0o755)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        done = cli("check", "--python", str(python), "--timeout", "50")
        (line,) = done.lines
        assert line.startswith("vllm-livepatch: not done after the 50 s of --timeout")
        ended, _, _ = select.select([reader], [], [], DEADLINE)
        assert ended
        assert os.read(reader, 1) == b""
    finally:
        os.close(never)
        os.close(reader)


def test_a_failure_names_the_host_and_nothing_else_of_the_address(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple/")
    done = cli("check", "--release", "vllm==9.9")
    assert done.lines == ["vllm-livepatch: the registry at 127.0.0.1 cannot be reached; is there a network?"]
    assert registry.host("https://user:secret@pypi.example.org:8443/simple/?token=x") == "pypi.example.org"
    assert registry.host("http://[broken") == ""


def test_a_line_of_progress_in_a_terminal(silent: socket.socket) -> None:
    """After a second, over itself, and gone when the failure is said: here, when the registry hangs up."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "vllm_livepatch", "check", "--release", "vllm==9.9"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    output = b""
    try:
        while part := os.read(ours, 4096):
            output += part
            if re.search(rb"asking 127\.0\.0\.1 \(0 answers, 0\.0 MB\), \d+ s", output):
                silent.close()
    except OSError:  # how Linux tells that the other end is closed
        pass
    finally:
        os.close(ours)
    assert process.communicate(timeout=DEADLINE)[0] == b""
    assert process.returncode == 2
    text = output.decode()
    erased = text.rindex("\x1b[2K")
    assert (
        text.index("asking 127.0.0.1")
        < erased
        < text.index("vllm-livepatch: the registry at 127.0.0.1 cannot be reached")
    )
    assert "secret" not in text


def test_ctrl_c_is_no_traceback(silent: socket.socket) -> None:
    command = [sys.executable, "-m", "vllm_livepatch", "check", "--release", "vllm==9.9"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    silent.settimeout(DEADLINE)
    asked, _ = silent.accept()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=DEADLINE)
    asked.close()
    assert (process.returncode, out, err.strip()) == (130, "", "")


def test_ctrl_c_while_it_is_being_loaded(tmp_path: Path) -> None:
    """The import of `rich` stands for half a second of imports: it tells when it has begun, and waits."""
    began = tmp_path / "began"
    (tmp_path / "rich.py").write_text(f"import signal\nopen({str(began)!r}, 'w').close()\nsignal.pause()\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-m", "vllm_livepatch", "list"], env=environ, stderr=subprocess.PIPE)
    until(began.exists, DEADLINE)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=DEADLINE)[1] == b""
    assert process.returncode == 130


def test_threads_that_nobody_waits_for() -> None:
    held, begun = threading.Event(), threading.Semaphore(0)

    def work(number: int) -> int:
        begun.release()
        if number == 2:
            raise ValueError(number)
        assert number < 2 or held.wait(DEADLINE)
        return number * 10

    found = threads.each(work, range(9), at_once=3)
    assert [next(found), next(found)] == [0, 10]
    with pytest.raises(ValueError, match="2"):
        next(found)
    working = [thread for thread in threading.enumerate() if "work" in thread.name]
    assert working
    assert all(thread.daemon for thread in working)
    held.set()
    assert list(threads.each(str, [])) == []
    assert list(threads.each(str, range(20), at_once=3)) == [str(number) for number in range(20)]


# What comes with extras (test_installed.py has the same of what is installed without them)


def test_the_lab_s_help_without_its_extra(cli: Cli) -> None:
    code = (
        "import sys; sys.modules['aiohttp'] = None; sys.argv[0] = 'x'; from vllm_livepatch.__main__ import main; main()"
    )

    def lab(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, "lab", *words], capture_output=True, text=True)

    done = lab("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--topolog" in done.stdout or "TOPOLOGY" in done.stdout
    done = lab("pd-nixl", "--dry-run")
    assert done.returncode == 2
    assert done.stderr.startswith("vllm-livepatch: the lab needs more packages (in the checkout: pip install '.[lab]')")


def test_a_dry_run_shows_the_settings_of_the_patches(cli: Cli, tmp_path: Path) -> None:
    options = ["LIVEPATCH_MOONCAKE_LAYERWISE=on", "VLLM_OTHER=a b"]
    words = ["lab", "pd-mooncake", "--dry-run", "--compare", "--fault", "link=2", "--fault", "stop-prefill@5"]
    done = cli(*words, *(word for setting in options for word in ("--set", setting)))
    assert (done.code, done.err) == (0, "")
    parts = {lines[0].split()[1]: lines[1] for part in done.out.split("\n\n")[1:] if (lines := part.splitlines())}
    for setting in (*options, "LIVEPATCH_LINK=on", "LIVEPATCH_LINK_MB=2", "LIVEPATCH_MOONCAKE_ON_CPU=on"):
        given = [setting in shlex.split(parts[name]) for name in ("prefill:", "decode:", "router:")]
        assert given == [True, True, False], setting
    assert "storm, link=2, stop-prefill@5\n" in done.out
    assert "the stock setup has only LIVEPATCH_MOONCAKE_ON_CPU, LIVEPATCH_LINK, LIVEPATCH_LINK_MB" in done.out
    out = tmp_path / "out"
    assert "the stock setup has no bundle\n" in cli("lab", "lmcache", "--dry-run", "--compare", "--out", str(out)).out
    assert not out.exists()


@pytest.mark.parametrize(
    ("setting", "words", "message"),
    [
        ("LIVEPATCH_NOPE=1", [], "LIVEPATCH_NOPE is unknown, and nothing reads it"),
        ("LIVEPATCH_FAILED_LOADS=yess", [], "'yess' is none of auto, on, force, off"),
        ("LIVEPATCH_FAILED_LOADS_ON_LOSS=x", [], "'x' is not one of recompute, engine"),
        ("LIVEPATCH_LINK_MB=0", ["--fault", "link"], "'0' is not a number of at least 0.1"),
        ("LIVEPATCH_LINK_MB=2", [], "LIVEPATCH_LINK_MB is unknown, and nothing reads it"),
        ("LIVEPATCH_IDLE_STEPPING=off", ["--patches", "failed-loads"], "is unknown, and nothing reads it"),
    ],
)
def test_the_lab_sets_nothing_that_means_nothing(cli: Cli, setting: str, words: list[str], message: str) -> None:
    for form in (["--dry-run"], ["--print", "shell"]):
        done = cli("lab", "pd-mooncake", "--set", setting, *words, *form)
        assert (done.code, done.out, len(done.lines)) == (2, "", 1)
        assert done.err.startswith(f"vllm-livepatch: --set: {setting.partition('=')[0]}")
        assert message in done.err
    assert cli("lab", "pd-mooncake-lmcache", "--set", "LIVEPATCH_FAILED_LOADS=off", "--dry-run").code == 0
    ride = ["--set", "LIVEPATCH_MULTI_CONNECTOR_METRICS=on", "--patches", "failed-loads"]
    assert cli("lab", "pd-mooncake-lmcache", *ride, "--dry-run").code == 0


def test_the_lab_s_options_name_what_there_is() -> None:
    assert tuple(sorted(printing.FORMS)) == options.FORMS


@pytest.mark.parametrize("words", [[], ["--no-diff"]])
def test_no_diff_reads_no_other_release_for_a_pair(
    sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """In which of 36 releases a problem is none takes their lists of files: most of what a check of a pair reads."""
    asked: list[Problem] = []

    def found_in(problem: Problem) -> str:
        asked.append(problem)
        return "vllm 0.22.1"

    problem = Problem("lmcache.one", 7, "vllm", "vllm.two:three", "vllm has no three")
    connector = pairs.Connector(pairs.MP, None, "lmcache.one:One", "built in", (problem,))
    monkeypatch.setattr(pairs, "of_tree", lambda tree: pairs.Pair("1.0", "2.0", (connector,), ()))
    monkeypatch.setattr(pairs, "found_in", found_in)
    sandbox.patch()
    done = cli("check", "--site-packages", str(sandbox.site), "--patch-dir", str(sandbox.patches), *words)
    assert done.code == 1
    assert "lmcache.one:7: vllm has no three" in done.out
    assert asked == ([] if words else [problem])
    assert ("(not so in vllm 0.22.1)" in done.out) == (not words)

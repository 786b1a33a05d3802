"""`status`, of the tool and of the bundle: what a script decides by, and what a person sees of hundreds of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit import fleet
from tests.unit.support import PYTHON, Ask, Cli, Sandbox, until


@pytest.fixture
def state(tmp_path: Path) -> Path:
    place = tmp_path / "state"
    place.mkdir()
    return place


def test_nobody_is_there(ask: Ask) -> None:
    assert ask("--summary").out == "0 processes on 0 hosts\n"
    assert ask("--json").out == "[]\n"
    assert "no live patched process has a report" in ask().out


@pytest.mark.parametrize("ask", ["the bundle"], indirect=True)
def test_require_where_nobody_is_there(ask: Ask, cli: Cli, state: Path, patched: Sandbox) -> None:
    own = ["--patch-dir", str(patched.patches), "--require", "around"]
    for done in (ask("--require", "around"), cli("status", "--state-dir", str(state), *own)):
        assert (done.code, done.err) == (1, "vllm-livepatch: no live patched process is there\n")


ENOUGH = {
    "applied": (fleet.patch("around"), 0),
    "armed": (fleet.patch("around", "armed"), 0),
    "partly": (fleet.patch("around", "applied", "partly"), 0),
    "skipped": (fleet.patch("around", "skipped", "drifted"), 1),
    "not needed": (fleet.patch("around", "skipped", "fixed-upstream"), 1),
    "failed": (fleet.patch("around", "failed", "raised"), 1),
    "absent": (fleet.patch("other"), 1),
}


@pytest.mark.parametrize("what", ENOUGH)
def test_require_looks_at_each_process(cli: Cli, state: Path, what: str) -> None:
    found, code = ENOUGH[what]
    fleet.leave(state, fleet.patch("around"))
    fleet.leave(state, found, pid=77)
    for arguments in (["--require", "around"], ["--require", "around", "--json"], ["--require", "around", "--summary"]):
        done = cli("status", "--state-dir", str(state), *arguments)
        assert done.code == code
        assert bool(done.lines) == bool(code)
        assert all("pid 77 on node1" in line for line in done.lines)


def test_require_of_several_and_in_either_spelling(ask: Ask, state: Path) -> None:
    fleet.leave(state, fleet.patch("one-two"), fleet.patch("three", "failed", "raised"))
    assert ask("--require", "one_two").code == 0
    done = ask("--require", "one-two", "--require", "three")
    assert done.code == 1
    assert len(done.lines) == 1
    assert "three is failed in pid " in done.err
    assert done.err.endswith("(raised: why it is raised)\n")
    done = ask("--require", "tree")
    assert (done.code, done.out, done.err) == (2, "", "vllm-livepatch: no patch is called tree; did you mean three?\n")
    assert ask("--require", "elephant").err.startswith("vllm-livepatch: no patch is called elephant; there are ")


def test_a_required_name_that_nothing_here_has_where_not_all_can_be_read(cli: Cli, state: Path) -> None:
    """The report that cannot be read may have it."""
    file = fleet.leave(state, fleet.patch("around"))
    file.write_text('{"pid": "of a later version"}')
    done = cli("status", "--state-dir", str(state), "--require", "elephant")
    assert (done.code, "cannot be read here" in done.err) == (1, True)


def test_require_of_a_version(ask: Ask, state: Path) -> None:
    """What a rollout waits for: a process that was not restarted has the older one."""
    fleet.leave(state, fleet.patch("around", version=12))
    fleet.leave(state, fleet.patch("around", "armed", version=11), pid=77)
    assert ask("--require", "around@11").code == 0
    done = ask("--require", "around@12", "--json")
    assert (done.code, done.lines) == (
        1,
        ["vllm-livepatch: around is of version 11 in pid 77 on node1, and 12 is required"],
    )
    fleet.leave(state, fleet.patch("around"), pid=78)  # of a bundle that gave its patches none
    assert ask("--require", "around").code == 0
    done = ask("--require", "around@11", "--summary")
    assert done.lines == ["vllm-livepatch: around is of version unknown in pid 78 on node1, and 11 is required"]
    for wrong in ("around@", "around@two", "around@-1", "around@1.0", "around@\N{SUPERSCRIPT TWO}"):
        done = ask("--require", wrong)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"vllm-livepatch: --require {wrong}: behind @ stands the number of a version")
    assert ask("--require", "aruond@2").err == "vllm-livepatch: no patch is called aruond; did you mean around?\n"


def test_require_of_a_bundle(ask: Ask, state: Path) -> None:
    other = f"sha256:{'0' * 64}"
    done = ask("--digest", fleet.DIGEST)
    assert (done.code, done.err) == (1, "vllm-livepatch: no live patched process is there\n")
    fleet.leave(state, fleet.patch("around"))
    assert ask("--digest", fleet.DIGEST).code == 0
    assert ask("--digest", fleet.DIGEST, "--require", "around").code == 0
    fleet.leave(state, fleet.patch("around"), pid=77, digest=other)
    fleet.leave(state, fleet.patch("around"), pid=78, digest=None)
    done = ask("--digest", fleet.DIGEST)
    assert (done.code, done.lines) == (
        1,
        [
            f"vllm-livepatch: pid 77 on node1 runs the bundle {other}, not {fleet.DIGEST}",
            f"vllm-livepatch: pid 78 on node1 runs the bundle of an unknown digest, not {fleet.DIGEST}",
        ],
    )
    done = ask("--digest", "sha256:ab")
    assert (done.code, done.out) == (2, "")
    assert "is not sha256: and 64 hexadecimal digits" in done.err


NOWHERE = "vllm-livepatch: mooncake-layerwise is applied nowhere: no process has imported what it patches"
ASK = ", and it is off unless LIVEPATCH_MOONCAKE_LAYERWISE=on asks for it"


@pytest.mark.parametrize(("toggle", "rest"), [("auto", ASK), ("off", ASK), ("on", "")])
def test_a_required_patch_whose_target_nobody_has_imported(cli: Cli, state: Path, toggle: str, rest: str) -> None:
    toggles = {} if toggle == "auto" else {"mooncake-layerwise": toggle}
    settings = {"mode": "auto", "toggles": toggles, "options": {}}
    for other in ("applied", "armed"):
        fleet.leave(
            state, fleet.patch("mooncake-layerwise", "armed"), fleet.patch("failed-loads", other), settings=settings
        )
    words = ["status", "--state-dir", str(state), "--require", "failed-loads"]
    done = cli(*words)
    assert (done.code, done.err) == (0, "")  # one has imported what it patches
    done = cli(*words, "--require", "mooncake_layerwise")
    assert (done.code, done.err) == (0, f"{NOWHERE}{rest}\n")


def test_one_that_fell_silent_is_no_witness(ask: Ask, state: Path) -> None:
    """What an earlier container left in a shared directory says nothing of this one, for good or bad."""
    file = fleet.leave(state, fleet.patch("around"), silent=181.0)
    done = ask("--require", "around")
    assert (done.code, done.err) == (1, "vllm-livepatch: no process was heard of lately\n")
    assert ", last heard of 18" in ask().out  # it is shown, with the age of what it says
    file.unlink()
    fleet.leave(state, fleet.patch("around", "failed", "raised"), silent=181.0)
    fleet.leave(state, fleet.patch("around"), silent=100.0)
    assert ask("--require", "around").code == 0
    fleet.leave_own(state, fleet.patch("around", "failed", "raised"), silent=1000.0)  # seen to be alive
    assert ask("--require", "around").code == 1


def test_one_whose_clock_is_ahead_is_no_witness(ask: Ask, state: Path) -> None:
    """As one whose clock is behind: who has ended would be one until that hour comes."""
    fleet.leave(state, fleet.patch("around"), silent=-3600.0)
    done = ask("--require", "around")
    assert (done.code, done.err) == (1, "vllm-livepatch: no process was heard of lately\n")
    assert ", its clock is 3" in ask().out
    assert "1 of them not heard of for three minutes" in ask("--summary").out
    fleet.leave(state, fleet.patch("around"), silent=-100.0)
    assert ask("--require", "around").code == 0


def test_an_answer_that_nobody_reads_is_still_given_by_the_exit_code(patched: Sandbox, state: Path) -> None:
    """`status --require ... | head -1` under `set -o pipefail`."""
    fleet.leave(state, fleet.patch("around", "failed", "raised"))
    read, write = os.pipe()
    os.close(read)
    require = ["status", "--state-dir", str(state), "--require", "around"]
    digest = f"sha256:{'0' * 64}"
    asked = [(["doctor"], 1), (require, 1), ([*require, "--json"], 1), (["verify", "--digest", digest], 1)]
    asked += [(["verify"], 0), (["check"], 2)]
    try:
        for words, code in asked:
            command = [PYTHON, str(patched.bundle), *words]
            done = subprocess.run(
                command, env=patched.environ(path=[]), stdout=write, stderr=subprocess.PIPE, timeout=60
            )
            assert (done.returncode, b"Traceback" in done.stderr) == (code, False), words
        watch = [PYTHON, str(patched.bundle), *require[:3], "--watch"]
        assert subprocess.run(watch, env=patched.environ(), stdout=write, timeout=60).returncode == 0
    finally:
        os.close(write)


def test_prune_removes_what_is_known_to_have_ended(ask: Ask, state: Path) -> None:
    stay = {
        fleet.leave_own(state),
        fleet.leave(state, silent=1e6),  # another host's
        fleet.leave_own(state, alive=False, pid_namespace="pid:[1] here"),
        fleet.leave_own(state, alive=False, pid_namespace=None),  # of version 0.1
    }
    ended = fleet.leave_own(state, alive=False)
    assert ask().err == ""
    assert ended.exists()
    assert len(json.loads(ask("--json").out)) == len(stay)
    done = ask("--prune", "--json")
    assert (done.code, len(json.loads(done.out))) == (0, len(stay))
    assert done.err == f"removed the reports of 1 ended processes: {os.getpid()}\n"
    assert set(state.iterdir()) == stay


@pytest.mark.parametrize("more", [[], ["--summary"]], ids=["", "summary"])
def test_watch_as_json_is_a_line_each_time(state: Path, more: list[str]) -> None:
    fleet.leave_own(state, fleet.patch("around"))
    command = [
        sys.executable,
        "-m",
        "vllm_livepatch.tools.cli",
        "status",
        "--watch",
        "--json",
        "--state-dir",
        str(state),
    ]
    process = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    fleet.leave(state, fleet.patch("around"))
    second = until(lambda: more_than(first, json.loads(process.stdout.readline())))  # type: ignore[union-attr]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    counts = (1, 2)
    assert (number(first), number(second)) == counts


def number(found: Any) -> int:
    return int(found["processes"]) if isinstance(found, dict) else len(found)


def more_than(first: Any, second: Any) -> Any:
    return second if number(second) > number(first) else None


def test_ctrl_c_ends_the_bundle_s_own_as_quietly(patched: Sandbox, state: Path) -> None:
    command = [PYTHON, str(patched.bundle), "status", "--watch", "--json", "--state-dir", str(state)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=patched.environ(), stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "[]\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize("form", ["--watch", "--json", "--summary"])
def test_metrics_are_not_asked_for_in_another_form(cli: Cli, state: Path, form: str) -> None:
    for metrics in (["--prometheus", str(state / "x.prom")], ["--serve", "0"]):
        done = cli("status", "--state-dir", str(state), *metrics, form)
        assert (done.code, done.out, "go without" in done.err) == (2, "", True)


SECRETS = ["sk-aaaabbbbccccddddeeee", "hush1", "hush2", "hush3", "hush4", "hush5"]


def test_no_secret_reaches_a_screen(ask: Ask, state: Path) -> None:
    """Also of what version 0.1 wrote, which kept whole command lines; and of errors that quote what they met."""
    argv = ["vllm", "serve", "--api-key", "hush1", f"--x={SECRETS[0]}", "--db", "redis://me:hush2@host"]
    detail = "ConnectionError: redis://me:hush3@host refused token='hush4', {'password': 'hush5'}"
    broken = fleet.patch("around", "failed", "raised", detail=detail)
    fleet.leave(state, broken, argv=argv)
    for options in ([], ["--json"], ["--summary"], ["--summary", "--json"], ["--require", "around"]):
        done = ask(*options)
        output = done.out + done.err
        assert "around" in output
        assert [secret for secret in SECRETS if secret in output] == [], options

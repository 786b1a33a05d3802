"""Nobody reads what is printed, files are no files, a manifest is somebody else's: one line and an exit code, always."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.support import DEADLINE, PYTHON, Cli, Sandbox, finish, package_of

COMMANDS = ("doctor", "status", "verify", "check")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_stdout_that_is_full_or_closed(patched: Sandbox, command: str) -> None:
    patched.state.mkdir()
    line = f'"{PYTHON}" "{patched.bundle}" {command}'
    for way, code, message in (
        (">/dev/full", 2, "vllm-livepatch: No space left on device\n"),
        (">&-", 0, ""),
    ):
        done = subprocess.run(
            ["sh", "-c", f"{line} {way}"], env=patched.environ(), capture_output=True, text=True, timeout=DEADLINE
        )
        assert (done.returncode, done.stderr) == (code, message), way


def test_ctrl_c_while_the_bundle_is_being_loaded(patched: Sandbox) -> None:
    patched.write({"argparse.py": "raise KeyboardInterrupt\n"})
    done = finish([PYTHON, patched.bundle, "doctor"], patched.environ())
    assert (done.code, done.out, done.err) == (130, "", "")


@pytest.mark.parametrize("words", [["list"], ["deploy", "docker"]], ids=["rich's", "print's"])
def test_the_tool_with_a_full_stdout(cli: Cli, words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = cli.process(*words, stdout=full.fileno())
    assert (done.code, done.err) == (2, "vllm-livepatch: No space left on device\n")


def test_a_device_is_not_replaced_by_metrics(cli: Cli, tmp_path: Path) -> None:
    """As /dev/null was, where root wrote them."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = cli("status", "--state-dir", str(tmp_path), "--prometheus", str(pipe))
    assert (done.code, done.err) == (2, f"vllm-livepatch: {pipe} cannot be written: it is no file\n")
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "name",
    ["/dev/zero", "../outside", "a/../../outside", "..", "a\0b"],
    ids=["device", "above", "below", "dots", "nul"],
)
def test_a_manifest_that_names_what_is_no_file_of_the_bundle(patched: Sandbox, cli: Cli, name: str) -> None:
    """Not read: it may have no end."""
    (patched.bundle / "manifest.json").write_text(json.dumps({"files": {name: "0" * 64}}))
    done = cli("verify", str(patched.bundle))
    assert (done.code, done.err, len(done.out.splitlines())) == (1, "", 1)
    assert "is damaged" in done.out
    assert "is no file of a bundle" in done.out


def test_a_manifest_as_deep_as_nothing_is(patched: Sandbox, cli: Cli) -> None:
    (patched.bundle / "manifest.json").write_text("[" * 200_000)
    done = cli("verify", str(patched.bundle))
    assert (done.code, done.err, len(done.out.splitlines())) == (1, "", 1)
    assert "is damaged" in done.out


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(patched: Sandbox, cli: Cli) -> None:
    own = package_of(patched.bundle) / "__init__.py"
    name = own.relative_to(patched.bundle).as_posix()
    own.unlink()
    os.mkfifo(own)
    done = cli.process("verify", str(patched.bundle))
    assert (done.code, done.out) == (1, f"{name} is missing\n")


def test_a_link_to_a_directory_was_added(patched: Sandbox, cli: Cli) -> None:
    """On PYTHONPATH it would be imported in the engine's place."""
    (patched.bundle / "fakeengine").symlink_to(patched.site / "fakeengine", target_is_directory=True)
    done = cli("verify", str(patched.bundle))
    assert (done.code, done.out) == (1, "fakeengine was added\n")

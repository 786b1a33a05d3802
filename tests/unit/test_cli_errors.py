"""Bad input: one clear line on stderr, exit 2, nothing on stdout, and nothing written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.support import PYTHON, Cli, Sandbox, finish

Arguments = Callable[[Sandbox], list[str]]


def patch_toml(old: str, new: str) -> Callable[[Sandbox], None]:
    def damage(sandbox: Sandbox) -> None:
        file = sandbox.patches / "around/patch.toml"
        text = file.read_text("utf-8")
        assert old in text
        file.write_text(text.replace(old, new), "utf-8")

    return damage


def bad_names(sandbox: Sandbox) -> None:
    (sandbox.patches / "around").rename(sandbox.patches / "not-a-name")


BAD: dict[str, tuple[list[str], str]] = {
    "no such command": (["frobnicate"], "frobnicate"),
    "no such option": (["list", "--colour"], "--colour"),
    "an argument too many": (["list", "more"], "more"),
    "generate: nowhere": (["generate"], "--out"),
    "generate: no value": (["generate", "--out"], "--out"),
    "generate: no such patch": (["generate", "--out", "{new}", "--patch", "nothing"], "no patch is called nothing"),
    "generate: no such directory": (
        ["generate", "--out", "{new}", "--patch-dir", "{new}"],
        "not a directory of patches",
    ),
    "generate: no patches": (["generate", "--out", "{new}", "--patch-dir", "{empty}"], "has no patch"),
    "generate: a patch twice": (
        ["generate", "--out", "{new}", "--patch-dir", "{patches}", "--patch-dir", "{patches}"],
        "two patches are called around",
    ),
    "generate: onto something else": (["generate", "--out", "{site}"], "exists and is not a bundle"),
    "generate: onto a file": (["generate", "--out", "{file}"], "exists and is not a bundle"),
    "generate: below a file": (["generate", "--out", "{file}/bundle"], "cannot be written"),
    "generate: zip onto a directory": (["generate", "--zip", "{site}"], "exists and is not a zip file"),
    "generate: zip onto a file": (["generate", "--zip", "{file}"], "exists and is not a zip file"),
    "generate: zip below a file": (["generate", "--zip", "{file}/bundle.zip"], "cannot be written"),
    "generate: a colon": (["generate", "--out", "{new}:x"], "PYTHONPATH cannot name it"),
    "run: nothing": (["run"], "COMMAND"),
    "run: nothing after --": (["run", "--"], "COMMAND"),
    "run: no such command": (["run", "--", "no-such-command"], "no-such-command cannot be run: No such file"),
    "run: not to be run": (["run", "--", "{file}"], "cannot be run: Permission denied"),
    "run: no such patch": (["run", "--patch", "nothing", "--", "true"], "no patch is called nothing"),
    "show: nothing": (["show"], "NAME"),
    "show: no such patch": (["show", "nothing"], "no patch is called nothing; there are "),
    "check: two places": (["check", "--python", "x", "--site-packages", "{site}"], "exclude each other"),
    "check: no such interpreter": (["check", "--python", "{new}"], "is not an interpreter"),
    "check: no interpreter": (["check", "--python", "true"], "is not an interpreter"),
    "check: an interpreter that fails": (["check", "--python", "false"], "cannot say what is installed"),
    "check: no such directory": (["check", "--site-packages", "{new}"], "is not a directory"),
    "check: a file": (["check", "--site-packages", "{file}"], "is not a directory"),
    "status: no such directory": (["status", "--state-dir", "{new}"], "is not a directory"),
    "status: a file": (["status", "--state-dir", "{file}", "--json"], "is not a directory"),
    "from-diff: no such file": (["from-diff", "{new}", "--name", "mine", "--out", "{new}"], "new"),
    "verify: nothing": (["verify"], "DIR"),
    "verify: no such directory": (["verify", "{new}"], "does not exist"),
    "verify: no bundle": (["verify", "{site}"], "is not a bundle"),
    "verify: a file": (["verify", "{file}"], "is not a"),
}


def files(place: Path) -> list[str]:
    return sorted(str(path) for path in place.rglob("*"))


def complains(cli: Cli, sandbox: Sandbox, arguments: list[str]) -> str:
    """The one line."""
    before = files(sandbox.root)
    done = cli(*arguments)
    assert (done.code, done.out) == (2, ""), done.err
    (line,) = done.lines
    assert line.startswith("vllm-livepatch: ")
    assert files(sandbox.root) == before
    return line


@pytest.mark.parametrize("what", list(BAD))
def test_bad_input(sandbox: Sandbox, cli: Cli, what: str) -> None:
    sandbox.patch()
    (sandbox.root / "empty").mkdir()
    (sandbox.root / "file").write_text("text")
    places = {name: sandbox.root / name for name in ("new", "empty", "file", "site", "patches")}
    arguments, message = BAD[what]
    line = complains(cli, sandbox, [argument.format(**places) for argument in arguments])
    assert message in line


def test_damaged_manifest(patched: Sandbox, cli: Cli) -> None:
    (patched.bundle / "manifest.json").write_text("{")
    done = cli("verify", str(patched.bundle))
    assert (done.code, done.err, len(done.out.splitlines())) == (1, "", 1)
    assert done.out.startswith("manifest.json is damaged: ")


def test_where_no_reports_are_no_process_has_what_is_required(patched: Sandbox, cli: Cli) -> None:
    arguments = ["status", "--state-dir", str(patched.root / "none"), "--require", "around"]
    bundled = finish([PYTHON, patched.bundle, *arguments], patched.environ(path=[]))
    for done in (cli(*arguments, "--patch-dir", str(patched.patches)), bundled):
        assert done.code == 1
        assert done.lines == [
            f"vllm-livepatch: {patched.root / 'none'} is not a directory, or not to be seen by this user",
            "vllm-livepatch: no live patched process is there",
        ]


def test_a_state_directory_that_the_environment_names(
    sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIVEPATCH_STATE_DIR", str(sandbox.root / "none"))
    assert str(sandbox.root / "none") in complains(cli, sandbox, ["status"])


DAMAGED: dict[str, tuple[Callable[[Sandbox], object], str]] = {
    "no TOML": (patch_toml("title =", "title"), "patch.toml: "),
    "not UTF-8": (lambda box: (box.patches / "around/patch.toml").write_bytes(b"\xff"), "patch.toml: "),
    "no title": (patch_toml("title =", "titel ="), "no entry is called titel"),
    "no package": (patch_toml('package = "fakeengine"', "package = 1"), "package must be a text"),
    "no targets": (patch_toml('"fakeengine.scheduler:Scheduler.step",\n', ""), ""),
    "target of another form": (patch_toml("scheduler:Scheduler.step", "scheduler.Scheduler.step"), "module:qualname"),
    "no such auto": (patch_toml('package = "fakeengine"', 'package = "fakeengine"\nauto = "always"'), "auto is"),
    "a bad verdict": (
        patch_toml("[variant.code]", 'verdict = "fine"\n[variant.code]'),
        "verdict is needed, fixed-upstream or not-present",
    ),
    "no releases": (patch_toml("releases", "release"), "needs releases and code"),
    "a strange name": (patch_toml('step" =', 'free" ='), "neither a target nor a call"),
    "an option without default": (
        lambda box: box.patch(option=[{"name": "limit"}]),
        "an option needs a name and a default",
    ),
    "aliases of another form": (lambda box: box.patch(aliases="ONE"), "aliases must be a list"),
    "a folder of a bad name": (bad_names, "a patch's folder is its name"),
    "no code": (lambda box: (box.patches / "around/wrappers.py").unlink(), "has no wrappers.py"),
}


@pytest.mark.parametrize("command", [["list"], ["generate", "--out", "{new}"], ["run", "--", "true"], ["check"]])
@pytest.mark.parametrize("what", list(DAMAGED))
def test_a_damaged_patch(sandbox: Sandbox, cli: Cli, what: str, command: list[str]) -> None:
    sandbox.patch()
    damage, message = DAMAGED[what]
    damage(sandbox)
    words = [word.format(new=sandbox.root / "new") for word in command]
    line = complains(cli, sandbox, [words[0], "--patch-dir", str(sandbox.patches), *words[1:]])
    assert message in line
    assert "around" in line or "not-a-name" in line


@pytest.mark.parametrize("arguments", [[], ["--help"], ["generate", "--help"], ["run", "--help"]])
def test_help_is_no_error(cli: Cli, arguments: list[str]) -> None:
    done = cli(*arguments)
    assert (done.code, done.err) == (0, "")
    assert "Usage" in done.out


def test_output_into_a_pipe_that_nobody_reads(sandbox: Sandbox, cli: Cli) -> None:
    """The exit code stays the command's own."""
    sandbox.patch()
    place = ["--site-packages", str(sandbox.site), "--patch-dir", str(sandbox.patches)]
    (drifted := sandbox.root / "drifted").mkdir()
    sandbox.write({"fakeengine/__init__.py": "", "fakeengine/scheduler.py": "class Scheduler:\n  step = 1\n"}, drifted)
    other = ["--site-packages", str(drifted), "--patch-dir", str(sandbox.patches), "--no-diff"]
    words: list[tuple[list[str], int]] = [
        (["list"], 0),
        (["-h"], 0),
        (["list", "--json"], 0),
        (["show", "kv-block-reaper"], 0),
        (["check", *place], 0),
        (["check", *other], 1),
        (["check", *other, "--json"], 1),
    ]
    read, write = os.pipe()
    os.close(read)
    try:
        for arguments, code in words:
            done = cli.process(*arguments, stdout=write)
            assert (done.code, done.err) == (code, ""), arguments
    finally:
        os.close(write)

"""`doctor` as a command, and `check --only`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.support import PYTHON, Cli, Sandbox


def test_doctor_asks_the_bundle_that_serves(patched: Sandbox, cli: Cli) -> None:
    done = cli.process("doctor", "--json", "--python", PYTHON, environ=patched.environ())
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert {check["name"] for check in answer["checks"]} >= {"bundle", "interpreter", "path"}
    away = patched.environ(path=[patched.site])
    done = cli.process("doctor", "--python", PYTHON, environ=away)
    assert (done.code, done.out) == (2, "")
    assert "no bundle is on PYTHONPATH" in done.err
    done = cli.process("doctor", "--bundle", str(patched.bundle), "--python", PYTHON, environ=away)
    assert done.code == 1, "that bundle does not serve here"


@pytest.mark.parametrize("words", [("--bundle", "nowhere"), ("--python", "no-python")])
def test_doctor_of_nothing_is_one_line(patched: Sandbox, cli: Cli, words: tuple[str, str], tmp_path: Path) -> None:
    done = cli.process("doctor", *words, environ=patched.environ())
    assert (done.code, done.out, len(done.lines)) == (2, "", 1)


def test_check_of_ones_own_patches_alone(patched: Sandbox, cli: Cli) -> None:
    words = ["check", "--site-packages", str(patched.site), "--json", "--only"]
    done = cli(*words, "--patch-dir", str(patched.patches))
    assert [patch["name"] for patch in json.loads(done.out)["patches"]] == ["around"]
    assert done.code == 0
    assert cli(*words).code == 2

"""Two patches of one function, named before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import catalogue, shared

from tests.unit.support import STEP, WORK, Cli, Sandbox

LINE = (
    f"first and second have one target, {STEP}: each call goes through the wrappers of all of them. "
    "inside, outside or instead_of in one's patch.toml says how they stand to each other"
)


def test_check_and_generate_name_both(sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.patch("first")
    sandbox.patch("second", [STEP, WORK])
    place = ["--patch-dir", str(sandbox.patches)]
    question = ["check", "--site-packages", str(sandbox.site), "--only", *place]
    assert LINE in cli(*question).out.splitlines()
    done = cli("generate", "--out", str(sandbox.bundle), "--patch", "first", "--patch", "second", *place)
    assert (done.code, done.err) == (0, f"vllm-livepatch: warning: {LINE}\n")
    monkeypatch.setenv("LIVEPATCH_SECOND", "off")
    assert LINE not in cli(*question).out


def test_those_of_this_project_fit_and_a_strangers_may_not(tmp_path: Path) -> None:
    ours = list(catalogue.load().values())
    targets = [target for entry in ours for target in entry.patch.targets]
    (twice, *_) = [target for target in targets if targets.count(target) > 1]
    assert list(shared.sentences(ours)) == []
    patch = dataclasses.replace(ours[0].patch, name="strange", targets=(twice,))
    (line,) = shared.sentences([*ours, catalogue.Entry(tmp_path / "strange", {}, patch)])
    assert f" and strange have one target, {twice}: " in line

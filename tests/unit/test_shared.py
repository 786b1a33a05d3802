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


@pytest.mark.parametrize("facts", [{"calls": [STEP]}, {"targets": [STEP]}])
def test_a_class_that_one_changes_and_a_method_that_the_other_needs(
    sandbox: Sandbox, cli: Cli, facts: dict[str, list[str]]
) -> None:
    cls = STEP.rpartition(".")[0]
    code = "def wrappers(livepatch): return {target: livepatch.after_import(print, print) for target in TARGETS}"
    sandbox.patch("changes", [cls], code=code)
    sandbox.patch("needs", facts.get("targets", [WORK]), calls=facts.get("calls", []))
    place = ["--patch-dir", str(sandbox.patches)]
    line = f"changes changes {cls}, and needs wraps or calls {STEP}: "
    generate = ("generate", *place, "--patch", "changes", "--patch", "needs", "--out", str(sandbox.bundle))
    assert line in cli(*generate).err
    assert line in cli("check", *place, "--only", "--site-packages", str(sandbox.site)).out
    sandbox.patch("changes", [cls], code=code, instead_of=["needs"])
    assert line not in cli(*generate).err

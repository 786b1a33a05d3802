"""`format` and `must` in patch.toml: a form that nobody knows is refused; one patch ends its process without strict."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_livepatch.sitecustomize.decision import PatchError
from vllm_livepatch.sitecustomize.facts import to_patch

from tests.unit.support import PATCHED, STEP, STOCK, USE_STEP, WORK, Cli, Sandbox
from tests.unit.test_strict import BROKEN, IMPORT, edit

FACTS = {"title": "one", "package": "engine", "targets": ["engine.a:f"]}


@pytest.mark.parametrize("format_", [0, 2, "1", 1.0, True, [1]])
def test_a_format_that_is_not_known_is_refused_before_its_keys(format_: Any) -> None:
    line = f"patch one: format is {format_!r}, and this version of vllm-livepatch knows 1 alone"
    with pytest.raises(PatchError) as error:
        to_patch("one", {**FACTS, "format": format_, "a key of that format": 1})
    assert str(error.value) == line


def test_no_format_is_the_first() -> None:
    assert to_patch("one", FACTS) == to_patch("one", {**FACTS, "format": 1})


def test_a_folder_of_another_format_is_one_line_in_every_command(sandbox: Sandbox, cli: Cli) -> None:
    """Also where a lock stands beside it, which this version would join with it in its own way."""
    sandbox.patch(format=2, variant=[{"releases": ["9.9"]}])
    folder = sandbox.patches / "around"
    (folder / "patch.lock").write_text("", "utf-8")
    known = "patch around: format is 2, and this version of vllm-livepatch knows 1 alone"
    for command in (
        ["check", "--patch-dir", str(sandbox.patches), "--only", "--site-packages", str(sandbox.site)],
        ["generate", "--patch-dir", str(sandbox.patches), "--out", str(sandbox.bundle)],
        ["lock", str(folder), "--site-packages", str(sandbox.site)],
        ["ready", str(folder)],
    ):
        done = cli(*command)
        assert (done.code, done.out) == (2, "")
        assert done.err == f"vllm-livepatch: {folder / 'patch.toml'}: {known}\n"


@pytest.mark.parametrize("must", ["yes", 1, None])
def test_must_is_true_or_false(must: Any) -> None:
    with pytest.raises(PatchError, match="patch one: must is true or false, not "):
        to_patch("one", {**FACTS, "must": must})


@pytest.mark.parametrize("how", ["drifted", "raised"])
def test_one_that_must_be_applied_ends_the_process_under_auto(sandbox: Sandbox, how: str) -> None:
    """And is alone in that: what else is not applied gets its line, and ends nothing."""
    code = {"code": BROKEN} if how == "raised" else {}
    sandbox.patch("another", **code)
    sandbox.patch(must=True, **code)
    sandbox.generate()
    if how == "drifted":
        edit(sandbox)
    done = sandbox.python(IMPORT)
    assert (done.code, done.out) == (78, "before\n")
    another, around = done.others
    assert another.startswith(f"vllm-livepatch: another is not applied ({how}): ")
    assert around.startswith(f"vllm-livepatch: must = true: around is not applied ({how}): ")
    assert "failed=another,around " in done.greeting
    strict = sandbox.python(IMPORT, LIVEPATCH="strict")
    assert [line.replace("LIVEPATCH=strict: ", "") for line in strict.others] == [
        another,
        around.replace("must = true: ", ""),
    ]


def test_one_that_is_applied_or_not_wanted_ends_nothing(sandbox: Sandbox) -> None:
    sandbox.patch(must=True)
    sandbox.generate()
    assert (sandbox.python(USE_STEP).code, sandbox.python(USE_STEP).out) == (0, PATCHED)
    edit(sandbox)
    assert sandbox.python(USE_STEP).code == 78
    for environ in ({"LIVEPATCH": "off"}, {"LIVEPATCH_AROUND": "off"}):
        done = sandbox.python(USE_STEP, **environ)
        assert (done.code, done.out) == (0, STOCK)
    sandbox.patch(variant=[{"releases": ["1.0"], "code": sandbox.fingerprints(STEP), "verdict": "fixed-upstream"}])
    sandbox.generate()
    assert sandbox.python(USE_STEP).code == 0


def test_what_is_said_of_the_one_that_ends_it_is_all_that_must_be_applied(sandbox: Sandbox) -> None:
    """At one start, also of modules that this start would have come to later."""
    sandbox.patch(must=True)
    sandbox.patch("later", [WORK], must=True)
    sandbox.patch("free-to-fail", [WORK])
    sandbox.generate()
    edit(sandbox)
    worker = sandbox.site / "fakeengine/worker.py"
    worker.write_text(worker.read_text("utf-8").replace("[item]", "[item, 0]"), "utf-8")
    done = sandbox.python(IMPORT)
    ended = [line.split()[4] for line in done.others if line.startswith("vllm-livepatch: must = true: ")]
    assert (done.code, ended) == (78, ["around", "later"])
    assert any(line.startswith("vllm-livepatch: free-to-fail is not applied (drifted): ") for line in done.others)


def test_overtaken_as_it_is_imported_ends_the_process_and_later_ends_nothing(sandbox: Sandbox) -> None:
    sandbox.write({"fakeengine/all.py": "import fakeengine.scheduler as s\ns.Scheduler.step = lambda self, n: [n]\n"})
    sandbox.patch(must=True)
    sandbox.generate()
    done = sandbox.python("import fakeengine.all; print('on')")
    assert (done.code, done.out) == (78, "")
    assert done.others[-1].startswith("vllm-livepatch: must = true: around is not applied (overwritten): ")
    done = sandbox.python(f"{USE_STEP}; Scheduler.step = None")
    assert (done.code, done.out) == (0, PATCHED)

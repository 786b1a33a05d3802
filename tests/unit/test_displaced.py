"""Which shipped patches a diff turns off, on trees made up for each test; real releases: tests/releases."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.bundles import catalogue, displaced
from vllm_livepatch.tools.commands import from_diff
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases.sources import SourcesError

from tests.unit.support import STEP, WORK, Cli, Sandbox

DIFF = """\
--- a/fakeengine/scheduler.py
+++ b/fakeengine/scheduler.py
@@ -1,3 +1,3 @@
 class Scheduler:
     def step(self, number):
-        return [number]
+        return [number, number]
"""


@pytest.fixture
def mine(sandbox: Sandbox) -> Callable[[str], catalogue.Entry]:
    """A patch folder for a diff of the fake engine."""

    def written(diff: str) -> catalogue.Entry:
        folder = sandbox.root / "mine"
        folder.mkdir(exist_ok=True)
        code = sandbox.fingerprints("fakeengine.scheduler:")
        (folder / "change.diff").write_text(diff)
        (folder / "patch.toml").write_text(
            'title = "mine"\npackage = "fakeengine"\ndiff = "change.diff"\ntargets = ["fakeengine.scheduler"]\n'
            '[[variant]]\nreleases = ["1.0", "2.0"]\nverdict = "needed"\napplies = true\n'
            f'code = {{"fakeengine.scheduler" = "{code["fakeengine.scheduler:"]}"}}\n'
        )
        return catalogue.read(folder)

    return written


def of(sandbox: Sandbox, entry: catalogue.Entry) -> tuple[dict[str, str], str]:
    def tree(package: str, release: str) -> Tree:
        if release != "1.0":
            raise SourcesError("no network")
        return Tree([str(sandbox.site)])

    shipped = [one.patch for one in sandbox.entries().values()]
    return displaced.displaced(entry, shipped, tree)


def test_what_is_bound_to_changed_code(sandbox: Sandbox, mine: Callable[[str], catalogue.Entry]) -> None:
    free = "fakeengine.scheduler:Scheduler.free"
    sandbox.patch("wraps-it")
    sandbox.patch("calls-it", [free], calls=[STEP])
    sandbox.patch("wraps-another-method", [free])
    sandbox.patch("wraps-another-module", [WORK])
    print_of = sandbox.fingerprints(STEP)
    sandbox.patch("needed-elsewhere", variant=[{"releases": ["9.0"], "code": print_of}])
    assert of(sandbox, mine(DIFF)) == ({"wraps-it": "1.0", "calls-it": "1.0"}, "")


def test_a_diff_that_brings_the_fix(sandbox: Sandbox, mine: Callable[[str], catalogue.Entry]) -> None:
    """The patch is not needed any more, and so nothing is lost."""
    before = sandbox.fingerprints(STEP)
    text = (sandbox.site / "fakeengine/scheduler.py").read_text()
    (sandbox.site / "fakeengine/scheduler.py").write_text(text.replace("[number]", "[number, number]"))
    after = sandbox.fingerprints(STEP)
    (sandbox.site / "fakeengine/scheduler.py").write_text(text)
    fixed = {"releases": ["2.0"], "verdict": "fixed-upstream", "code": after}
    sandbox.patch(variant=[{"releases": ["1.0"], "code": before}, fixed])
    assert of(sandbox, mine(DIFF)) == ({}, "")


def test_a_comment_and_a_diff_without_a_place(sandbox: Sandbox, mine: Callable[[str], catalogue.Entry]) -> None:
    sandbox.patch()
    assert of(sandbox, mine(DIFF.replace("[number, number]", "[number]  # one"))) == ({}, "")
    assert of(sandbox, mine(DIFF.replace("class Scheduler", "class Schedule"))) == ({}, "")


def test_a_release_that_cannot_be_read(sandbox: Sandbox, mine: Callable[[str], catalogue.Entry]) -> None:
    sandbox.patch(variant=[{"releases": ["1.0", "2.0"], "code": sandbox.fingerprints(STEP)}])
    assert of(sandbox, mine(DIFF)) == ({"around": "1.0"}, "no network")


def test_releases_as_people_name_them() -> None:
    assert displaced.spans("vllm", ["0.30.0", "0.28.0", "0.29.0"]) == "0.28.0 to 0.30.0"
    assert displaced.spans("vllm", ["0.28.0", "0.30.0", "9.9.dev1"]) == "0.28.0, 0.30.0, 9.9.dev1"


def test_the_name_of_a_shipped_patch_is_taken(tmp_path: Path, cli: Cli) -> None:
    for name in ("kv-block-reaper", "kv_block_reaper"):
        with pytest.raises(UserError, match="kv-block-reaper is a patch that comes with vllm-livepatch"):
            from_diff.make(DIFF.replace("fakeengine", "vllm").encode(), name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_shipped_is_compared(sandbox: Sandbox) -> None:
    """Somebody's own package is nothing that the registry is asked for."""
    sandbox.patch()
    shipped = {name for name, entry in catalogue.load([sandbox.patches]).items() if displaced.is_shipped(entry.folder)}
    assert shipped == set(catalogue.load())


def test_the_warning_says_what_comes_back(
    sandbox: Sandbox, mine: Callable[[str], catalogue.Entry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the words of the patch's own folder: its sentences where it has some, else its few words."""
    monkeypatch.setattr(displaced, "is_shipped", lambda folder: folder.parent == sandbox.patches)
    sandbox.patch("told", about={"fault": "stuck", "without": "requests wait\nfor ever. Answers are right"})
    sandbox.patch("short", about={"fault": "stuck"})
    sandbox.patch("untold")
    entries = [*sandbox.entries().values(), mine(DIFF.replace("2.0", "1.0"))]
    disables = "on fakeengine 1.0: it changes the same code"
    *found, last = displaced.warnings(entries, lambda *_: Tree([str(sandbox.site)]))
    ask = f"`vllm-livepatch prove short told untold --patch-dir {sandbox.root} --out FILE`"
    assert last == f"{ask} finds out which of them are right on that code, for `generate --proofs FILE`"
    assert sorted(found) == [
        f"mine disables short {disables}; without it, stuck",
        f"mine disables told {disables}; without it, requests wait for ever. Answers are right",
        f"mine disables untold {disables}",
    ]


def test_what_a_diff_is_instead_of_is_no_loss(sandbox: Sandbox, mine: Callable[[str], catalogue.Entry]) -> None:
    sandbox.patch("wraps-it")
    sandbox.patch("calls-it", ["fakeengine.scheduler:Scheduler.free"], calls=[STEP])
    file = mine(DIFF).folder / "patch.toml"
    file.write_text(f'instead_of = ["wraps-it"]\n{file.read_text()}')
    assert of(sandbox, catalogue.read(file.parent)) == ({"calls-it": "1.0"}, "")


@pytest.mark.parametrize(("outcome", "disabled"), [("proven", {}), ("no-fault", {}), ("failed", {"around": "1.0"})])
def test_what_was_proven_on_what_the_diff_makes_is_no_loss(
    sandbox: Sandbox, mine: Callable[[str], catalogue.Entry], outcome: str, disabled: dict[str, str]
) -> None:
    before = sandbox.fingerprints(STEP)
    text = (sandbox.site / "fakeengine/scheduler.py").read_text()
    (sandbox.site / "fakeengine/scheduler.py").write_text(text.replace("[number]", "[number, number]"))
    proof = {"code": sandbox.fingerprints(STEP), "outcome": outcome}
    (sandbox.site / "fakeengine/scheduler.py").write_text(text)
    sandbox.patch(variant=[{"releases": ["1.0"], "code": before}], proof=[proof])
    assert of(sandbox, mine(DIFF)) == (disabled, "")

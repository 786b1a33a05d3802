"""A release that nobody listed, and that has none of a patch's targets: said, and where they are now."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.compatibility import check, moved
from vllm_livepatch.tools.releases import published

from tests.unit.local_index import make_wheel
from tests.unit.support import PATCHED, USE_STEP, Cli, Sandbox

OTHER = "fakeengine.before.tracker:Tracker.hit"
TRACKER = "class Tracker:\n    def hit(self):\n        return 1\n"


@pytest.fixture
def engine(sandbox: Sandbox) -> Sandbox:
    """A patch of `scheduler`, and one of a module that the installed release has under another name."""
    sandbox.patch()
    sandbox.write({"fakeengine/before/__init__.py": "", "fakeengine/before/tracker.py": TRACKER})
    sandbox.patch("other", [OTHER])
    (sandbox.site / "fakeengine/before/tracker.py").unlink()
    sandbox.write({"fakeengine/after/__init__.py": "", "fakeengine/after/tracker.py": TRACKER})
    sandbox.write({"fakeengine/_version.py": "version = '1.0.post1'\n"})
    sandbox.generate()
    return sandbox


def test_a_process_says_it_at_the_first_targets_import(engine: Sandbox) -> None:
    done = engine.python(USE_STEP)
    assert (done.code, done.out) == (0, PATCHED)
    assert f"other is not applied (gone): fakeengine 1.0.post1 has no {OTHER}" in done.err
    assert engine.reported("other")["verdict"] == "drifted"
    assert engine.reported("other")["reason"] == "gone"


def test_strict_ends_before_it_serves(engine: Sandbox) -> None:
    done = engine.python(USE_STEP, LIVEPATCH="strict")
    assert (done.code, done.out) == (78, "")
    assert "other" in done.err


@pytest.mark.parametrize(("mode", "code"), [("auto", 0), ("strict", 78)])
def test_where_every_target_is_gone_the_packages_import_says_it(engine: Sandbox, mode: str, code: int) -> None:
    shutil.rmtree(engine.patches / "around")
    engine.generate()
    done = engine.python("import fakeengine.after.tracker; print('serves')", LIVEPATCH=mode)
    assert (done.code, done.out) == (code, "" if code else "serves\n")
    assert f"other is not applied (gone): fakeengine 1.0.post1 has no {OTHER}" in done.err


def test_the_packages_import_alone_loads_nothing_where_a_target_is_there(engine: Sandbox) -> None:
    done = engine.python("import fakeengine, json, sys; print([name for name in sys.modules if 'livepatch' in name])")
    assert (done.out, done.err) == ("[]\n", "")


@pytest.mark.parametrize("toggle", ["off", "force"])
def test_off_is_off_and_nothing_can_be_forced(engine: Sandbox, toggle: str) -> None:
    done = engine.python(USE_STEP, LIVEPATCH="strict", LIVEPATCH_OTHER=toggle)
    assert done.code == (0 if toggle == "off" else 78)


def test_a_listed_release_lacks_it_rightly(engine: Sandbox) -> None:
    engine.patch("other", [OTHER], variant=[{"releases": ["1.0.post1"], "verdict": "not-present", "code": {}}])
    engine.generate()
    done = engine.python(USE_STEP, LIVEPATCH="strict")
    assert (done.code, done.out) == (0, PATCHED)


def test_check_names_the_place(engine: Sandbox, cli: Cli) -> None:
    done = cli("check", "--site-packages", str(engine.site), "--no-diff", "--patch-dir", str(engine.patches))
    assert done.code == 1
    patch = catalogue.read(engine.patches / "other").patch
    tree = Tree([str(engine.site)])
    assert moved.places(patch, installed.look(patch, tree), tree) == {OTHER: "fakeengine.after.tracker"}
    combined = check.CombinedTree(None, {"fakeengine": tree})
    assert moved.places(patch, installed.look(patch, combined), combined) == {OTHER: "fakeengine.after.tracker"}


def test_of_a_wheel_too_and_only_where_the_code_is_the_same(engine: Sandbox, tmp_path: Path) -> None:
    patch = catalogue.read(engine.patches / "other").patch
    files = {file.relative_to(engine.site).as_posix(): file.read_bytes() for file in engine.site.rglob("*.py")}
    wheel = tmp_path / "fakeengine-1.1-py3-none-any.whl"
    wheel.write_bytes(make_wheel("fakeengine", "1.1", files))
    tree = published.wheel_file(wheel)
    assert moved.places(patch, installed.look(patch, tree), tree) == {OTHER: "fakeengine.after.tracker"}
    engine.write({"fakeengine/after/tracker.py": TRACKER.replace("1", "2")})
    edited = Tree([str(engine.site)])
    assert moved.places(patch, installed.look(patch, edited), edited) == {}

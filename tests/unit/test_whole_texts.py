"""A module whose whole text a release has is known by its digest: nothing is parsed, and the answer is the same."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import cache, fingerprint, installed
from vllm_livepatch.sitecustomize.decision import Patch, Variant
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.bundles import catalogue, whole_texts

from tests.unit.support import PATCHED, USE_STEP, Cli, Sandbox

COUNTED = (
    f"USE_STEP = {USE_STEP!r}\n"
    + """
import sys
parsed = []
def hook(event, arguments):
    if event == "compile" and arguments[1] == "<vllm-livepatch reads>":
        parsed.append(arguments[0])
sys.addaudithook(hook)
exec(USE_STEP)
print(sum("class Scheduler" in str(text if isinstance(text, str) else text.decode()) for text in parsed))
"""
)


@pytest.fixture
def locked(sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    sandbox.patch(variant=[])
    done = cli("lock", str(sandbox.patches / "around"), "--site-packages", str(sandbox.site))
    assert done.code == 0, done.err
    text = (sandbox.site / "fakeengine/scheduler.py").read_text("utf-8")
    texts = {"fakeengine.scheduler": {cache.text_digest(text): ["1.0"]}}
    monkeypatch.setattr(whole_texts, "read", lambda patches: texts)
    sandbox.generate()
    return sandbox


def test_a_process_parses_nothing_that_a_release_has(locked: Sandbox) -> None:
    assert locked.python(COUNTED, XDG_CACHE_HOME="/nowhere").out == f"{PATCHED}0\n"
    assert locked.reported()["verdict"] == "needed"


@pytest.mark.parametrize("edit", ["\n# {}\n", "\nother = {!r}\n"])
def test_another_text_is_parsed(locked: Sandbox, edit: str) -> None:
    file = locked.site / "fakeengine/scheduler.py"
    file.write_text(file.read_text("utf-8") + edit.format(uuid.uuid4().hex), "utf-8")
    answer, parsed = locked.python(COUNTED, XDG_CACHE_HOME="/nowhere").out.splitlines()
    assert f"{answer}\n" == PATCHED
    assert int(parsed) >= 1


def test_a_text_of_a_release_that_the_patch_does_not_list_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text("def f(): return 1\n")
    texts = {"engine": {cache.text_digest("def f(): return 1\n"): ["1.0"]}}
    tree = Tree([str(tmp_path)])

    def look(*releases: str) -> str | None:
        forms = (Variant({"engine:f": "of the lock"}, releases),)
        patch = Patch("p", "engine", "", ("engine:f",), (), forms)
        return installed.look(patch, tree, texts=texts).code["engine:f"]

    parsed = fingerprint.of_names("def f(): return 1\n", {"f": "f"})["f"]
    without = Variant({}, ("0.9",), verdict="not-present")
    texts["engine"] = {digest: ["0.9", "1.0"] for digest in texts["engine"]}
    patch = Patch("p", "engine", "", ("engine:f",), (), (without, Variant({"engine:f": "of the lock"}, ("1.0",))))
    assert installed.look(patch, tree, texts=texts).code["engine:f"] == "of the lock"
    only = Patch("p", "engine", "", ("engine:f",), (), (without,))
    assert installed.look(only, tree, texts=texts).code["engine:f"] == parsed
    texts["engine"] = {digest: ["1.0"] for digest in texts["engine"]}
    assert look("1.0") == look("0.9", "1.0") == "of the lock"
    assert look("1.1") == parsed


def test_a_bundle_has_the_texts_of_its_patches_modules(locked: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = json.loads((locked.package / "catalogue.json").read_text("utf-8"))["texts"]
    assert list(texts) == ["fakeengine.scheduler"]
    monkeypatch.undo()
    patch = catalogue.load()["failed-loads"].patch
    assert set(whole_texts.read([patch])) == {name.partition(":")[0] for name in patch.names}

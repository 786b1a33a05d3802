"""What is installed, without importing it; facts that say what cannot be; and a patch's code that imports what is not there."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.sitecustomize import captures, installed, patch_code
from vllm_livepatch.sitecustomize.decision import PatchError
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.sitecustomize.installed import Overlay, Tree
from vllm_livepatch.sitecustomize.wrapping import ApplyError


@pytest.fixture
def site(tmp_path: Path) -> Path:
    files = {
        "engine/__init__.py": "",
        "engine/part.py": "text = 1\n",
        "vendors_engine-2.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: vendors-engine\nVersion: 2.5\n",
        "vendors_engine-2.5.dist-info/RECORD": "engine/__init__.py,,\nengine/part.py,,\n",
        "other-9.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 9\n",
        "other-9.dist-info/RECORD": "other.py,,\nother/engine/__init__.py,,\n",
        "bare-9.dist-info/METADATA": "Metadata-Version: 2.1\nName: bare\nVersion: 9\n",
        "torch/__init__.py": "raise SystemExit('imported')\n",
        "torch/version.py": "__version__ = '2.9'\nhip: str | None = None\ncuda = '13'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    return tmp_path


def test_the_release_is_that_of_the_distribution_whose_files_include_the_package(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree([str(site)])
    assert installed.release("engine", tree) == "2.5"
    (site / "engine/_version.py").write_text("version_tuple = (3,)\n__version__ = version = '2.6.dev1'\n")
    assert installed.release("engine", tree) == "2.6.dev1"
    for unclear in ("(", "version = 3\n", "other = '1'\n", "version = f()\n"):
        (site / "engine/_version.py").write_text(unclear)
        assert installed.release("engine", tree) == "2.5"
    asked: list[Any] = []

    def counted(**search: Any) -> Any:
        asked.append(search)
        return distributions(**search)

    monkeypatch.setattr(installed, "distributions", counted)
    assert installed.release("none", tree) is None
    assert asked == []  # it takes long, where much is installed
    assert installed.release("torch", tree) is None
    assert installed.release("torch", Overlay(tree, {})) is None
    assert len(asked) == 1, "a process decides on dozens of patches, each of which asks"


@pytest.mark.parametrize(("hip", "expected"), [("None", False), ("'7.1'", True), ("", False)])
def test_torch_for_rocm_is_recognized_by_its_own_word(site: Path, hip: str, expected: bool) -> None:
    (site / "torch/version.py").write_text(
        f"__version__ = '2.9'\nhip: str | None = {hip}\n" if hip else "cuda = '13'\n"
    )
    assert installed._is_rocm(Tree([str(site)])) is expected


@pytest.mark.parametrize("auto", ["needed", "rocm", "traced", "off"])
@pytest.mark.parametrize("hip", ["None", "'7.1'"])
def test_only_for_patches_that_rocm_needs_torch_is_looked_at(site: Path, auto: Any, hip: str) -> None:
    (site / "torch/version.py").write_text(f"hip = {hip}\n")
    patch = to_patch("one", {**FACTS, "targets": ["engine.part:text"], "variant": [], "auto": auto})
    found = installed.look(patch, Tree([str(site)]))
    assert found.rocm is (auto == "rocm" and hip != "None")
    assert (found.release, found.companions, list(found.code)) == ("2.5", {}, ["engine.part:text"])


def test_a_tree_reads_sources_and_imports_nothing(site: Path) -> None:
    tree = Tree([str(site)])
    assert (tree.source("engine.part"), tree.source("engine.none")) == ("text = 1\n", None)
    assert (tree.source("none.part"), tree.source("engine.part.below")) == (None, None)
    assert tree.origin("engine.part") == str(site / "engine/part.py")
    assert (tree.origin("engine.none"), tree.has("engine"), tree.has("engine.part"), tree.has("none")) == (
        None,
        True,
        False,
        False,
    )
    (site / "engine/part.py").write_bytes(b"# coding: utf-8\n'\xff'\n")
    assert tree.source("engine.part") is None
    changed = Overlay(tree, {"engine.part": "text = 2\n"})
    assert (changed.source("engine.part"), changed.source("engine")) == ("text = 2\n", "")
    assert changed.origin("engine.part") == str(site / "engine/part.py")


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_a_loader_that_cannot_give_the_source_has_none(
    site: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """As a zip file that was replaced, or a file that may not be read."""

    def refuse(name: str) -> str:
        raise error(name)

    tree = Tree([str(site)])
    spec = SimpleNamespace(name="part", loader=SimpleNamespace(get_source=refuse))
    monkeypatch.setattr(tree, "_spec", lambda module: spec)
    assert tree.source("engine.part") is None
    spec.loader = SimpleNamespace()  # a compiled module's has no such method
    assert tree.source("engine.part") is None


FACTS: dict[str, Any] = {
    "title": "one",
    "package": "engine",
    "targets": ["engine.a:f"],
    "variant": [{"releases": ["1"], "code": {"engine.a:f": "0"}}],
}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"targets": ["engine.a"]}, "is not module:qualname"),
        ({"targets": ["engine.a b:f"]}, "is not module:qualname"),
        ({"targets": ["engine.a:f-g"]}, "is not module:qualname"),
        ({"targets": ["engine.a:"]}, "is not module:qualname"),
        ({"title": ""}, "title must be a text"),
        ({"title": 3}, "title must be a text"),
        ({"package": None}, "package must be a text"),
        ({"targets": "engine.a:f"}, "targets"),
        ({"variant": {}}, "variant must be an array of tables"),
        ({"variant": ["1"]}, "variant must be an array of tables"),
        ({"variant": [{"releases": ["1"]}]}, "a variant needs releases and code"),
        ({"variant": [{"releases": ["1"], "code": ["engine.a:f"]}]}, "a variant needs releases and code"),
        ({"variant": [{"code": {"engine.a:f": "0"}}]}, "a variant needs releases and code"),
        ({"variant": [{"releases": [], "code": {"engine.a:f": "0"}}]}, "a variant needs releases and code"),
        ({"variant": [{"releases": "1", "code": {}}]}, "releases must be a list of texts"),
        (
            {"variant": [{"releases": ["1"], "code": {}, "verdict": "no"}]},
            "verdict is needed, fixed-upstream or not-pres",
        ),
        (
            {"variant": [{"releases": ["1"], "code": {"engine.a:g": "0"}}]},
            "names engine.a:g, which is neither a target",
        ),
        ({"variant": [{"releases": ["1"], "code": {}}]}, "the variant of 1 has no target"),
        ({"targets": [], "variant": []}, "targets is empty"),
        ({"auto": "on"}, "auto is needed, rocm, traced or off, not 'on'"),
        ({"code": {"engine.a:g": "0"}}, "code has a name that is neither a target nor a call"),
        ({"option": [{"name": "SECONDS"}]}, "an option needs a name and a default"),
        ({"option": [{"default": 1}]}, "name must be a text"),
        ({"version": 0}, "version is a whole number from 1 on, not 0"),
        ({"version": -1}, "version is a whole number from 1 on, not -1"),
        ({"version": "2"}, "version is a whole number from 1 on, not '2'"),
        ({"version": 1.0}, "version is a whole number from 1 on, not 1.0"),
        ({"version": True}, "version is a whole number from 1 on, not True"),
    ],
)
def test_facts_that_cannot_be(changed: dict[str, Any], says: str) -> None:
    to_patch("one", FACTS)
    with pytest.raises(PatchError, match=says):
        to_patch("one", {**FACTS, **changed})


def test_code_that_all_variants_have_is_a_part_of_each() -> None:
    facts = {**FACTS, "targets": ["engine.a:f", "engine.a:g"], "code": {"engine.a:g": "1"}}
    assert dict(to_patch("one", facts).variants[0].code) == {"engine.a:f": "0", "engine.a:g": "1"}
    whole = {"engine.a:f": "1", "engine.a:g": "1"}
    assert dict(to_patch("one", {**facts, "code": whole}).variants[0].code) == {"engine.a:f": "0", "engine.a:g": "1"}


COMPANION = {"package": "other", "releases": ["2"], "code": {"other.b:g": "1"}}


@pytest.mark.parametrize(
    ("companion", "calls", "says"),
    [
        ({**COMPANION, "package": "engine"}, ["other.b:g"], "a companion is of another package than engine"),
        (COMPANION, [], "what a patch relies on of other stands in calls, and it wraps none of it"),
        ({**COMPANION, "package": "more"}, ["other.b:g"], "what a patch relies on of more stands in calls"),
        (
            {**COMPANION, "code": {"other.b:h": "1"}},
            ["other.b:g"],
            "other 2 names other.b:h, which is no call of other",
        ),
        ({**COMPANION, "code": {}}, ["other.b:g"], "has code, or the verdict not-present, and not both"),
        ({**COMPANION, "verdict": "not-present"}, ["other.b:g"], "has code, or the verdict not-present, and not both"),
    ],
)
def test_companions_that_cannot_be(companion: dict[str, Any], calls: list[str], says: str) -> None:
    to_patch("one", {**FACTS, "calls": ["other.b:g"], "companion": [COMPANION]})
    to_patch(
        "one", {**FACTS, "calls": ["other.b:g"], "companion": [{**COMPANION, "code": {}, "verdict": "not-present"}]}
    )
    with pytest.raises(PatchError, match=says):
        to_patch("one", {**FACTS, "calls": calls, "companion": [companion]})


def test_a_version_is_a_whole_number_from_one_on() -> None:
    assert [to_patch("one", {**FACTS, "version": version}).version for version in (None, 1, 2)] == [None, 1, 2]


def test_modules_are_found_among_what_only_calls_itself_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """cffi's libraries say that they are modules, and have no names."""
    owner = ModuleType("owner")
    lib = type("Lib", (), {"__slots__": (), "__class__": property(lambda self: ModuleType)})()
    assert isinstance(lib, ModuleType)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "modules", {"none": None, "odd": object(), "lib": lib, "owner": owner})
        found = captures._modules()
    assert list(found.values()) == [owner]


@pytest.mark.parametrize(("archive", "anew"), [("/place/bundle.zip", ["/place/bundle.zip/patches"]), (None, [])])
def test_of_a_bundle_in_a_zip_file_python_forgets_where_its_parts_lay(
    monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture, archive: str | None, anew: list[str]
) -> None:
    """Another zip file may have taken its place since; what other importers remember stays."""
    importers: dict[str, Any] = {name: mocker.Mock() for name in ("/place/bundle.zip/patches", "/place", "/other.zip")}
    monkeypatch.setattr(sys, "path_importer_cache", {**importers, "/place/bundle.zip/none": None})
    root, module = ModuleType("livepatch"), ModuleType("livepatch.patches.a_patch.wrappers")
    root.__loader__ = SimpleNamespace(archive=archive) if archive else SimpleNamespace()
    packages = {name: ModuleType(name) for name in ("livepatch.patches", "livepatch.patches.a_patch")}
    for name, found in {root.__name__: root, **packages, module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, found)
    assert patch_code.load("livepatch", "a-patch") is module
    assert [place for place, importer in importers.items() if importer.invalidate_caches.called] == anew


def test_what_a_patchs_code_lacks_of_others_is_no_replaced_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the patch imports something of the engine's that is not there, it says so."""

    def missing(name: str) -> Any:
        def load(asked: str, *rest: Any) -> Any:
            if not asked.startswith("livepatch."):
                return __import__(asked, *rest)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        return load

    monkeypatch.setattr(patch_code, "__import__", missing("engine.livepatch"), raising=False)
    monkeypatch.setitem(sys.modules, "livepatch", ModuleType("livepatch"))
    with pytest.raises(ModuleNotFoundError, match=r"engine\.livepatch"):
        patch_code.load("livepatch", "one-patch")
    monkeypatch.setattr(patch_code, "__import__", missing("livepatch.patches.one_patch"))
    with pytest.raises(ApplyError, match="was replaced and is no longer there: restart it"):
        patch_code.load("livepatch", "one-patch")

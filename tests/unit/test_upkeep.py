"""The commands of upkeep as a person calls them: help, and one line for bad input."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import facts
from vllm_livepatch.sitecustomize.decision import Option, Variant
from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.releases import published
from vllm_livepatch.tools.toml import tomllib
from vllm_livepatch.tools.upkeep import regroup, versions

from tests.unit.support import STEP, Sandbox, finish

TOOLS = "vllm_livepatch.tools."
PAGE = Path(__file__).resolve().parents[2] / "docs/patch-toml.md"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["upkeep.mutation", "run", "nope"], "mutation: no module of tools/upkeep/mutation.toml is nope"),
        (["upkeep.newrelease"], "newrelease: Missing argument 'PKG==VERSION'."),
        (["upkeep.newrelease", "vllm"], "newrelease: 'vllm' is not vllm==VERSION or lmcache==VERSION"),
        (["upkeep.regroup"], "regroup: Missing argument 'NAME...'."),
        (["upkeep.regroup", "idel_stepping"], "regroup: no patch is called idel_stepping; did you mean idle-stepping?"),
        (["upkeep.versions", "more"], "versions: Got unexpected extra argument(s) (more)"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str) -> None:
    done = finish([sys.executable, "-m", TOOLS + words[0], *words[1:]], os.environ)
    assert (done.code, done.out) == (2, "")
    (said,) = done.lines
    assert said.replace(" arguments (", " argument(s) (") == line


@pytest.mark.parametrize(
    "module", ["bench", "upkeep.mutation", "upkeep.newrelease", "upkeep.regroup", "upkeep.versions"]
)
def test_help_does_nothing_else(module: str) -> None:
    done = finish([sys.executable, "-m", TOOLS + module, "--help"], os.environ)
    assert (done.code, done.err) == (0, "")
    assert "Usage" in done.out


@pytest.mark.parametrize(
    ("module", "name", "lacking"), [("bench", "bench", "filelock"), ("lab.figures", "figures", "numpy")]
)
def test_an_extra_that_is_not_installed_is_named(module: str, name: str, lacking: str, tmp_path: Path) -> None:
    (tmp_path / f"{lacking}.py").write_text(f"raise ImportError(\"No module named '{lacking}'\")\n")
    done = finish([sys.executable, "-m", TOOLS + module, "--help"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.code, done.out) == (2, "")
    (line,) = done.lines
    assert line.startswith(f"{name}: more packages are needed (in the checkout: pip install '.[lab]'): ")
    assert line.endswith(f"): No module named '{lacking}'")
    assert line.count("packages") == 1


# regroup


@pytest.fixture
def new_patch(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A patch of which only the variants are to be written; releases of the fake engine: 1.0 and 1.1 are alike."""

    def tree(package: str, release: str) -> Tree:
        place = sandbox.root / release
        text = "return [number]" if release in ("1.0", "1.1") else "return [number, number]"
        source = f"class Scheduler:\n    def step(self, number):\n        {text}\n"
        sandbox.write({"fakeengine/__init__.py": "", "fakeengine/scheduler.py": source}, place)
        return Tree([str(place)])

    def written(variants: str) -> Path:
        sandbox.patch("my-fix", calls=["fakeengine.scheduler:Scheduler.__bases__"])
        file = sandbox.patches / "my_fix/patch.toml"
        file.write_text(file.read_text("utf-8").partition("[[variant]]")[0] + variants, "utf-8")
        return file

    monkeypatch.setattr(published, "tree", tree)
    monkeypatch.setattr(versions, "folders", lambda: [sandbox.patches / "my_fix"])
    return written


@pytest.mark.parametrize("name", ["my-fix", "my_fix"])
def test_a_new_patch_gets_its_fingerprints(new_patch: Callable[[str], Path], name: str) -> None:
    fixed = '[[variant]]\nreleases = ["2.0"]\nverdict = "fixed-upstream"\n'
    file = new_patch(f'[[variant]]\nreleases = ["1.0", "1.1", "1.2"]\n\n{fixed}')
    regroup.main([name])
    variants = catalogue.read(file.parent).patch.variants
    assert [(one.releases, one.verdict) for one in variants] == [
        (("1.0", "1.1"), "needed"),
        (("1.2",), "needed"),
        (("2.0",), "fixed-upstream"),
    ]
    assert variants[0].code[STEP] != variants[1].code[STEP] == variants[2].code[STEP]
    before = file.read_text("utf-8")
    regroup.main([name])
    assert file.read_text("utf-8") == before


@pytest.mark.parametrize("variants", ["", "[[variant]]\n", "[[variant]]\nreleases = []\n", "[[variant"])
def test_a_patch_that_lists_no_releases_is_left_as_it_is(new_patch: Callable[[str], Path], variants: str) -> None:
    file = new_patch(variants)
    before = file.read_text("utf-8")
    with pytest.raises(UserError, match=r"^patch my-fix: ") as caught:
        regroup.main(["my-fix"])
    assert "\n" not in str(caught.value)
    assert file.read_text("utf-8") == before


# Its page


def test_each_key_is_explained() -> None:
    text = PAGE.read_text("utf-8")
    names = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}
    keys = {name.strip("[]") for name in names}
    assert keys >= facts._ENTRIES
    assert keys >= {*Variant.__dataclass_fields__, *Option.__dataclass_fields__}


def test_what_it_shows_is_a_patch() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    patch = facts.to_patch("mine", tomllib.loads(block))
    assert set(patch.variants[0].code) == set(patch.names)

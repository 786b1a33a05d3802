"""The commands of upkeep as a person calls them: help, and one line for bad input."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from vllm_livepatch.sitecustomize import facts
from vllm_livepatch.sitecustomize.decision import Option, Variant
from vllm_livepatch.tools.toml import tomllib

from tests.unit.support import finish

TOOLS = "vllm_livepatch.tools."
PAGE = Path(__file__).resolve().parents[2] / "docs/patch-toml.md"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["upkeep.mutants", "nope"], "mutants: no module of patches, sitecustomize, tools is nope"),
        (["upkeep.newrelease"], "newrelease: Missing argument 'PKG==VERSION'."),
        (["upkeep.newrelease", "vllm"], "newrelease: 'vllm' is not vllm==VERSION or lmcache==VERSION"),
        (["upkeep.versions", "more"], "versions: Got unexpected extra argument(s) (more)"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str) -> None:
    done = finish([sys.executable, "-m", TOOLS + words[0], *words[1:]], os.environ)
    assert (done.code, done.out) == (2, "")
    (said,) = done.lines
    assert said.replace(" arguments (", " argument(s) (") == line


@pytest.mark.parametrize("module", ["bench", "upkeep.mutants", "upkeep.newrelease", "upkeep.versions"])
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


# Its page


def test_each_key_is_explained() -> None:
    text = PAGE.read_text("utf-8")
    names = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)}
    keys = {name.strip("[]") for name in names}
    assert keys >= facts._ENTRIES
    assert keys >= {*Variant.__dataclass_fields__, *Option.__dataclass_fields__}


def test_what_it_shows_is_a_patch() -> None:
    block, *_ = re.findall(r"```toml\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    patch = facts.to_patch("mine", tomllib.loads(block))
    assert patch.targets
    assert not patch.variants

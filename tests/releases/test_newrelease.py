"""`newrelease` on a copy of the project that knows nothing of the newest releases gives what is committed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import registry, releases_file
from vllm_livepatch.tools.toml import tomllib
from vllm_livepatch.tools.upkeep import catalogue_edits

ROOT = Path(__file__).parents[2]
WRITE = """
import sys
from vllm_livepatch.tools.upkeep import newrelease
assert str(newrelease.ROOT) == sys.argv[3], newrelease.ROOT
for name, done in newrelease.write(sys.argv[1], sys.argv[2]).done.items():
    print(f"{name}: {done}")
"""
DRIVE = """
import sys
from vllm_livepatch.tools.upkeep import newrelease
newrelease.main(f"{sys.argv[1]}=={sys.argv[2]}", 1)
"""


def data_files(root: Path) -> list[Path]:
    return [
        *root.glob("patches/*/patch.toml"),
        *root.glob("tests/releases/*.toml"),
        root / "tools/releases/releases.toml",
    ]


def python(root: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the copy's own tools and data."""
    path = root / "path" / "vllm_livepatch"
    path.mkdir(parents=True, exist_ok=True)
    for room in ("patches", "sitecustomize", "tools"):
        link = path / room
        if not link.is_symlink():
            link.symlink_to(root / room)
    environ = {**os.environ, "PYTHONPATH": str(path.parent)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environ, cwd=root, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project, without what is made and what is not needed."""
    unwanted = shutil.ignore_patterns(".git", "*.egg-info", "__pycache__", ".*_cache", "build", "dist")
    for room in ("patches", "sitecustomize", "tools", "tests/releases"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=unwanted)
    return tmp_path.resolve()


def forget(root: Path, package: str, version: str) -> None:
    """Take a release out of the copy's data."""
    for file in data_files(root):
        text = file.read_text("utf-8")
        if file.name == "releases.toml":
            text = releases_file.without(text, package, version)
        elif file.name == "patch.toml" and package not in packages_of(tomllib.loads(text)):
            continue
        else:
            text = catalogue_edits.without_release(text, version)
        file.write_text(text, "utf-8")


def packages_of(patch: dict[str, Any]) -> set[str]:
    return {patch["package"], *(companion["package"] for companion in patch.get("companion", []))}


def proposed(committed: dict[str, Any], package: str, version: str, previous: str) -> dict[str, Any]:
    """A patch.toml's data as a command can know them: of code that is new, it says what is said of the code before."""
    forms = committed["variant" if committed["package"] == package else "companion"]
    named = [variant for variant in forms if variant["releases"] == [version]]
    before = [variant for variant in forms if previous in variant["releases"]]
    for variant in named:
        for entry in ("verdict", "applies", "facts"):
            variant.pop(entry, None)
            if entry in before[-1]:
                variant[entry] = before[-1][entry]
    return committed


@pytest.mark.parametrize("package", ["vllm", "lmcache"])
def test_the_newest_release_comes_back(package: str, copy: Path) -> None:
    *_, previous, newest = (pin.version for pin in registry.pins(package))
    forget(copy, package, newest)
    assert f'"{newest}"' not in (copy / "tools/releases/releases.toml").read_text("utf-8")
    done = python(copy, WRITE, package, newest, str(copy))
    assert done.returncode == 0, done.stderr
    for file in data_files(copy):
        came = file.read_text("utf-8")
        committed = (ROOT / file.relative_to(copy)).read_text("utf-8")
        if file.name == "patch.toml":
            patch = tomllib.loads(committed)
            if package not in packages_of(patch) or "diff" in patch:
                continue
            assert tomllib.loads(came) == proposed(patch, package, newest, previous), file.parent.name
        elif file.name == "releases.toml":
            assert came == committed
        else:
            assert tomllib.loads(came) == tomllib.loads(committed), file.name


CASE = """
import pytest
from vllm_livepatch.tools.releases import registry
PATCH = "{name}"
@pytest.mark.parametrize("release", [pin.version for pin in registry.pins("vllm")])
def test_it(release):
    assert {holds}
"""


def test_what_the_release_tests_do_not_bear_out_is_taken_back(copy: Path) -> None:
    newest = registry.pins("vllm")[-1].version
    forget(copy, "vllm", newest)
    for file in (copy / "tests/releases").glob("*.py"):
        file.unlink()
    first, second = [name for name, entry in catalogue.load().items() if entry.patch.package == "vllm"][:2]
    for name, holds in ((first, "True"), (second, f"release != {newest!r}")):
        file = copy / "tests/releases" / f"test_{name.replace('-', '_')}.py"
        file.write_text(CASE.format(name=name, holds=holds), "utf-8")
    files = {name: copy / "patches" / name.replace("-", "_") / "patch.toml" for name in (first, second)}
    before = {name: file.read_text("utf-8") for name, file in files.items()}
    done = python(copy, DRIVE, "vllm", newest)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert f"{second}: not as expected" in done.stdout
    assert newest in files[first].read_text("utf-8")
    assert files[second].read_text("utf-8") == before[second]

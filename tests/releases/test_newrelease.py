"""`newrelease` on a copy of the project that knows nothing of the newest releases gives what is committed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.tools import patch_lock
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
        *root.glob("patches/*/patch.lock"),
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
        elif file.name == "patch.lock":
            patch = catalogue.read(ROOT / file.parent.relative_to(root)).patch
            codes = codes_of(text, patch.package)
            codes.pop((package, version), None)
            text = patch_lock.written(patch_lock.grouped(codes), patch.package, patch.names)
        elif file.name == "patch.toml" and tomllib.loads(text)["package"] != package:
            continue
        else:
            text = catalogue_edits.without_release(text, version)
        file.write_text(text, "utf-8")


def codes_of(lock: str, package: str) -> dict[tuple[str, str], Any]:
    forms = patch_lock.forms_of(tomllib.loads(lock), package)
    return {(form.package, release): form.code for form in forms for release in form.releases}


def said_of(patch: dict[str, Any], release: str) -> dict[str, Any]:
    found = [one for one in patch.get("variant", []) if release in one["releases"]]
    return {key: value for one in found for key, value in one.items() if key != "releases"}


def proposed(committed: Path, package: str, version: str, previous: str) -> dict[str, Any]:
    """What a command can know of a release: what is said of one with the same code, else of the one before."""
    patch = tomllib.loads(committed.read_text("utf-8"))
    codes = codes_of((committed.parent / "patch.lock").read_text("utf-8"), patch["package"])
    own = codes.get((package, version))
    alike = [release for (of, release), code in codes.items() if of == package and release != version and code == own]
    return said_of(patch, alike[-1] if alike else previous)


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
            if tomllib.loads(committed)["package"] == package and "diff" not in tomllib.loads(committed):
                wanted = proposed(ROOT / file.relative_to(copy), package, newest, previous)
                assert said_of(tomllib.loads(came), newest) == wanted, file.parent.name
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
    files = {name: copy / "patches" / name.replace("-", "_") / "patch.lock" for name in (first, second)}
    before = {name: file.read_text("utf-8") for name, file in files.items()}
    done = python(copy, DRIVE, "vllm", newest)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert f"{second}: not as expected" in done.stdout
    assert newest in files[first].read_text("utf-8")
    assert files[second].read_text("utf-8") == before[second]

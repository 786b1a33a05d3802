"""Each patch has a version of its own, which changes with its code and facts, and is named wherever the patch is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.upkeep import versions

from tests.unit.support import USE_STEP, Cli, Sandbox

OWN = "preemption_livelock"


def test_no_patch_was_changed_without_its_version() -> None:
    assert versions.current(versions.folders()) == versions.locked(), (
        "run python -m vllm_livepatch.tools.upkeep.versions, which raises the version of each patch that has changed"
    )
    assert all(entry["version"] >= 1 for entry in versions.locked().values())


@pytest.fixture
def copies(tmp_path: Path) -> list[Path]:
    """Two of our own patches, locked at their versions."""
    folders = [folder for folder in versions.folders() if folder.name in (OWN, "stable_request_ids")]
    made = [tmp_path / "patches" / folder.name for folder in folders]
    for folder, copy in zip(folders, made, strict=True):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    versions.raised(made, tmp_path / "lock.toml")
    return made


def edit(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / name).read_text("utf-8")
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1), "utf-8")


CHANGES: dict[str, Callable[[Path], object]] = {
    "its code": lambda folder: edit(folder, "wrappers.py", "def wrappers", "def  wrappers"),
    "its facts": lambda folder: edit(folder, "patch.toml", 'title = "', 'title = "Now: '),
    "one more file": lambda folder: (folder / "more.py").write_text(""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_raises_it_once(copies: list[Path], tmp_path: Path, change: str) -> None:
    lock = tmp_path / "lock.toml"
    folder, other = copies if copies[0].name == OWN else reversed(copies)
    before, others = versions.version(folder), versions.version(other)
    assert versions.current(copies) == versions.locked(lock)
    CHANGES[change](folder)
    assert versions.current(copies) != versions.locked(lock)
    assert versions.raised(copies, lock) == [f"preemption-livelock {before + 1}"]
    assert (versions.version(folder), versions.version(other)) == (before + 1, others)
    assert versions.current(copies) == versions.locked(lock)
    assert catalogue.read(folder).patch.version == before + 1
    assert versions.raised(copies, lock) == []


def test_a_version_that_was_raised_by_hand_stands(copies: list[Path], tmp_path: Path) -> None:
    edit(copies[0], "patch.toml", f"version = {versions.version(copies[0])}\n", "version = 40\n")
    (message,) = versions.raised(copies, tmp_path / "lock.toml")
    assert message.endswith(" 40")
    edit(copies[0], "patch.toml", "version = 40\n", "version = 3\n")  # it never goes down
    assert versions.raised(copies, tmp_path / "lock.toml")[0].endswith(" 41")


def test_what_is_said_to_people_changes_nothing(copies: list[Path], tmp_path: Path) -> None:
    edit(copies[0], "patch.toml", "[about]\n", "[about]\nmore = 'said'\n")
    assert versions.current(copies) == versions.locked(tmp_path / "lock.toml")
    assert versions.raised(copies, tmp_path / "lock.toml") == []


def test_bytecode_changes_nothing(copies: list[Path], tmp_path: Path) -> None:
    (copies[0] / "__pycache__").mkdir()
    (copies[0] / "__pycache__/wrappers.cpython-311.pyc").write_bytes(b"")
    assert versions.current(copies) == versions.locked(tmp_path / "lock.toml")


@pytest.mark.parametrize("version", [0, -1, True, "2", 1.5])
def test_what_is_no_version(sandbox: Sandbox, version: object) -> None:
    sandbox.patch(version=version)
    with pytest.raises(UserError, match="version is a whole number from 1 on"):
        sandbox.entries()


def test_it_is_named_wherever_the_patch_is(sandbox: Sandbox, cli: Cli) -> None:
    sandbox.patch(version=7)
    sandbox.generate()
    done = sandbox.python(USE_STEP)
    assert "; applied=around@7 armed=0 " in done.greeting
    assert sandbox.reported()["version"] == 7
    own = ("--patch-dir", str(sandbox.patches))
    assert "around@7" in cli("show", "around", *own).out
    (file,) = sandbox.state.iterdir()  # as if of a machine that cannot be seen from here
    elsewhere = {"pid_namespace": "pid:[4026531836] another-boot"}
    file.write_text(json.dumps(json.loads(file.read_text("ascii")) | elsewhere), "ascii")
    state = ("status", "--state-dir", str(sandbox.state))
    assert all("around@7" in cli(*state, *more).out for more in ((), ("--summary",)))
    metrics = sandbox.root / "livepatch.prom"
    assert cli(*state, "--prometheus", str(metrics)).code == 0
    (line,) = (line for line in metrics.read_text().splitlines() if line.startswith("livepatch_patch_version{"))
    assert 'patch="around"' in line
    assert line.endswith(" 7.0")

"""The matrix against what it is made from, the page that shows it, and the release tests that it refers to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import executed
import pytest
from packaging.version import Version
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.commands import matrix
from vllm_livepatch.tools.releases import registry

ROOT = Path(__file__).parents[2]
ENTRIES = catalogue.load()
PROOFS = "test_proofs.py"
"""Is about each patch."""


@cache
def collected(selection: str | None = None) -> list[str]:
    """The release tests, as pytest collects them: in CI, or by hand."""
    environ = {name: value for name, value in os.environ.items() if name != executed.SELECTION}
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__).parent),
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    environ |= {executed.SELECTION: selection} if selection else {}
    listed = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "::" in line]


def driven(selection: str) -> dict[str, set[str]]:
    """The releases that each file of release tests names in its parameters."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in collected(selection):
        file, _, test = line.partition("::")
        found[Path(file).name].update(re.findall(r"\d+\.\d+\.\d+", test.partition("[")[2]))
    return found


@pytest.fixture(scope="module")
def made() -> matrix.Matrix:
    return matrix.make(entry.patch for entry in ENTRIES.values())


def test_what_was_run_by_hand_can_be_run_again(made: matrix.Matrix) -> None:
    """What is called executed in CI is not looked at here: the end of a whole run holds it against what ran.

    One test for all patches: each worker that had one of them would collect all release tests.
    """
    found = driven("all")
    for name in sorted({*ENTRIES} & {*matrix.by_hand()}):
        for (_, release), cell in made.cells[name].items():
            for file in (file for file, how in cell.files.items() if how == "executed by hand"):
                assert file == PROOFS or name in executed.shown_by(Path(__file__).with_name(file)), (name, file)
                assert release in found[file], (name, release, file)
        for run in matrix.by_hand()[name]:
            assert re.fullmatch(r"[0-9a-f]{7,}", run["revision"]), (name, "of a commit")
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", run["date"]), name
            for package, releases in run["releases"].items():
                in_ci = matrix.executed().get(name, {}).get(run["file"], {})
                assert not {*releases} & {*in_ci.get(package, ())}, (name, "CI runs these")


def test_what_is_called_executed_of_the_reaper_is_its_half_for_nixl_too(made: matrix.Matrix) -> None:
    """`test_kv_block_reaper.py` has a double for the connector. Leases that are renewed are of 0.22.1 and later."""
    cells = {Version(release): cell for (_, release), cell in made.cells["kv-block-reaper"].items()}
    halves = {version for version, cell in cells.items() if "test_reaper_leases.py" in cell.files}
    ran = {version for version, cell in cells.items() if cell.known != "read" and version >= Version("0.22")}
    assert halves <= ran
    assert Version("0.33.0") in halves


def test_every_release_that_is_driven_is_in_it_and_none_has_drifted(made: matrix.Matrix) -> None:
    pinned = {(pin.package, pin.version) for package in ("vllm", "lmcache") for pin in registry.all_pins(package)}
    assert set(made.releases) <= pinned
    for name, row in made.cells.items():
        packages = ENTRIES[name].patch.packages
        assert {release for release in pinned if release[0] in packages} == set(row)
        only_read = {(pin.package, pin.version) for one in packages for pin in registry.all_pins(one) if pin.read}
        lost = [release for release, cell in row.items() if cell.verdict == "drifted" and release not in only_read]
        assert lost == [], name


def test_the_readme_has_the_matrix(made: matrix.Matrix) -> None:
    """`vllm-livepatch matrix --write docs/compatibility.md` puts it there."""
    assert matrix.block((ROOT / "docs/compatibility.md").read_text("utf-8")) == matrix.markdown(made)

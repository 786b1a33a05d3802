"""The offline verdict is the process's: for pinned releases, by hand for each, and every patch of the catalogue.

Offline, the release is read by byte range out of its wheel, or from the cache of that. The process has the bundle and
the release's whole sources on its path, and decides when its finders are asked for a target (driver/verdicts.py). Nothing
of vLLM is executed for that, so any interpreter will do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import executed
import pytest
from vllm_livepatch.sitecustomize.decision import module_of
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.compatibility import check
from vllm_livepatch.tools.releases import published, registry, sources

DRIVER = Path(__file__).parent / "driver" / "verdicts.py"
RELEASES = [
    (package, release)
    for package in ("vllm", "lmcache")
    for release in executed.ends([pin.version for pin in registry.pins(package)])
]
ENTRIES = catalogue.load()


def offline(package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, check.Checked]:
    monkeypatch.setattr(sources, "cached", lambda package, version: None)  # out of the wheel, not from a directory
    patches = [entry.patch for entry in ENTRIES.values() if entry.patch.package == package]
    tree = published.PublishedReleases().tree(package, version)
    tree.prefetch(module for patch in patches for module in map(module_of, patch.names))
    changes = {patch.name: ENTRIES[patch.name].changes() for patch in patches}
    packages, answers = check.check(patches, check.CombinedTree(None, {package: tree}), changes)
    assert set(packages.values()) <= {version}
    return {answer.patch.name: answer for answer in answers}


def in_the_process(package: str, version: str, bundle: Path, work: Path) -> tuple[dict[str, Any], list[str]]:
    """What the process's report says of each patch; and the target modules that the release lacks."""
    modules = {module for entry in ENTRIES.values() if entry.patch.package == package for module in entry.patch.modules}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LIVEPATCH", "PYTHON"))}
    environ |= {"LIVEPATCH_STATE_DIR": str(work / "state"), "LIVEPATCH_STATE_KEEP": "1"}
    environ["PYTHONPATH"] = os.pathsep.join([str(bundle), str(sources.site_packages(package, version))])
    done = subprocess.run(
        [getattr(sys, "_base_executable", sys.executable), str(DRIVER), *sorted(modules)],
        env=environ, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    reports = [json.loads(file.read_text("utf-8")) for file in (work / "state").glob("*.json")]
    (report,) = reports or [{"patches": []}]
    return {patch["name"]: patch for patch in report["patches"]}, json.loads(done.stdout)


@pytest.mark.parametrize(("package", "version"), RELEASES)
def test_offline_and_in_the_process(
    package: str, version: str, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = offline(package, version, monkeypatch)
    theirs, missing = in_the_process(package, version, bundle, tmp_path)
    for name, answer in ours.items():
        if set(answer.patch.modules) <= set(missing):
            # No module to look for, so nothing to decide in a process that ends now.
            assert answer.decision.verdict == "not-present", name
            continue
        process = theirs[name]
        assert process["verdict"] == answer.decision.verdict, name
        if process["detail"] is not None:  # a patch that is needed, and applied as a matter of course, says nothing
            assert (process["reason"], process["detail"]) == (answer.decision.reason, answer.decision.detail), name
        else:
            assert answer.decision.apply, name
    assert ours or package == "lmcache"


def test_the_comparison_saw_every_patch() -> None:
    assert {entry.patch.package for entry in ENTRIES.values()} <= {package for package, _ in RELEASES}

"""Each patch's proof, by the functions of `prove`: on the newest release that needs it, and the newest that has mended it.

LIVEPATCH_TEST_RELEASES=all runs it on every release.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import executed
import interpreter
import pytest
from packaging.version import Version
from prefill_decode_drive import nixl_site
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.bundles.patch_files import PROOF
from vllm_livepatch.tools.in_bundle import verdicts
from vllm_livepatch.tools.proving import playing, proving
from vllm_livepatch.tools.releases import registry, sources

NEWEST = {package: registry.pins(package)[-1].version for package in ("vllm", "lmcache")}
OLDER = ("0.21.0", "0.4.6")
"""To this vLLM, its built-in connector takes no LMCache newer than this one."""
OLDEST = ("0.4.2", "0.17.1")
"""To this LMCache, the built-in connector of no vLLM newer than this one takes it."""
WITHOUT: set[str] = set()
"""Patches that have no proof yet."""


def pairs() -> Iterator[tuple[str, str, str]]:
    """A patch, a release of its package, and what its proof is to come to there."""
    for name, entry in catalogue.load().items():
        if name in WITHOUT or entry.patch.diff:
            continue
        forms = [(release, form.verdict) for form in entry.patch.variants for release in form.releases]
        for verdict, outcome in (("needed", "proven"), ("fixed-upstream", "no-fault")):
            found = sorted((release for release, one in forms if one == verdict), key=Version)
            for release in executed.chosen(found[-1:], found):
                yield name, release, outcome


@pytest.mark.parametrize(("name", "release", "outcome"), list(pairs()))
def test_proof(
    name: str,
    release: str,
    outcome: str,
    warm: interpreter.Interpreter,
    engine_python: Path,
    mooncake: list[Path],
    tmp_path: Path,
) -> None:
    entry = catalogue.load()[name]
    releases = {**NEWEST, entry.patch.package: release}
    if entry.patch.package == "vllm" and Version(release) <= Version(OLDER[0]):
        releases["lmcache"] = OLDER[1]
    if entry.patch.package == "lmcache" and Version(release) <= Version(OLDEST[0]):
        releases["vllm"] = OLDEST[1]
    path = [str(sources.site_packages(package, version)) for package, version in releases.items()]
    places = dict.fromkeys(releases, path)
    beside = [nixl_site(engine_python), *mooncake]

    def play(proof: Path, patch: str, bundle: Path | None) -> playing.Played:
        work = tmp_path / ("patched" if bundle else "stock")
        work.mkdir(exist_ok=True)
        searched = [*([bundle] if bundle else []), *map(Path, path), *beside]
        switch = {variable(patch): "on"} if bundle else {"LIVEPATCH": "off"}
        found = warm.start(playing.words(proof, releases), searched, work, switch)
        reports = [json.loads(file.read_text("utf-8")) for file in (work / "state").glob("*.json")]
        return playing.of(found, reports, patch, places)

    (judged,) = verdicts.judge([entry.patch], installed.Tree([*path, *map(str, beside)]))[1]
    found = proving.prove(entry, judged, play)
    assert found.outcome == outcome, (found.detail, found.cases)
    executed.note_proof(name, releases, proven=outcome == "proven")


def test_every_patch_has_a_proof() -> None:
    entries = catalogue.load().values()
    without = {entry.patch.name for entry in entries if not (entry.folder / PROOF).is_file()}
    assert without == WITHOUT

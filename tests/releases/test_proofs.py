"""Each patch's proof, by the functions of `prove`: on the newest release that needs it, and the newest that has mended it.

LIVEPATCH_TEST_RELEASES=all runs it on every release.
"""

from __future__ import annotations

import ast
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import executed
import interpreter
import pytest
import source_diffs
from packaging.version import Version
from prefill_decode_drive import nixl_site
from vllm_livepatch.sitecustomize import installed
from vllm_livepatch.sitecustomize.decision import variable
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.bundles.patch_files import PROOF
from vllm_livepatch.tools.commands import from_diff
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
    found = proven(entry, releases, warm, [nixl_site(engine_python), *mooncake], tmp_path)
    assert found.outcome == outcome, (found.detail, found.cases)
    executed.note_proof(name, releases, proven=outcome == "proven")


def proven(
    entry: catalogue.Entry,
    releases: Mapping[str, str],
    warm: interpreter.Interpreter,
    beside: Sequence[Path],
    place: Path,
    diffs: Mapping[str, catalogue.Entry] | None = None,
) -> proving.Outcome:
    """What the proof comes to on these releases, as the diffs change them."""
    path = [str(sources.site_packages(package, version)) for package, version in releases.items()]

    def play(proof: Path, patch: str, bundle: Path | None) -> playing.Played:
        work = Path(tempfile.mkdtemp(dir=place))
        searched = [*([bundle] if bundle else []), *map(Path, path), *beside]
        switch = {variable(patch): "on"} if bundle else {"LIVEPATCH": "off"}
        found = warm.start(playing.words(proof, releases), searched, work, switch)
        reports = [json.loads(file.read_text("utf-8")) for file in (work / "state").glob("*.json")]
        return playing.of(found, reports, patch, dict.fromkeys(releases, path))

    every = {**(diffs or {}), entry.patch.name: entry}
    changes = {name: one.changes() for name, one in every.items()}
    tree = installed.Tree([*path, *map(str, beside)])
    *_, judged = verdicts.judge([one.patch for one in every.values()], tree, changes)[1]
    return proving.prove(entry, judged, play, diffs)


def test_what_a_diff_makes_of_a_wrapped_function(warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """The patch's fingerprints do not speak of it; its proof does."""
    file = "vllm/v1/core/sched/scheduler.py"
    text = (sources.site_packages("vllm", "0.29.0") / file).read_text("utf-8")
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    (function,) = (one for one in functions if one.name == "_preempt_request")
    lines = text.splitlines(True)
    lines.insert(function.body[-1].lineno - 1, "        self.livepatch_test = 0\n")
    data = source_diffs.of(file, text, "".join(lines)).encode()
    warned: list[str] = []
    made = from_diff.make(data, "one-more", tmp_path, releases=["0.29.0"], tell=warned.append)
    assert any("one-more disables preemption-livelock on vllm 0.29.0" in line for line in warned)
    assert made.folder is not None
    diffs = {"one-more": catalogue.read(made.folder)}
    found = proven(catalogue.load()["preemption-livelock"], {**NEWEST, "vllm": "0.29.0"}, warm, [], tmp_path, diffs)
    assert (found.verdict, found.outcome) == ("drifted", "proven"), (found.detail, found.cases)
    assert found.detail.endswith("; as changed by one-more")


def test_every_patch_has_a_proof() -> None:
    entries = catalogue.load().values()
    without = {entry.patch.name for entry in entries if not (entry.folder / PROOF).is_file()}
    assert without == WITHOUT

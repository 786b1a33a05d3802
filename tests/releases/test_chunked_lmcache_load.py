"""Every pinned vLLM release, stock and patched, through loads that are more than its pool holds.

See driver/chunked_lmcache_load.py, and chunked_load_cases.py and chunked_load_errors.py beside it: the scheduler and the
LMCache connector are the release's own, and every slot of the pool has contents that are looked at.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from chunked_load_drive import LMCACHE, PART_TOKENS, TOGGLE, USABLE_BLOCKS, check, drive, lmcache_of
from packaging.version import Version
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import sources

PATCH = "chunked-lmcache-load"
RELEASES = [release for variant in catalogue.load()[PATCH].patch.variants for release in variant.releases]
SOME = executed.ends(RELEASES)
"""Of those, what CI plays the further cases on."""
# The first release in which a shape does not stall any more.
ENDS = {"equal_prompts": "0.19.1", "small_first_turn": "0.23.0", "head_of_line": "0.31.0"}
FIXED_FROM = "0.31.0"
OWN_CLASS_FROM = "0.22.1"
"""From here on vLLM prefers the connector class that LMCache ships."""
WATERMARK_FROM = "0.24.0"
"""From here on the scheduler can be told to keep some blocks free."""
TOO_LARGE_ALONE_FROM = "0.26.0"
TOO_LARGE_ALONE = ("mix0", "mix1", "mix3")
"""Mixes with prompts of 880 tokens, which these releases' own admission never lets in here with async scheduling.

A sliding window counts one step's tokens for each batch in flight (`max_in_flight_tokens`), two with async scheduling: 69
blocks, beside 55 of full attention, are more than the pool has. See `test_too_large_alone`.
"""
STORED = 32
STORED_TOKENS = STORED * 20 * 16
"""Prompts of the case `stored`, and what of them is loaded."""
HITS, HITS_BY_HAND = [64, 128, 256], [1, 64, 128, 256, 512, 1024, 2048]
"""Stored prompts that are asked for at once."""
AT_MOST = 2.2
"""What twice as many may take, times what one half took."""


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """Each shape stalls up to the release that ends it, whether lookups are answered at once or later."""
    worlds = drive(warm, tmp_path, release, "builtin")
    for which, played in worlds.items():
        stalls = {name: world["outcome"].startswith("stalls") for name, world in played.items()}
        expected = {name: Version(release) < Version(end) for name, end in ENDS.items()}
        assert {name: stalls[name] for name in ENDS} == expected, which
        assert {name: stalls[f"{name}_late"] for name in ENDS} == expected, which
        if Version(release) >= Version(FIXED_FROM):
            assert not any(stalls.values()), which


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Nothing stalls with the patch on, and everything that the connector found is loaded."""
    which = "builtin lmcache" if Version(release) >= Version(OWN_CLASS_FROM) else "builtin"
    check(drive(warm, tmp_path, release, which, bundle=bundle))
    patch = interpreter.reported(tmp_path, PATCH)
    fixed = Version(release) >= Version(FIXED_FROM)
    assert (patch["state"], patch["verdict"]) == ("applied", "fixed-upstream" if fixed else "needed"), patch
    assert patch["counters"]["further_parts"] > 50
    assert patch["counters"]["held_back"] > 5


def renamed(tmp_path: Path, field: str, name: str) -> Path:
    """The newest LMCache with a field of its tracker called otherwise, throughout."""
    whole = tmp_path / "renamed"
    shutil.copytree(sources.site_packages("lmcache", LMCACHE), whole)
    files = [file for file in whole.rglob("*.py") if field in file.read_text("utf-8")]
    for file in files:
        file.write_text(file.read_text("utf-8").replace(field, name), "utf-8")
    assert files
    return whole


@pytest.mark.parametrize("toggle", ["on", "force"])
def test_a_renamed_field_of_lmcaches_tracker(
    toggle: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The patch is refused; forced onto it, it meets what is not there and stands aside: the release runs as it came."""
    copy = renamed(tmp_path, "num_lmcache_hit_tokens", "num_lmcache_found_tokens")
    stock = sources.site_packages
    monkeypatch.setattr(sources, "site_packages", lambda package, version: copy if package == "lmcache" else stock(package, version))  # fmt: skip
    worlds = drive(warm, tmp_path, "0.30.0", "lmcache", bundle=bundle, mixes="0", environ={TOGGLE: toggle})
    patch = interpreter.reported(tmp_path, PATCH)
    outcomes = {name: world["outcome"] for played in worlds.values() for name, world in played.items()}
    assert patch["verdict"] == "drifted"
    if toggle != "force":
        assert f"lmcache {LMCACHE}" in patch["detail"]
        assert "LMCacheMPRequestTracker.num_lmcache_hit_tokens" in patch["detail"]
    if toggle == "force":
        assert (patch["state"], patch["reason"]) == ("failed", "raised")
        assert "AttributeError" in patch["detail"]
    else:
        assert (patch["state"], patch["reason"]) == ("skipped", "drifted")
    assert outcomes == stock_outcomes(warm, tmp_path / "stock", "0.30.0", "lmcache")


def stock_outcomes(warm: interpreter.Interpreter, work: Path, vllm: str, which: str) -> dict[str, str]:
    work.mkdir()
    worlds = drive(warm, work, vllm, which, mixes="0")
    return {name: world["outcome"] for played in worlds.values() for name, world in played.items()}


def test_unbounded_parts(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """With parts larger than any hit, what is reserved is enough."""
    worlds = drive(warm, tmp_path, "0.29.0", "builtin lmcache", bundle=bundle, mixes="12", environ={TOGGLE: "on"})
    for which, played in worlds.items():
        outcomes = {name: world["outcome"] for name, world in played.items()}
        assert outcomes == dict.fromkeys(outcomes, "finishes"), which
    assert "further_parts" not in interpreter.reported(tmp_path, PATCH)["counters"]


def test_zero_is_off(warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """The name from the field turns the patch off, and the release is stock again."""
    environ = {"CHUNKED_LMCACHE_MAX_TOKENS_PER_LOAD": "0"}
    worlds = drive(warm, tmp_path, "0.29.0", "builtin", bundle=bundle, mixes="0", environ=environ)
    assert worlds["builtin Scheduler"]["head_of_line"]["outcome"].startswith("stalls")
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["reason"]) == ("skipped", "off")


def which_class(release: str) -> str:
    """The connector class that a vLLM release prefers."""
    return "lmcache" if Version(release) >= Version(OWN_CLASS_FROM) else "builtin"


def cases(
    warm: interpreter.Interpreter,
    work: Path,
    release: str,
    names: str,
    *,
    bundle: Path | None = None,
    part_tokens: int = PART_TOKENS,
) -> dict[str, dict[str, Any]]:
    """Play the cases of driver/chunked_load_cases.py; by case, world and scheduler class, what it came to."""
    work.mkdir()
    releases = {"vllm": release, "lmcache": lmcache_of(release)}
    # Adapters of these cases have no files: by default nothing would be looked up for them.
    environ = {TOGGLE: "on", f"{TOGGLE}_MAX_TOKENS": str(part_tokens), "LIVEPATCH_LMCACHE_CACHE_IDENTITY": "off"}
    arguments = [which_class(release), *names.split()]
    result = warm.run("chunked_load_cases", releases, work, bundle=bundle, environ=environ, arguments=arguments)
    worlds: dict[str, dict[str, Any]] = result["worlds"]
    return worlds


@pytest.mark.parametrize("release", SOME)
def test_as_many_at_once_as_stock(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """What the release's own admission lets in at once, the patch does: with sliding windows, and a prefix in the pool."""
    names = "hybrid shared" if which_class(release) == "lmcache" else "shared"  # the built-in class serves one group
    stock = cases(warm, tmp_path / "stock", release, names)
    patched = cases(warm, tmp_path / "patched", release, names, bundle=bundle)
    assert {name: world["outcome"] for name, world in patched.items()} == dict.fromkeys(stock, "finishes")
    for name, world in patched.items():
        assert world["at_once"] == stock[name]["at_once"] > 1, name
        assert world["steps"] <= 1.15 * stock[name]["steps"], name  # to 0.22 stock reserves nothing for prefills


@pytest.mark.parametrize("release", SOME)
def test_no_more_are_looked_at_than_on_stock(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """Where one does not fit, those behind it are left alone: in a step, a long queue costs nothing."""
    stock = cases(warm, tmp_path / "stock", release, "stored")
    parts = cases(warm, tmp_path / "parts", release, "stored", bundle=bundle)
    whole = cases(warm, tmp_path / "whole", release, "stored", bundle=bundle, part_tokens=1 << 15)
    for name, world in stock.items():
        for patched in parts[name], whole[name]:
            assert (patched["outcome"], patched["loaded"]) == ("finishes", STORED_TOKENS), name
            # One each step, and all of them while the first lookups are not answered; they were all of them each step.
            assert patched["asked"] <= patched["steps"] + 4 * STORED, name
        if world["outcome"] == "finishes":  # to 0.18 nothing is reserved
            assert whole[name]["steps"] <= world["steps"], name
            assert whole[name]["asked"] <= 1.05 * world["asked"], name


@pytest.mark.parametrize("case", ["fits", "crowd", "fails"])
@pytest.mark.parametrize("release", executed.chosen(["0.29.0"], RELEASES))
def test_twice_the_hits_take_twice_the_work(
    release: str, case: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """In instructions of the patches, whatever the machine: of the longest step, and of all steps.

    CI plays one that needs the patch and has LMCache's own class; `tests/scale` counts the operations of its crowds.
    """
    hits = HITS_BY_HAND if executed.by_hand() else HITS
    releases = {"vllm": release, "lmcache": lmcache_of(release)}
    arguments = [which_class(release), case, *map(str, hits)]
    result = warm.run(
        "chunked_load_scale", releases, tmp_path, bundle=bundle, environ={TOGGLE: "on"}, arguments=arguments
    )
    for mode, played in result["worlds"].items():
        assert {world["outcome"] for world in played.values()} == {"finishes"}, mode
        for kind in "longest", "total":
            taken = {hit: played[str(hit)][kind] for hit in hits}
            assert taken[hits[0]]["chunked_lmcache_load"] > 0, "counted where nothing of the patch runs"
            grows = {hit: sum(taken[2 * hit].values()) / sum(taken[hit].values()) for hit in hits if 2 * hit in hits}
            assert max(grows.values()) <= AT_MOST, (mode, kind, grows)


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_a_long_hit_takes_no_more_steps_than_on_stock(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """The pool has room for all of it, so it is loaded at once; in parts where MAX_TOKENS says so."""
    releases = {"vllm": release, "lmcache": lmcache_of(release)}
    came = {}
    for which, given in ("stock", {}), ("patched", {TOGGLE: "on"}), ("parts", {f"{TOGGLE}_MAX_TOKENS": "32768"}):
        work = tmp_path / which
        work.mkdir()
        came[which] = warm.run(
            "chunked_load_scale",
            releases,
            work,
            bundle=None if which == "stock" else bundle,
            environ={TOGGLE: "on", **given},
            arguments=[which_class(release), "long", "1"],
        )["worlds"]
    for mode, stock in came["stock"].items():
        found = {which: worlds[mode]["1"] for which, worlds in came.items()}
        assert {world["outcome"] for world in found.values()} == {"finishes"}, mode
        assert {world["loaded"] for world in found.values()} == {stock["1"]["loaded"]}, mode
        assert found["patched"]["steps"] <= stock["1"]["steps"] < found["parts"]["steps"], mode


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_whole_loads_and_parts_beside_each_other(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """By default a load is whole where the pool has room to spare, else in parts: nothing stalls, and all is loaded."""
    which = "builtin lmcache" if Version(release) >= Version(OWN_CLASS_FROM) else "builtin"
    environ = {TOGGLE: "on", "PART_TOKENS": str(PART_TOKENS)}
    check(drive(warm, tmp_path, release, which, bundle=bundle, environ=environ), largest=2048)
    assert interpreter.reported(tmp_path, PATCH)["counters"]["further_parts"] > 5


@pytest.mark.parametrize("release", SOME)
def test_what_has_arrived_stops_nobody(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """One that cannot run for another adapter's sake leaves the others their turn."""
    for name, world in cases(warm, tmp_path / "work", release, "adapters", bundle=bundle).items():
        assert world["outcome"] == "finishes", name
        last = max(ended for request, ended in world["ended"].items() if request.startswith("later"))
        assert last < world["ended"]["running"] <= world["ended"]["loading"], (name, world["ended"])


@pytest.mark.parametrize("release", SOME)
def test_other_limits(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Nothing stalls, and nothing runs on what was not loaded for it, where parts fail, clients go and seats are few."""
    names = ["limits", "later_parts"]
    if which_class(release) == "lmcache":
        names.append("hybrid_mixes")
    if Version(release) >= Version(WATERMARK_FROM):
        names.append("watermark")
    worlds = cases(warm, tmp_path / "work", release, " ".join(names), bundle=bundle)
    hybrid = "hybrid_mixes" in names and Version(release) >= Version(TOO_LARGE_ALONE_FROM)
    never = {f"hybrid_mixes {mix} AsyncScheduler" for mix in TOO_LARGE_ALONE if hybrid}
    assert {name for name, world in worlds.items() if world["outcome"] != "finishes"} == never
    for name in never:
        assert worlds[name]["outcome"].startswith("stalls"), name
        assert worlds[name]["free"] == USABLE_BLOCKS, name  # nobody holds a block that anybody waits for
    assert sum(world["aborted_loads"] for name, world in worlds.items() if "gone after" in name) > 10


@pytest.mark.parametrize("release", [release for release in SOME if which_class(release) == "lmcache"])
@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
def test_too_large_alone(
    patched: bool, release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """What stalls in TOO_LARGE_ALONE is one request that loads nothing, in an empty pool; the release says so itself."""
    worlds = cases(warm, tmp_path / "work", release, "alone", bundle=bundle if patched else None)
    never = {"alone longest AsyncScheduler"} if Version(release) >= Version(TOO_LARGE_ALONE_FROM) else set()
    assert {name for name, world in worlds.items() if world["outcome"] != "finishes"} == never
    for name in never:
        assert worlds[name]["outcome"].startswith("stalls")
        assert worlds[name]["free"] == USABLE_BLOCKS


def test_hybrid_mixes_stall_on_stock(warm: interpreter.Interpreter, tmp_path: Path) -> None:
    worlds = cases(warm, tmp_path / "work", "0.30.0", "hybrid_mixes")
    assert worlds["hybrid_mixes head of line Scheduler"]["outcome"].startswith("stalls")


@pytest.mark.parametrize("release", executed.chosen(["0.33.0"], ["0.14.1", "0.30.0", "0.33.0"]))
def test_errors_of_its_own(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """Wherever in the patch an error comes, the world finishes on KV of its own, and no block is lost.

    Read locks may be left: what the error kept from being released LMCache lets expire.
    """
    releases = {"vllm": release, "lmcache": lmcache_of(release)}
    arguments = [which_class(release), "1", str(bundle)]
    result = warm.run("chunked_load_errors", releases, tmp_path, arguments=arguments)
    # Where the patch stands aside with the pool full, the first releases' own deadlock is back.
    allowed = "stalls" if Version(release) < Version("0.19.1") else "none"
    assert [each for each in result["wrong"] if f": {allowed} with" not in each] == []
    assert result["outcomes"]["finishes"] > 250
    assert result["outcomes"]["no error: finishes"] == 2

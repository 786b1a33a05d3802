"""The decision: every verdict under every toggle, and releases as people build them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from vllm_livepatch.sitecustomize.decision import (
    Decision,
    Environment,
    Installed,
    Patch,
    Variant,
    decide,
    judge,
    variable,
)
from vllm_livepatch.sitecustomize.release_order import age_of, public_release

TARGET, OTHER, CALL = "engine.a:A.f", "engine.b:g", "engine.c:h"
OLD = {TARGET: "f-old", OTHER: "g", CALL: "h"}
NEW = {TARGET: "f-new", OTHER: "g", CALL: "h-new"}
GOOD = {TARGET: "f-good", OTHER: "g", CALL: "h-new"}
PATCH = Patch(
    name="some-patch",
    package="engine",
    title="",
    targets=(TARGET, OTHER),
    calls=(CALL,),
    variants=(
        Variant(OLD, ("0.20.2", "0.21.0"), facts={"which": "old"}),
        Variant(NEW, ("0.22.1", "0.23.1"), facts={"which": "new"}),
        Variant(GOOD, ("0.24.0",), verdict="fixed-upstream"),
        Variant({}, ("0.9.0",), verdict="not-present"),
    ),
)
NOTHING: dict[str, str | None] = {TARGET: None, OTHER: None, CALL: None}
BY_VERDICT = {
    "needed": Installed("0.21.0", OLD),
    "unverified": Installed("0.21.1", OLD),
    "fixed-upstream": Installed("0.24.0", GOOD),
    "not-present": Installed("0.9.0", NOTHING),
    "drifted": Installed("0.21.0", {**OLD, TARGET: "somebody's edit"}),
}
# (verdict, toggle): apply, wanted, reason
TABLE = {
    ("needed", "auto"): (True, True, "needed"),
    ("needed", "on"): (True, True, "needed"),
    ("needed", "force"): (True, True, "needed"),
    ("needed", "off"): (False, False, "off"),
    ("unverified", "auto"): (True, True, "unverified"),
    ("unverified", "on"): (True, True, "unverified"),
    ("unverified", "force"): (True, True, "unverified"),
    ("unverified", "off"): (False, False, "off"),
    ("fixed-upstream", "auto"): (False, False, "fixed-upstream"),
    ("fixed-upstream", "on"): (True, True, "on"),
    ("fixed-upstream", "force"): (True, True, "force"),
    ("fixed-upstream", "off"): (False, False, "off"),
    ("not-present", "auto"): (False, False, "not-present"),
    ("not-present", "on"): (False, False, "not-present"),  # there is nothing to mend
    ("not-present", "force"): (False, False, "not-present"),
    ("not-present", "off"): (False, False, "off"),
    ("drifted", "auto"): (False, True, "drifted"),
    ("drifted", "on"): (False, True, "drifted"),
    ("drifted", "force"): (True, True, "forced"),
    ("drifted", "off"): (False, False, "off"),
}


def decided(installed: Installed, toggle: str = "auto", mode: str = "auto", patch: Patch = PATCH) -> Decision:
    return decide(patch, installed, Environment(mode, {patch.name: toggle}))


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(itertools.product(BY_VERDICT, ("auto", "on", "force", "off")))


@pytest.mark.parametrize("mode", ["auto", "strict"])
@pytest.mark.parametrize(("verdict", "toggle"), list(TABLE))
def test_every_verdict_under_every_toggle(verdict: str, toggle: str, mode: str) -> None:
    decision = decided(BY_VERDICT[verdict], toggle, mode)
    assert decision.verdict == verdict
    assert (decision.apply, decision.wanted, decision.reason) == TABLE[verdict, toggle]
    assert decision.detail


@pytest.mark.parametrize(("verdict", "toggle"), list(TABLE))
def test_nothing_applies_where_all_is_off(verdict: str, toggle: str) -> None:
    decision = decided(BY_VERDICT[verdict], toggle, "off")
    assert (decision.verdict, decision.apply, decision.wanted, decision.reason) == (verdict, False, False, "off")
    assert "LIVEPATCH is off" in decision.detail


@pytest.mark.parametrize(
    ("came", "verdict", "wanted"),
    [(GOOD, "fixed-upstream", False), (OLD, "drifted", True), (NEW, "drifted", True)],
)
def test_what_a_diff_changed_is_wanted_where_the_release_as_it_came_needs_it(
    came: dict[str, str | None], verdict: str, wanted: bool
) -> None:
    changed = Installed("0.24.0", {**came, TARGET: "as the diff makes it"}, replaced={TARGET: came[TARGET]})
    decision = decided(changed)
    assert (decision.verdict, decision.apply, decision.wanted) == (verdict, False, wanted)
    assert (f"a diff changes {TARGET}" in decision.detail) is not wanted
    assert decided(changed, "on").verdict == decided(changed, "force").verdict == "drifted"
    assert decided(dataclasses.replace(changed, replaced={})).verdict == "drifted"


EDITED = {**GOOD, TARGET: "of the nightly"}


@pytest.mark.parametrize(
    ("release", "needed"),
    [
        ("0.24.0", False),  # somebody's edit of a release that has no fault
        ("0.24.0+vendor.1", False),
        ("0.25.0", False),
        ("0.34.0.dev5", False),
        ("0.24.1rc1.dev424+g3f5a1e173", False),
        ("0.24.0.post1", False),
        ("0.24.0.0", False),
        ("0.24.0rc2", True),  # before 0.24.0: 0.23.1 is the newest that is not newer
        ("0.24.0.dev7", True),
        ("0.24.0a1", True),
        ("0.23.10", True),
        ("0.23.1", True),
        ("0.23", True),
        ("0.3.0", True),  # older than all that are listed, or of no age: nothing speaks against the fault
        ("0.1.dev1+g3f5a1e173", True),
        ("unheard of", True),
        ("", True),
        (None, True),
    ],
)
def test_code_that_nobody_knows_is_as_the_newest_listed_release_before_it(release: str | None, needed: bool) -> None:
    """A nightly of a release that has mended the fault does not end under strict."""
    decision = decided(Installed(release, EDITED))
    expected = ("drifted", False, needed, "drifted" if needed else "unneeded")
    assert (decision.verdict, decision.apply, decision.wanted, decision.reason) == expected
    assert ("LIVEPATCH_SOME_PATCH=on asks for it" in decision.detail) is not needed
    assert "has code that was never verified" in decision.detail
    for toggle in ("on", "force"):
        asked = decided(Installed(release, EDITED), toggle)
        assert (asked.apply, asked.wanted) == (toggle == "force", True)
    assert not decided(Installed(release, EDITED), "off").wanted


def test_releases_are_in_the_order_of_their_ages() -> None:
    ages = ["0.9", "0.10.dev1", "0.10a1.dev3", "0.10a1", "0.10a2", "0.10b1", "0.10rc1.dev9", "0.10rc1", "0.10rc10"]
    ages += ["0.10", "0.10.post1.dev2", "0.10.post1", "0.10.1.dev4", "0.10.1", "0.11rc1", "1"]
    found = [age_of(release) for release in ages]
    assert None not in found
    assert found == sorted(found, key=lambda age: age or ())
    assert len({str(age) for age in found}) == len(found)
    assert age_of("0.10.0+rocm") == age_of("0.10")
    assert [age_of(release) for release in ("", "v1", "1!2", "1.0-2", "latest", None)] == [None] * 6


def test_a_nightly_whose_last_release_has_none_of_the_code() -> None:
    form = Variant({}, ("0.24.0",), verdict="not-present")
    patch = dataclasses.replace(PATCH, variants=(*PATCH.variants[:2], form))
    assert decided(Installed("0.25.0.dev1", EDITED), patch=patch).reason == "unneeded"


def test_a_toggle_that_nobody_set_is_auto() -> None:
    assert decide(PATCH, BY_VERDICT["needed"], Environment()).apply


@pytest.mark.parametrize("release", ["0.21.0", "0.21.0+rocm700", "0.21.0+CPU", "0.20.2+g1234567.d20261121"])
def test_a_local_part_does_not_make_another_release(release: str) -> None:
    assert decided(Installed(release, OLD)).verdict == "needed"


@pytest.mark.parametrize(
    "release",
    [
        "0.23.1rc1.dev424+g3f5a1e173",
        "0.21.0.post1",
        "0.21.0rc1",
        "0.21.0.dev3",
        "0.21",
        "0.21.00",
        "unheard of",
        "",
        None,
    ],
)
def test_a_release_that_nobody_listed_is_recognized_by_its_code(release: str | None) -> None:
    decision = decided(Installed(release, NEW))
    assert (decision.verdict, decision.apply) == ("unverified", True)
    assert decision.variant is not None
    assert decision.variant.facts == {"which": "new"}
    assert "0.23.1" in decision.detail  # the release whose code it is
    assert ("of unknown release" in decision.detail) == (not release)


@pytest.mark.parametrize("release", ["0.21.0", "0.23.1rc1.dev424+g3f5a1e173", None])
def test_code_comes_before_the_number(release: str | None) -> None:
    assert decided(Installed(release, GOOD)).verdict == "fixed-upstream"
    assert decided(Installed(release, {**OLD, CALL: "h-other"})).verdict == "drifted"
    # The code of one listed release under the number of another is verified code, but nobody saw the fault there.
    assert decided(Installed("0.22.1", OLD)).verdict == "unverified"


def test_the_variant_is_the_one_that_the_code_is() -> None:
    for code, which in ((OLD, "old"), (NEW, "new")):
        variant = decided(Installed("0.21.0", code)).variant
        assert variant is not None
        assert variant.facts["which"] == which


@pytest.mark.parametrize("name", [OTHER, CALL, TARGET])
def test_one_missing_name_is_drift_and_is_named(name: str) -> None:
    decision = decided(Installed("0.21.0", {**OLD, name: None}))
    assert (decision.verdict, decision.apply, decision.wanted) == ("drifted", False, True)
    assert name in decision.detail


GONE = {TARGET: None, OTHER: None, CALL: "h"}


@pytest.mark.parametrize(
    ("release", "toggle", "wanted"),
    [
        ("0.21.0", "auto", True),  # a vendor's build of a release that has the fault
        ("0.23.2", "auto", True),  # the newest listed release before it needs the patch
        ("0.25.0", "auto", False),  # that one does not
        ("0.25.0", "on", True),
        ("0.8.0", "auto", False),  # older than all that is listed
        ("0.9.1", "auto", False),  # the code came later
        (None, "auto", True),
        ("0.23.2", "force", True),
        ("0.23.2", "off", False),
    ],
)
def test_targets_that_are_gone_are_drift_even_where_a_call_is_there(
    release: str | None, toggle: str, wanted: bool
) -> None:
    decision = decided(Installed(release, GONE), toggle)
    assert (decision.verdict, decision.apply, decision.wanted) == ("drifted", False, wanted)
    assert TARGET in decision.detail
    assert decision.reason == ("gone" if wanted else "off" if toggle == "off" else "unneeded")
    if decision.reason == "unneeded":
        older = release == "0.8.0"
        assert ("; no release before it is listed, LIVEPATCH_" in decision.detail) is older
        assert ("; the newest listed release before it does not need" in decision.detail) is not older


def test_without_the_code_are_those_releases_of_which_that_is_said() -> None:
    assert decided(Installed("0.9.0", GONE)).verdict == "not-present"
    assert decided(Installed("0.9.0+rocm700", GONE)).verdict == "not-present"
    assert decided(Installed(None, GONE, there=False)).verdict == "not-present"
    assert decided(Installed("0.9.0", OLD)).verdict == "unverified"


def test_a_listed_local_version_matches_itself() -> None:
    nightly = "0.29.1rc1.dev7+gabc"
    patch = dataclasses.replace(PATCH, variants=(Variant(OLD, (nightly,)),))
    assert decided(Installed(nightly, OLD), patch=patch).verdict == "needed"
    assert decided(Installed("0.29.1rc1.dev7+gdef", OLD), patch=patch).verdict == "unverified"


@pytest.mark.parametrize("toggle", ["auto", "on", "force"])
def test_code_of_before_the_fault_is_known_as_such_and_left_alone(toggle: str) -> None:
    before = Variant({**OLD, CALL: "h-before"}, ("0.19.0",), verdict="not-present")
    patch = dataclasses.replace(PATCH, variants=(before, *PATCH.variants))
    decision = decided(Installed("0.19.0", before.code), toggle, patch=patch)
    assert (decision.verdict, decision.apply) == ("not-present", False)
    assert decision.detail.endswith("does not have the code that this patch changes")


@pytest.mark.parametrize("name", [OTHER, CALL, TARGET])
def test_drift_names_what_drifted(name: str) -> None:
    verdict, detail, variant = judge(PATCH, Installed("0.21.0", {**OLD, name: "somebody's edit"}))
    assert (verdict, variant) == ("drifted", None)
    assert [other for other in PATCH.names if other in detail] == [name]


def test_names_known_each_by_itself_but_not_together_are_drift() -> None:
    verdict, detail, _ = judge(PATCH, Installed("0.21.0", {TARGET: "f-old", OTHER: "g", CALL: "h-new"}))
    assert verdict == "drifted"
    assert "combination" in detail


def test_the_release_that_is_named_is_the_newest_of_its_code() -> None:
    """Of the package's own code, and of a companion's."""
    releases = ("2.0", "2.1", "2.2")
    call = "other.d:k"
    forms = (Variant({call: "k"}, releases), Variant({call: "k-new"}, ("2.3",)))
    patch = dataclasses.replace(
        PATCH,
        calls=(CALL, call),
        variants=(Variant(OLD, releases), Variant(NEW, ("2.3", "2.4", "2.5"))),
        companions={"other": forms},
    )

    def detail(code: dict[str, str | None], release: str = "2.9", companion: str = "2.0") -> str:
        return decided(Installed(release, code, False, {"other": companion}), patch=patch).detail

    assert "2.9 is not listed, but its code is that of 2.2" in detail({**OLD, call: "k"})
    assert "not that of 2.5: " in detail({**NEW, CALL: "h", call: "k"})
    assert "other 2.9 is not listed, but its code is that of 2.2" in detail({**OLD, call: "k"}, "2.1", "2.9")


def test_forced_drift_takes_the_newest_variant_and_says_it() -> None:
    decision = decided(BY_VERDICT["drifted"], "force")
    assert decision.variant is PATCH.variants[-1]
    assert "never verified" in decision.detail
    assert decided(BY_VERDICT["drifted"], "force", patch=dataclasses.replace(PATCH, variants=())).variant is None


def test_a_fix_that_the_patch_cannot_be_put_on_is_not_put_on() -> None:
    fixed = dataclasses.replace(PATCH.variants[2], applies=False)
    patch = dataclasses.replace(PATCH, variants=(*PATCH.variants[:2], fixed))
    for toggle in ("on", "force"):
        decision = decided(BY_VERDICT["fixed-upstream"], toggle, patch=patch)
        assert (decision.verdict, decision.apply, decision.wanted) == ("fixed-upstream", False, False)


@pytest.mark.parametrize(
    ("auto", "rocm", "toggle", "applies"),
    [
        ("rocm", True, "auto", True),
        ("rocm", False, "auto", False),
        ("rocm", False, "on", True),
        ("rocm", False, "force", True),
        ("rocm", True, "off", False),
        ("off", True, "auto", False),
        ("off", False, "auto", False),
        ("off", False, "on", True),
        ("off", False, "off", False),
    ],
)
def test_patches_that_are_off_by_default(auto: str, rocm: bool, toggle: str, applies: bool) -> None:
    patch = dataclasses.replace(PATCH, auto=auto)  # type: ignore[arg-type]
    decision = decided(Installed("0.21.0", OLD, rocm), toggle, patch=patch)
    assert decision.apply is applies
    assert decision.verdict == "needed"  # what is known of the code does not depend on what is asked for
    if toggle == "auto" and not applies:
        assert (decision.wanted, decision.reason) == (False, "optional")
        assert "LIVEPATCH_SOME_PATCH=on" in decision.detail


def test_the_variables_of_a_patch() -> None:
    assert variable("kv-block-reaper") == "LIVEPATCH_KV_BLOCK_REAPER"
    assert variable("kv-block-reaper", "idle_seconds") == "LIVEPATCH_KV_BLOCK_REAPER_IDLE_SECONDS"
    assert variable("chunked-lmcache-load", "max-tokens") == "LIVEPATCH_CHUNKED_LMCACHE_LOAD_MAX_TOKENS"


def test_public_release() -> None:
    assert public_release("0.21.0+rocm700") == "0.21.0"
    assert public_release("0.23.1rc1.dev424+g3f5a1e173") == "0.23.1rc1.dev424"
    assert public_release("0.21.0.post1") == "0.21.0.post1"


def test_what_nobody_says_is_not_so() -> None:
    patch = Patch("some-patch", "engine", "", (TARGET,), (), ())
    assert (patch.traced, patch.per_module) == (False, False)
    assert not Installed("1", {}).rocm
    environment = Environment("auto", {}, {})
    assert (environment.traced, environment.keep) == (False, False)


def test_a_patch_is_named_with_its_version_where_it_has_one() -> None:
    assert PATCH.versioned == "some-patch"
    assert dataclasses.replace(PATCH, version=3).versioned == "some-patch@3"


def test_a_patch_that_is_a_diff_has_sentences_of_its_own() -> None:

    def sentences(patch: Patch) -> list[str]:
        return [judge(patch, installed)[1] for installed in (Installed("0.21.0", OLD), Installed("0.24.0", GOOD))]

    assert sentences(PATCH) == ["engine 0.21.0 has the fault", "engine 0.24.0 no longer has the fault"]
    assert sentences(dataclasses.replace(PATCH, diff="a.diff")) == [
        "engine 0.21.0 is what the diff applies to exactly",
        "engine 0.24.0 has the change already",
    ]


def test_of_targets_that_are_not_there_the_first_is_named() -> None:
    assert judge(PATCH, Installed("0.9.0", NOTHING))[1] == f"engine 0.9.0 has no {TARGET}"
    assert judge(PATCH, Installed("0.1", NOTHING))[1].startswith(f"engine 0.1 has no {TARGET}, ")


def test_of_known_code_that_is_no_form_only_what_nobody_verified_is_named() -> None:
    """The target's code is an old one's, the call's is that of none; what fits the nearest form is not named."""
    installed = Installed("0.21.1", {**OLD, CALL: "edited"})
    assert judge(PATCH, installed)[1].endswith(f"has code that was never verified: {CALL}")

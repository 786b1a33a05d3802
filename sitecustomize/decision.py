"""The decision: what is known of a patch, what is installed and what the environment asks for, to one verdict.

Pure and the same at run time, in `check` and in `matrix`; needs no vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .conditions import ROCM, When
from .matching import drifted, is_listed, matched
from .order import Order
from .release_order import age_of

Verdict = Literal["needed", "unverified", "proven", "fixed-upstream", "not-present", "drifted"]
APPLIED: tuple[Verdict, ...] = ("needed", "unverified", "proven")
"""The verdicts on code that a patch is applied to."""
UNKNOWN = "unknown"
"""In the place of a fingerprint: the module is there, and what it executes is not known. No variant has it."""


class PatchError(ValueError):
    """What a patch folder says of itself cannot be used; the message names the patch and the entry."""


@dataclass(frozen=True)
class Option:
    """One option of a patch: `LIVEPATCH_NAME_OPTION`, and the names from the field that mean the same."""

    name: str
    default: Any
    help: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    off: Any = None  # the value of an alias or the option itself that turns the whole patch off


@dataclass(frozen=True)
class Variant:
    """One verified form of the code that a patch touches and calls.

    `code` maps `module:qualname` to its fingerprint, for every target and every call that these releases have: code
    moves, and a name that a variant lacks must be absent there. `releases` have exactly this code, and a release test
    drives it in each but those in `read`. `facts` are what the patch's code must know of this variant.
    """

    code: Mapping[str, str]
    releases: tuple[str, ...]
    verdict: Literal["needed", "fixed-upstream", "not-present"] = "needed"
    applies: bool = True  # whether the patch's code can be applied to it at all
    facts: Mapping[str, Any] = field(default_factory=dict)
    read: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proof:
    """What running the patch's proof came to, on code that has exactly these fingerprints: of all its packages.

    `proven`: the fault shows, and is gone with these `facts`. `no-fault`: the code is right as it is. `failed`: the
    patched code is wrong.
    """

    code: Mapping[str, str]  # names that are absent from the code are not in it
    outcome: Literal["proven", "no-fault", "failed"]
    facts: Mapping[str, Any] = field(default_factory=dict)
    detail: str = ""  # of one that failed: what was wrong


@dataclass(frozen=True)
class Patch:
    """What `patch.toml` says."""

    name: str
    package: str
    title: str
    targets: tuple[str, ...]  # module:qualname, what is patched; a diff's are whole modules
    calls: tuple[str, ...]  # module:qualname, what the patch calls but leaves as it is
    variants: tuple[Variant, ...]
    options: tuple[Option, ...] = ()
    aliases: tuple[str, ...] = ()  # switches from the field: 1 is on, 0 is off
    # Where `auto` applies it, if needed: anywhere, on ROCm, beside patches that change traced code, nowhere.
    auto: Literal["needed", "rocm", "traced", "off"] = "needed"
    diff: str = ""  # the folder's file, where the patch is a source change
    added: tuple[str, ...] = ()  # modules that the diff adds
    traced: bool = False  # it changes code that torch.compile traces
    per_module: bool = False  # its targets live in several processes: each module's are applied as soon as it is loaded
    about: Mapping[str, Any] = field(default_factory=dict)  # why, origin, upstream threads: for people
    # What it relies on of other packages' code, by package: calls only. `not-present` is a release that has none of it.
    companions: Mapping[str, tuple[Variant, ...]] = field(default_factory=dict)
    version: int | None = None  # raised with each change of its code or facts
    group: str = ""  # what one runs that it is about: LIVEPATCH_GROUP_NAME switches all patches of it
    proofs: tuple[Proof, ...] = ()  # `generate --proofs` puts them there
    when: When = field(default_factory=When)  # conditions, of which each must hold
    order: Order = field(default_factory=Order)  # how it stands to other patches
    must: bool = False  # where it is wanted and not applied, the process ends as under strict

    @property
    def asks_for_rocm(self) -> bool:
        """Whether it matters to it what torch is built for."""
        return ROCM in (self.auto, self.when.platform)

    @property
    def versioned(self) -> str:
        """Its name, and its version where it has one."""
        return self.name if self.version is None else f"{self.name}@{self.version}"

    @property
    def packages(self) -> tuple[str, ...]:
        return (self.package, *self.companions)

    def proof_of(self, installed: Installed) -> Proof | None:
        """What its proof came to on exactly the code that is installed; None where it was not run on that.

        Of several that differ, as merged bundles may bring, one that failed counts.
        """
        code = {name: digest for name, digest in installed.code.items() if digest is not None}
        found = [proof for proof in self.proofs if proof.code == code]
        if not found or moved_companion(self, installed) is not None:
            return None
        return next((proof for proof in found if proof.outcome == "failed"), found[0])

    def forms(self, package: str) -> tuple[Variant, ...]:
        """The verified forms of the code that it touches and calls of one of its packages."""
        return self.variants if package == self.package else self.companions[package]

    def names_of(self, package: str) -> tuple[str, ...]:
        """The targets and calls that are one package's."""
        tops = {name: name.partition(":")[0].partition(".")[0] for name in self.names}
        own = package == self.package
        return tuple(name for name, top in tops.items() if (top not in self.companions if own else top == package))

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.targets, *self.calls)

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that hold a target, in the order of the targets."""
        return tuple(dict.fromkeys(module_of(target) for target in self.targets))

    def targets_of(self, variant: Variant | None) -> tuple[str, ...]:
        """The targets that a variant has; all of them where none is known."""
        return tuple(target for target in self.targets if variant is None or target in variant.code)


@dataclass(frozen=True)
class Installed:
    """What is installed of one patch's packages: the release, and the fingerprints of the names the patch is about."""

    release: str | None  # None: the package does not say, or is not there
    code: Mapping[str, str | None]  # None: no such module, or no such name in it
    rocm: bool = False  # torch is built for ROCm; looked up only for patches that ask
    companions: Mapping[str, str | None] = field(default_factory=dict)  # releases of those that are installed
    replaced: Mapping[str, str | None] = field(default_factory=dict)  # what diffs changed of `code`, as it came
    unknown: Mapping[str, str] = field(default_factory=dict)  # modules of which `code` is UNKNOWN, a sentence each
    there: bool = True  # whether the package is installed at all
    diffs: tuple[str, ...] = ()  # the patches whose diffs changed what is in `replaced`


@dataclass(frozen=True)
class Environment:
    """What the variables say, read by `settings.read`."""

    mode: str = "auto"  # LIVEPATCH: auto, off, strict
    toggles: Mapping[str, str] = field(default_factory=dict)  # patch name: auto, on, force, off
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: tuple[str, ...] = ()  # values that are no values: one sentence each
    notes: tuple[str, ...] = ()  # names of ours that mean nothing, a sentence each; under strict they count as errors
    traced: bool = False  # a patch changes traced code here; found out only for patches whose `auto` asks
    instead: str = ""  # a patch that is applied instead of the one that is decided on; found out for that one alone
    platform: str = sys.platform
    variables: Mapping[str, str] = field(default_factory=dict)  # those that conditions name
    keep: bool = False  # LIVEPATCH_STATE_KEEP: a process that ends leaves its report
    switches: Mapping[str, str] = field(default_factory=dict)  # patch name: the variable that its toggle is of

    def ends(self, patch: Patch | None) -> bool:
        """Whether the process ends, before it serves, where this patch is wanted and not applied."""
        return self.mode == "strict" or (patch is not None and patch.must)


@dataclass(frozen=True)
class Decision:
    """`apply`: do it. `wanted` without `apply`: say so, and end the process under strict."""

    verdict: Verdict
    apply: bool
    wanted: bool
    reason: str  # one word
    detail: str  # a sentence
    variant: Variant | None = None


def module_of(path: str) -> str:
    """The module of `module:qualname`."""
    return path.partition(":")[0]


def decide(patch: Patch, installed: Installed, environment: Environment) -> Decision:
    """The one decision. The code's fingerprint comes first, the release number second."""
    verdict, detail, variant = judge(patch, installed)
    toggle = environment.toggles.get(patch.name, "auto")
    gone = verdict == "drifted" and is_gone(patch, installed)
    needs = verdict != "drifted" or _needed_before(patch, installed.release, not gone)
    if verdict == "drifted" and installed.replaced:
        came, why, form = as_it_came(patch, installed)
        asks = toggle in ("on", "force")
        if came in ("fixed-upstream", "not-present") and not asks:  # whatever a diff made of the code since
            verdict, detail, variant = came, f"{why}; a diff changes {', '.join(installed.replaced)}", form
        elif installed.diffs:
            alone = came in ("needed", "unverified")
            detail = _changed(installed, why if alone else detail, alone)
        needs = needs or (came in ("needed", "unverified") and not asks)
    asked = verdict == "fixed-upstream" and toggle in ("on", "force") and variant is not None and variant.applies
    if asked or verdict in ("needed", "unverified"):  # it would be applied, and run the companions' code
        found, why = _with_companions(patch, installed, verdict, detail)
        if found == "drifted" and installed.diffs and not installed.replaced.keys() <= {*patch.names_of(patch.package)}:
            why = _changed(installed, why)
        asked = asked and (found != "drifted" or toggle == "force")
        if asked or verdict in ("needed", "unverified"):
            verdict, detail = found, why
        else:  # there is nothing to mend: what cannot be applied to it is not missed
            detail = f"{detail}; {why}"
    proof = patch.proof_of(installed)
    if proof is not None:
        verdict, detail, variant = _proved(patch, installed, proof, (verdict, detail, variant))
        asked = asked and verdict == "fixed-upstream"
    disproven = proof is not None and proof.outcome == "failed"
    if environment.mode == "off" or toggle == "off":
        name = "LIVEPATCH" if environment.mode == "off" else environment.switches.get(patch.name, variable(patch.name))
        return Decision(verdict, False, False, "off", f"{name} is off; {detail}", variant)
    unmet = patch.when.unmet(environment.variables, environment.platform, installed.rocm)
    if unmet:
        return Decision(verdict, False, False, "condition", f"{detail}; {unmet}", variant)
    wanted_by_itself = {"needed": True, "rocm": installed.rocm, "traced": environment.traced, "off": False}[patch.auto]
    if toggle == "auto" and not wanted_by_itself:
        where = {"rocm": " outside ROCm", "traced": " where no patch changes traced code"}.get(patch.auto, "")
        why = f"off by default{where}, {variable(patch.name)}=on asks for it; {detail}"
        return Decision(verdict, False, False, "optional", why, variant)
    if environment.instead and (asked or verdict in (*APPLIED, "drifted")):
        switch = f"{variable(environment.instead)}=off ends that"
        why = f"{environment.instead} is to be applied instead of it ({switch}); {detail}"
        return Decision(verdict, False, False, "replaced", why, variant)
    if verdict == "drifted" and toggle == "force" and not (gone or disproven):
        nearest = variant or (patch.variants[-1] if patch.variants else None)
        return Decision(verdict, True, True, "forced", f"forced onto code that was never verified: {detail}", nearest)
    if verdict in APPLIED:
        return Decision(verdict, True, True, verdict, detail, variant)
    if verdict == "fixed-upstream" and asked:
        return Decision(verdict, True, True, toggle, f"asked for, although {detail}", variant)
    # Who asks for what the release has mended, or never had, has it.
    wanted = verdict == "drifted" and (needs or toggle in ("on", "force"))
    if verdict == "drifted" and not wanted:
        why = "the newest listed release before it does not need this patch"
        if _newest_before(patch, installed.release) is None:
            why = "no release before it is listed"
        why = f"{detail}; {why}, {variable(patch.name)}=on asks for it"
        return Decision(verdict, False, False, "unneeded", why, variant)
    reason = "disproven" if disproven else "gone" if gone else verdict
    return Decision(verdict, False, wanted, reason, detail, variant)


def _changed(installed: Installed, detail: str, alone: bool = False) -> str:
    """The sentence on code that drifted, and which diffs change what of it. `alone`: nothing else makes it drift."""
    said = f"{detail}, and the diff {' and '.join(installed.diffs)} changes {', '.join(installed.replaced)}"
    return f"{said}, code of which this patch knows only the release's own form" if alone else said


def _proved(
    patch: Patch, installed: Installed, proof: Proof, otherwise: tuple[Verdict, str, Variant | None]
) -> tuple[Verdict, str, Variant | None]:
    """The verdict on code that the proof was run on; `otherwise` is what it is without the proof."""
    release = f"{patch.package} {installed.release or 'of unknown release'}"
    if proof.outcome == "failed":
        return "drifted", f"{release}: the patch's proof failed on exactly this code: {proof.detail}", None
    if proof.outcome == "no-fault":
        return (
            "fixed-upstream",
            f"{release} does not show the fault: the proof was run on exactly this code",
            otherwise[2],
        )
    if otherwise[0] == "needed":
        return otherwise
    own = {name: proof.code[name] for name in patch.names_of(patch.package) if name in proof.code}
    form = Variant(code=own, releases=(installed.release or "",), facts=proof.facts)
    of = f"as changed by {' and '.join(installed.diffs)}" if installed.diffs else "is not listed"
    return "proven", f"{release} {of}; the patch was proven on exactly this code", form


def _needed_before(patch: Patch, release: str | None, unless: bool) -> bool:
    """Whether the newest listed release that is not newer than this one needs the patch.

    True where the release says nothing of its age, and `unless` where none so old is listed: code that is there speaks
    for the fault.
    """
    if age_of(release) is None:
        return True
    newest = _newest_before(patch, release)
    return unless if newest is None else newest == "needed"


def _newest_before(patch: Patch, release: str | None) -> str | None:
    """The verdict of the newest listed release that is not newer than this one; None where none so old is listed."""
    at = age_of(release)
    listed = [(age_of(name), form.verdict) for form in patch.variants for name in form.releases]
    before = [(age, verdict) for age, verdict in listed if age is not None and at is not None and age <= at]
    return max(before, key=lambda one: one[0])[1] if before else None


def judge(patch: Patch, installed: Installed) -> tuple[Verdict, str, Variant | None]:
    """The verdict on the package that is patched alone, with its sentence, and the variant that the code matches."""
    release = f"{patch.package} {installed.release or 'of unknown release'}"
    if not installed.there:
        return "not-present", f"{patch.package} is not installed", None
    if is_gone(patch, installed):
        without = (form for form in patch.variants if form.verdict == "not-present")
        listed = next((form for form in without if is_listed(installed.release, form)), None)
        if listed is not None:
            return "not-present", f"{release} has no {patch.targets[0]}", listed
        return "drifted", f"{release} has no {patch.targets[0]}, and is no release of which that is known", None
    variant = matched(patch, patch.package, installed)
    if variant is None:
        return "drifted", f"{release} {drifted(patch, patch.package, installed)}", None
    if variant.verdict == "not-present":
        return "not-present", f"{release} does not have the code that this patch changes", variant
    if variant.verdict == "fixed-upstream":
        return (
            "fixed-upstream",
            f"{release} {'has the change already' if patch.diff else 'no longer has the fault'}",
            variant,
        )
    if is_listed(installed.release, variant):
        known = "is what the diff applies to exactly" if patch.diff else "has the fault"
        return "needed", f"{release} {known}", variant
    return "unverified", f"{release} is not listed, but its code is that of {variant.releases[-1]}", variant


def as_it_came(patch: Patch, installed: Installed) -> tuple[Verdict, str, Variant | None]:
    """`judge` of the code as it is without any diff."""
    return judge(patch, replace(installed, code={**installed.code, **installed.replaced}))


def is_gone(patch: Patch, installed: Installed) -> bool:
    """Whether none of the patch's targets is there under the name that it had."""
    return all(installed.code.get(target) is None for target in patch.targets)


def judge_companion(patch: Patch, package: str, installed: Installed) -> tuple[Verdict, str, Variant | None]:
    """The same of a package whose code the patch relies on: `needed` is code that the patch was driven with.

    Not installed, or a release known to have none of that code, is `not-present`: that part of the patch never runs.
    """
    if package not in installed.companions:
        return "not-present", f"{package} is not installed", None
    given = installed.companions[package]
    release = f"{package} {given or 'of unknown release'}"
    variant = matched(patch, package, installed)
    listed = variant is not None and is_listed(given, variant)
    # One that nobody listed, and that has none of the names, may have the code under others.
    if variant is None or (variant.verdict == "not-present" and not listed):
        return "drifted", f"{release} {drifted(patch, package, installed)}", None
    if variant.verdict == "not-present":
        return "not-present", f"{release} does not have the code that the patch relies on yet", variant
    if listed:
        return "needed", f"{release} has code that the patch was verified with", variant
    return "unverified", f"{release} is not listed, but its code is that of {variant.releases[-1]}", variant


def moved_companion(patch: Patch, installed: Installed) -> str | None:
    """A sentence on a companion that has none of the names, and may have their code under others; None without one.

    No fingerprint speaks of such a companion: to them it is as if it were not installed.
    """
    for package in patch.companions:
        verdict, detail, _ = judge_companion(patch, package, installed)
        if verdict == "drifted" and all(installed.code.get(name) is None for name in patch.names_of(package)):
            return detail
    return None


def _with_companions(patch: Patch, installed: Installed, verdict: Verdict, detail: str) -> tuple[Verdict, str]:
    """The verdict on all packages: drifted if one has drifted, else unverified if one is."""
    for package in patch.companions:
        found, why, _ = judge_companion(patch, package, installed)
        if found == "drifted":
            return found, why
        if found == "unverified":
            verdict, detail = "unverified" if verdict == "needed" else verdict, f"{detail}; {why}"
    return verdict, detail


def variable(patch: str, option: str = "") -> str:
    """The environment variable of a patch, or of one of its options."""
    name = patch if not option else f"{patch}_{option}"
    return "LIVEPATCH_" + name.upper().replace("-", "_")

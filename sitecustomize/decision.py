"""The decision: what is known of a patch, what is installed and what the environment asks for, to one verdict.

Pure and the same at run time, in `check` and in `matrix`; needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["needed", "unverified", "fixed-upstream", "not-present", "drifted"]


class PatchError(ValueError):
    """What a patch folder says of itself cannot be used; the message names the patch and the entry."""


@dataclass(frozen=True)
class Option:
    """One option of a patch: `LIVEPATCH_NAME_OPTION`, and the names from the field that mean the same."""

    name: str
    default: Any
    help: str = ""
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    off: Any = None  # the value of an alias or the option itself that turns the whole patch off


@dataclass(frozen=True)
class Variant:
    """One verified form of the code that a patch touches and calls.

    `code` maps `module:qualname` to its fingerprint, for every target and every call that these releases have: code
    moves, and a name that a variant lacks must be absent there. `releases` are those in which a release test drove
    exactly this code. `facts` are what the patch's code must know of this variant.
    """

    code: Mapping[str, str]
    releases: tuple[str, ...]
    verdict: Literal["needed", "fixed-upstream", "not-present"] = "needed"
    applies: bool = True  # whether the patch's code can be applied to it at all
    facts: Mapping[str, Any] = field(default_factory=dict)


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
    apart: bool = False  # its targets live in several processes: each module's are applied as soon as it is loaded
    about: Mapping[str, Any] = field(default_factory=dict)  # why, origin, upstream threads: for people

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
    """What is installed of one patch's package: its release, and the fingerprints of the names the patch is about."""

    release: str | None  # None: the package does not say
    code: Mapping[str, str | None]  # None: no such module, or no such name in it
    rocm: bool = False  # torch is built for ROCm; looked up only for patches whose `auto` asks


@dataclass(frozen=True)
class Environment:
    """What the variables say, read by `settings.read`."""

    mode: str = "auto"  # LIVEPATCH: auto, off, strict
    toggles: Mapping[str, str] = field(default_factory=dict)  # patch name: auto, on, force, off
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: tuple[str, ...] = ()  # values that are no values: one sentence each
    notes: tuple[str, ...] = ()  # what looks like a slip but may be meant
    traced: bool = False  # a patch changes traced code here; found out only for patches whose `auto` asks


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


def public_release(release: str) -> str:
    """A release without its local part: 0.21.0+rocm700 is the code of 0.21.0, if the fingerprint says so too."""
    return release.partition("+")[0].lower()


def decide(patch: Patch, installed: Installed, environment: Environment) -> Decision:
    """The one decision. The code's fingerprint comes first, the release number second."""
    verdict, detail, variant = judge(patch, installed)
    toggle = environment.toggles.get(patch.name, "auto")
    if environment.mode == "off" or toggle == "off":
        said = "LIVEPATCH" if environment.mode == "off" else variable(patch.name)
        return Decision(verdict, False, False, "off", f"{said} is off; {detail}", variant)
    wanted_by_itself = {"needed": True, "rocm": installed.rocm, "traced": environment.traced, "off": False}[patch.auto]
    if toggle == "auto" and not wanted_by_itself:
        where = {"rocm": " outside ROCm", "traced": " where no patch changes traced code"}.get(patch.auto, "")
        said = f"off by default{where}, {variable(patch.name)}=on asks for it; {detail}"
        return Decision(verdict, False, False, "optional", said, variant)
    if verdict == "drifted" and toggle == "force":
        newest = patch.variants[-1] if patch.variants else None
        return Decision(verdict, True, True, "forced", f"forced onto code that was never verified: {detail}", newest)
    if verdict in ("needed", "unverified"):
        return Decision(verdict, True, True, verdict, detail, variant)
    if verdict == "fixed-upstream" and toggle in ("on", "force") and variant is not None and variant.applies:
        return Decision(verdict, True, True, toggle, f"asked for, although {detail}", variant)
    wanted = verdict == "drifted" or toggle in ("on", "force")
    return Decision(verdict, False, wanted, verdict, detail, variant)


def judge(patch: Patch, installed: Installed) -> tuple[Verdict, str, Variant | None]:
    """The verdict alone, with its sentence, and the variant that the code matches."""
    release = f"{patch.package} {installed.release or 'of unknown release'}"
    missing = [name for name in patch.names if installed.code.get(name) is None]
    if all(target in missing for target in patch.targets):
        return "not-present", f"{release} has no {patch.targets[0]}", None
    for variant in patch.variants:
        if all(variant.code.get(name) == installed.code.get(name) for name in patch.names):
            break
    else:
        lost = [name for name in missing if all(name in variant.code for variant in patch.variants)]
        if lost:
            return "drifted", f"{release} has no {', '.join(lost)}", None
        changed = ", ".join(unknown_names(patch, installed)) or "a combination of names, each known by itself"
        return "drifted", f"{release} has code that was never verified: {changed}", None
    if variant.verdict == "not-present":
        return "not-present", f"{release} does not have the code with the fault yet", variant
    if variant.verdict == "fixed-upstream":
        return "fixed-upstream", f"{release} has {'the change already' if patch.diff else 'the fault no more'}", variant
    if installed.release is not None and public_release(installed.release) in variant.releases:
        known = "is what the diff applies to exactly" if patch.diff else "has the fault, reproduced on this release"
        return "needed", f"{release} {known}", variant
    return "unverified", f"{release} is not listed, but its code is that of {variant.releases[-1]}", variant


def unknown_names(patch: Patch, installed: Installed) -> list[str]:
    """The names whose fingerprint no variant has."""
    return [
        name
        for name in patch.names
        if installed.code.get(name) not in {variant.code.get(name) for variant in patch.variants}
    ]


def variable(patch: str, option: str = "") -> str:
    """The environment variable of a patch, or of one of its options."""
    name = patch if not option else f"{patch}_{option}"
    return "LIVEPATCH_" + name.upper().replace("-", "_")

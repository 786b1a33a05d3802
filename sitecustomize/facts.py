"""A patch's facts as data, to `Patch`. `patch.toml` and the bundle's `catalogue.json` hold the same entries.

`code`, if it is there, holds the fingerprints that every variant (of another package: every companion) has, unless it
says something else itself: "" is that it lacks the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .conditions import When
from .decision import UNKNOWN, Option, Patch, PatchError, Proof, Variant, module_of, variable
from .order import Order

FORMAT = 1
"""The form of a patch folder's entries that this version reads. Another form has another number."""
_ENTRIES = {
    "format",
    "title",
    "version",
    "package",
    "group",
    "targets",
    "calls",
    "code",
    "variant",
    "companion",
    "option",
    "aliases",
    "auto",
    "per_module",
    "must",
    "when",
    "about",
}
_ENTRIES |= {"diff", "added", "traced"}  # of source changes
_ENTRIES |= set(Order.__dataclass_fields__)


_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]*")


def to_patch(name: str, facts: Mapping[str, Any]) -> Patch:
    """Raises PatchError, naming the patch and the entry."""
    known_format(name, facts)
    common = _common(name, facts)
    patch = Patch(
        name=name,
        package=_text(name, facts, "package"),
        title=_text(name, facts, "title"),
        targets=_paths(name, facts, "targets"),
        calls=_paths(name, facts, "calls") if "calls" in facts else (),
        variants=tuple(_variant(name, entry, common.get("", {})) for entry in _tables(name, facts, "variant")),
        companions=_companions(name, facts, common),
        options=tuple(_option(name, entry) for entry in _tables(name, facts, "option")),
        aliases=_texts(name, facts, "aliases"),
        auto=facts.get("auto", "needed"),
        diff=_text(name, facts, "diff") if "diff" in facts else "",
        added=_texts(name, facts, "added"),
        traced=bool(facts.get("traced", "diff" in facts)),
        per_module=bool(facts.get("per_module", False)),
        must=facts.get("must", False),
        when=_when(name, facts.get("when", {})),
        order=_order(name, facts),
        about=_table(name, facts, "about"),
        version=facts.get("version"),
        group=_text(name, facts, "group") if "group" in facts else "",
        proofs=tuple(_proof(name, entry) for entry in _tables(name, facts, "proof")),
    )
    if patch.group and not patch.group.isidentifier():
        raise PatchError(f"patch {name}: a group is a name of letters, digits and underscores, not {patch.group!r}")
    if patch.version is not None and (type(patch.version) is not int or patch.version < 1):
        raise PatchError(f"patch {name}: version is a whole number from 1 on, not {patch.version!r}")
    if type(patch.must) is not bool:
        raise PatchError(f"patch {name}: must is true or false, not {patch.must!r}")
    if patch.auto not in ("needed", "rocm", "traced", "off"):
        raise PatchError(f"patch {name}: auto is needed, rocm, traced or off, not {patch.auto!r}")
    if not patch.targets:
        raise PatchError(f"patch {name}: targets is empty")
    if len(set(patch.targets)) < len(patch.targets):
        twice = next(target for target in patch.targets if patch.targets.count(target) > 1)
        raise PatchError(f"patch {name}: targets names {twice} twice")
    options = [variable(name, option.name) for option in patch.options]
    if len(set(options)) < len(options):
        twice = next(option for option in options if options.count(option) > 1)
        raise PatchError(f"patch {name}: two options are {twice}")
    for proof in patch.proofs:
        if not set(patch.targets) & set(proof.code) or not set(proof.code) <= set(patch.names):
            raise PatchError(
                f"patch {name}: a proof's code is that of a target, and of no other names than the patch's"
            )
    own = frozenset(patch.names_of(patch.package))
    for variant in patch.variants:
        subject = f"patch {name}: the variant of {', '.join(variant.releases)}"
        strange = sorted(variant.code.keys() - own)
        if strange:
            raise PatchError(f"{subject} names {', '.join(strange)}, which is neither a target nor a call")
        if not patch.targets_of(variant) and variant.verdict != "not-present":
            raise PatchError(f"{subject} has no target: there it is not-present, whatever its verdict says")
    for package, companions in patch.companions.items():
        names = set(patch.names_of(package))
        if not names or names & set(patch.targets):
            raise PatchError(
                f"patch {name}: what a patch relies on of {package} stands in calls, and it wraps none of it"
            )
        for variant in companions:
            subject = f"patch {name}: the companion {package} {', '.join(variant.releases)}"
            strange = sorted(set(variant.code) - names)
            if strange:
                raise PatchError(f"{subject} names {', '.join(strange)}, which is no call of {package}")
            if bool(variant.code) == (variant.verdict == "not-present"):
                raise PatchError(f"{subject} has code, or the verdict not-present, and not both")
    return patch


def _when(name: str, entry: Any) -> When:
    if not isinstance(entry, Mapping):
        raise PatchError(f"patch {name}: when must be a table")
    unknown = sorted(set(entry) - {"environ", "platform"})
    if unknown:
        raise PatchError(f"patch {name}: when has environ and platform, and no {', '.join(unknown)}")
    environ, platform = entry.get("environ", {}), entry.get("platform")
    if not isinstance(environ, Mapping) or not all(isinstance(value, str) for value in environ.values()):
        raise PatchError(f"patch {name}: when.environ is a table of variables and the texts that they must have")
    if platform is not None and (not isinstance(platform, str) or not platform):
        raise PatchError(f"patch {name}: when.platform is a text, such as linux or rocm, not {platform!r}")
    return When(dict(environ), platform or "")


def _order(name: str, facts: Mapping[str, Any]) -> Order:
    """Of a diff, whose place is beneath all wrappers, only which patches it is instead of."""
    keys = list(Order.__dataclass_fields__)
    astray = [key for key in keys if key in _table(name, facts, "about")]
    if astray:
        raise PatchError(f"patch {name}: {astray[0]} stands above [about], which is for people")
    named = {key: tuple(one.replace("_", "-") for one in _texts(name, facts, key)) for key in keys}
    for key, others in named.items():
        if name in others:
            raise PatchError(f"patch {name}: {key} names the patch itself")
        if others and "diff" in facts and key != "instead_of":
            raise PatchError(f"patch {name}: a diff stands beneath all wrappers: it has no {key}")
    both = sorted(set(named["inside"]) & set(named["outside"]))
    if both:
        raise PatchError(f"patch {name}: inside and outside both name {both[0]}")
    return Order(**named)


def _proof(name: str, entry: Mapping[str, Any]) -> Proof:
    outcome, code = entry.get("outcome"), entry.get("code")
    if outcome not in ("proven", "no-fault", "failed"):
        raise PatchError(f"patch {name}: a proof's outcome is proven, no-fault or failed, not {outcome!r}")
    if not isinstance(code, Mapping) or not code:
        raise PatchError(f"patch {name}: a proof names the code that it was run on")
    if not all(isinstance(digest, str) and digest not in ("", UNKNOWN) for digest in code.values()):
        raise PatchError(f"patch {name}: a proof has a fingerprint of each name that it was run on")
    facts, detail = entry.get("facts", {}), entry.get("detail", "")
    if not isinstance(facts, Mapping) or not isinstance(detail, str):
        raise PatchError(f"patch {name}: a proof's facts are a table, and its detail is a text")
    return Proof(dict(code), outcome, dict(facts), detail)


def known_format(name: str, facts: Mapping[str, Any]) -> None:
    """Raises PatchError where this version does not know the form of the entries, or one of them.

    Without a number the form is 1.
    """
    given = facts.get("format", FORMAT)
    if type(given) is not int or given != FORMAT:
        raise PatchError(f"patch {name}: format is {given!r}, and this version of vllm-livepatch knows {FORMAT} alone")
    # `proof` is what `generate --proofs` adds, `read` what a lock distributes among its forms.
    unknown = sorted(set(facts) - _ENTRIES - {"proof", "read"})
    if unknown:
        raise PatchError(f"patch {name}: no entry is called {', '.join(unknown)}")


def _companions(
    name: str, facts: Mapping[str, Any], common: Mapping[str, dict[str, str]]
) -> dict[str, tuple[Variant, ...]]:
    companions: dict[str, tuple[Variant, ...]] = {}
    for entry in _tables(name, facts, "companion"):
        package = _text(name, entry, "package")
        if package == facts.get("package"):
            raise PatchError(f"patch {name}: a companion is of another package than {package}")
        variant = _variant(name, entry, common.get(package, {}))
        companions[package] = (*companions.get(package, ()), variant)
    return companions


def _common(name: str, facts: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The fingerprints that all forms of a companion have, by its package; under the empty one, all variants."""
    code = facts.get("code", {})
    others = {str(entry.get("package")) for entry in _tables(name, facts, "companion")}
    if not isinstance(code, Mapping) or not set(code) <= {
        *_texts(name, facts, "targets"),
        *_texts(name, facts, "calls"),
    }:
        raise PatchError(f"patch {name}: code has a name that is neither a target nor a call")
    found: dict[str, dict[str, str]] = {}
    for path, digest in code.items():
        top = module_of(path).partition(".")[0]
        found.setdefault(top if top in others else "", {})[path] = digest
    return found


def _variant(name: str, entry: Mapping[str, Any], common: Mapping[str, str]) -> Variant:
    verdict = entry.get("verdict", "needed")
    if verdict not in ("needed", "fixed-upstream", "not-present"):
        raise PatchError(f"patch {name}: a variant's verdict is needed, fixed-upstream or not-present, not {verdict!r}")
    releases = _texts(name, entry, "releases")
    if not releases or not isinstance(entry.get("code"), Mapping):
        raise PatchError(f"patch {name}: a variant needs releases and code")
    # A companion's release that has none of the code yet has nothing in common with the others.
    none = verdict == "not-present" and "package" in entry
    code = {**({} if none else common), **entry["code"]}
    return Variant(
        code={path: digest for path, digest in code.items() if digest},
        releases=releases,
        verdict=verdict,
        applies=bool(entry.get("applies", True)),
        facts=_table(name, entry, "facts"),
        read=_texts(name, entry, "read"),
    )


def _option(name: str, entry: Mapping[str, Any]) -> Option:
    if "default" not in entry:
        raise PatchError(f"patch {name}: an option needs a name and a default")
    return Option(
        name=_text(name, entry, "name"),
        default=entry["default"],
        help=str(entry.get("help", "")),
        minimum=entry.get("minimum"),
        maximum=entry.get("maximum"),
        choices=_texts(name, entry, "choices"),
        aliases=_texts(name, entry, "aliases"),
        off=entry.get("off"),
    )


def _text(name: str, facts: Mapping[str, Any], entry: str) -> str:
    value = facts.get(entry)
    if not isinstance(value, str) or not value:
        raise PatchError(f"patch {name}: {entry} must be a text")
    return value


def _texts(name: str, facts: Mapping[str, Any], entry: str) -> tuple[str, ...]:
    values = facts.get(entry, [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise PatchError(f"patch {name}: {entry} must be a list of texts")
    if entry in ("releases", "read"):
        ranges = [value for value in values if not _VERSION.fullmatch(value)]
        if ranges:
            raise PatchError(f"patch {name}: {entry} lists releases, one by one, and {ranges[0]!r} is none")
    return tuple(values)


def _table(name: str, facts: Mapping[str, Any], entry: str) -> dict[str, Any]:
    value = facts.get(entry, {})
    if not isinstance(value, Mapping):
        raise PatchError(f"patch {name}: {entry} must be a table")
    return dict(value)


def _tables(name: str, facts: Mapping[str, Any], entry: str) -> list[Mapping[str, Any]]:
    values = facts.get(entry, [])
    if not isinstance(values, list) or not all(isinstance(value, Mapping) for value in values):
        raise PatchError(f"patch {name}: {entry} must be an array of tables")
    return values


def _paths(name: str, facts: Mapping[str, Any], entry: str) -> tuple[str, ...]:
    paths = _texts(name, facts, entry)
    for path in paths:
        module, colon, qualname = path.partition(":")
        parts = [*module.split("."), *(qualname.split(".") if colon else ())]
        if bool(colon) == ("diff" in facts) or not all(part.isidentifier() for part in parts):
            raise PatchError(f"patch {name}: {entry} has {path!r}, which is not module:qualname (a diff's: module)")
    return paths

"""Which of its verified forms the code has that a patch touches and calls, and what it has that none of them has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .release_order import public_release

if TYPE_CHECKING:
    from .decision import Installed, Patch, Variant


def matched(patch: Patch, package: str, installed: Installed) -> Variant | None:
    """The form whose names, and no others, have the code that is installed."""
    return next((form for form in patch.forms(package) if not differences(patch, package, form, installed)), None)


def differences(patch: Patch, package: str, form: Variant, installed: Installed) -> list[str]:
    """The names of a package whose code is not that of one of its forms."""
    return [name for name in patch.names_of(package) if form.code.get(name) != installed.code.get(name)]


def is_listed(release: str | None, form: Variant) -> bool:
    return release is not None and not {release, public_release(release)}.isdisjoint(form.releases)


def drifted(patch: Patch, package: str, installed: Installed) -> str:
    """What a package's code has that no form of it has, in a few words."""
    names, forms = patch.names_of(package), [form for form in patch.forms(package) if form.code]
    modules = dict.fromkeys(name.partition(":")[0] for name in names)
    unknown = [installed.unknown[module] for module in modules if module in installed.unknown]
    if unknown:
        return f"runs code that cannot be looked at: {'; '.join(unknown)}"
    lost = [name for name in names if installed.code.get(name) is None and all(name in form.code for form in forms)]
    if lost:
        return f"has no {', '.join(lost)}"
    if not forms:
        return f"has code that was never verified: {', '.join(names)}"
    nearest = min(reversed(forms), key=lambda form: len(differences(patch, package, form, installed)))
    differs = differences(patch, package, nearest, installed)
    known = {name: {form.code.get(name) for form in forms} for name in names}
    unknown = [
        name
        for name in names
        if installed.code.get(name) not in known[name] or (name in differs and installed.code.get(name) is None)
    ]
    return "has code that was never verified: " + (
        ", ".join(unknown)
        or f"a combination of names, each known by itself (not that of {nearest.releases[-1]}: {', '.join(differs)})"
    )

"""The environment's variables, read once, in any case. A value that is not one of those offered counts as `auto`, and a
line says so. An empty one counts as unset, as charts and unit files leave it.

But for LIVEPATCH itself: what turns everything off must not fail open, so there it counts as `off`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .decision import Environment, Option, Patch, variable

MODES = ("auto", "off", "strict")
TOGGLES = ("auto", "on", "force", "off")
OF_A_GROUP = ("auto", "on", "off")
GROUPS = ("scheduler", "nixl", "mooncake", "moriio", "lmcache_server", "lmcache_in_process", "offloading", "rocm")
"""Those of the catalogue: a bundle of a few patches knows their variables too."""
LOGS = ("text", "json")
_SWITCH = {
    **dict.fromkeys(("1", "true", "yes", "on", "enabled"), "on"),
    **dict.fromkeys(("0", "false", "no", "off", "disabled"), "off"),
}

_MODE = {word: "auto" if switch == "on" else switch for word, switch in _SWITCH.items()}


def read(patches: Sequence[Patch], environ: Mapping[str, str]) -> Environment:
    """Read every variable of the contract; `errors` holds a sentence for each value that cannot be used."""
    environ = {name: value for name, value in environ.items() if value.strip()}
    errors: list[str] = []
    mode = _one_of("LIVEPATCH", environ.get("LIVEPATCH", "auto"), MODES, errors, _MODE, "off")
    toggles: dict[str, str] = {}
    options: dict[str, dict[str, Any]] = {}
    groups = _groups(patches, environ, errors)
    switches: dict[str, str] = {}
    for patch in patches:
        toggle, by = _toggle(patch, environ, errors)
        if not toggle and groups.get(patch.group, "auto") != "auto":
            toggle, by = groups[patch.group], of_group(patch.group)
        toggles[patch.name], switches[patch.name] = toggle or "auto", by
        options[patch.name] = {}
        for option in patch.options:
            value, given = _option(patch, option, environ, errors)
            options[patch.name][option.name] = value
            # An explicit toggle says more than an option's "off" value.
            if given and option.off is not None and value == option.off and variable(patch.name) not in environ:
                toggles[patch.name] = "off"
    if "LIVEPATCH_LOG" in environ:
        _one_of("LIVEPATCH_LOG", environ["LIVEPATCH_LOG"], LOGS, errors, {}, "text")
    keep = False
    if "LIVEPATCH_STATE_KEEP" in environ:
        keep = (
            _one_of("LIVEPATCH_STATE_KEEP", environ["LIVEPATCH_STATE_KEEP"], ("on", "off"), errors, _SWITCH, "off")
            == "on"
        )
    known = {"LIVEPATCH_STATE_DIR", "LIVEPATCH_STATE_KEEP", "LIVEPATCH_LOG", *map(of_group, groups)}
    for patch in patches:
        known |= {variable(patch.name), *(variable(patch.name, option.name) for option in patch.options)}
    unknown = sorted(name for name in environ if name.startswith("LIVEPATCH_") and name not in known)
    notes = tuple(f"{name} is unknown, and nothing reads it{_did_you_mean(name, known)}" for name in unknown)
    variables = {name: environ.get(name, "") for patch in patches for name in patch.when.environ}
    return Environment(mode, toggles, options, tuple(errors), notes, keep=keep, switches=switches, variables=variables)


def _did_you_mean(name: str, known: Collection[str]) -> str:
    import difflib  # a process that has no such variable does without it

    near = difflib.get_close_matches(name, sorted(known), 1, 0.8)
    return f"; did you mean {near[0]}?" if near else ""


def changed_settings(patches: Sequence[Patch], environment: Environment) -> dict[str, Any]:
    """What differs from the defaults, as a report shows it."""
    options: dict[str, dict[str, Any]] = {}
    for patch in patches:
        values = environment.options[patch.name]
        differ = {option.name for option in patch.options if values[option.name] != option.default}
        if differ:
            options[patch.name] = {name: value for name, value in values.items() if name in differ}
    toggles = {name: toggle for name, toggle in environment.toggles.items() if toggle != "auto"}
    return {"mode": environment.mode, "toggles": toggles, "options": options}


def _one_of(
    name: str, given: str, values: Sequence[str], errors: list[str], words: Mapping[str, str], otherwise: str
) -> str:
    """The value that is given; `words` are others that mean one of them."""
    value = given.strip().lower()
    value = words.get(value, value)
    if value in values:
        return value
    errors.append(f"{name}={given!r} is none of {', '.join(values)}; it counts as {otherwise}")
    return otherwise


def of_group(group: str) -> str:
    """The variable of a group of patches."""
    return f"LIVEPATCH_GROUP_{group.upper()}"


def _groups(patches: Sequence[Patch], environ: Mapping[str, str], errors: list[str]) -> dict[str, str]:
    """What is asked of each group."""
    groups = dict.fromkeys([*GROUPS, *(patch.group for patch in patches if patch.group)], "auto")
    for group in groups:
        name = of_group(group)
        if name in environ:
            groups[group] = _one_of(name, environ[name], OF_A_GROUP, errors, _SWITCH, "auto")
    return groups


def _toggle(patch: Patch, environ: Mapping[str, str], errors: list[str]) -> tuple[str, str]:
    """What is asked of the patch itself, empty where nothing is, and the variable that asks."""
    name = variable(patch.name)
    if name in environ:
        return _one_of(name, environ[name], TOGGLES, errors, _SWITCH, "auto"), name
    for alias in patch.aliases:
        if alias in environ:
            switch = _SWITCH.get(environ[alias].strip().lower())
            if switch is not None:
                return switch, alias
            errors.append(f"{alias}={environ[alias]!r} is neither 1 nor 0; it counts as auto")
            return "auto", alias
    return "", name


def _option(patch: Patch, option: Option, environ: Mapping[str, str], errors: list[str]) -> tuple[Any, bool]:
    """The option's value, and whether a variable gave it."""
    for name in (variable(patch.name, option.name), *option.aliases):
        if name in environ:
            value = _parsed(option, environ[name].strip())
            if value is not None:
                return value, True
            errors.append(f"{name}={environ[name]!r} is not {wanted(option)}; it counts as {option.default}")
    return option.default, False


def _parsed(option: Option, text: str) -> Any:
    """The value in the type of the default, or None where the text is not one."""
    value: Any
    if isinstance(option.default, bool):
        switch = _SWITCH.get(text.lower())
        return None if switch is None else switch == "on"
    if option.choices:
        return next((choice for choice in option.choices if choice.lower() == text.lower()), None)
    if isinstance(option.default, str):
        return text
    try:
        value = type(option.default)(text)
    except ValueError:
        return None
    if value != option.off and not _within(option, value):
        return None
    return value


def _within(option: Option, value: float) -> bool:
    """Whether a number is one (a NaN is none, and so is what no clock reaches), and within what the option takes."""
    least = option.minimum if option.minimum is not None else value
    most = option.maximum if option.maximum is not None else value
    return least <= value <= most and abs(value) < float("inf")


def wanted(option: Option) -> str:
    """What a value of it has to be; empty where any text will do."""
    if isinstance(option.default, bool):
        return "1 or 0"
    if option.choices:
        return f"one of {', '.join(option.choices)}"
    if isinstance(option.default, str):
        return ""
    number = "a whole number" if isinstance(option.default, int) else "a number"
    bounds = (("at least", option.minimum), ("at most", option.maximum))
    limits = " and ".join(f"{words} {bound:g}" for words, bound in bounds if bound is not None)
    return f"{number} of {limits}" if limits else number

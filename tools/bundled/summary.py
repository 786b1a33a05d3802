"""`status` as plain text: each process, or hundreds of them in one screen."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .reading import STATES
from .status import Reports, age, is_heard_of, is_missing

_TROUBLES = 8
_KINDS = 3
_WIDTH = 200


def bundle_of(process: dict[str, Any]) -> str:
    """The bundle that a process runs, in a word: its version, and the beginning of its digest."""
    digest = process["digest"]
    return (process["version"] or "0.1") + (f"+{digest[: len('sha256:') + 12]}" if digest else "")


def packages_of(process: dict[str, Any]) -> str:
    found = ", ".join(f"{name} {release or 'of unknown release'}" for name, release in process["packages"].items())
    return found or "no package yet"


def heard(process: dict[str, Any]) -> str:
    seconds = age(process)
    if seconds is None:
        return ""
    return f", last heard of {seconds:.0f} s ago" if seconds > -1 else f", its clock is {-seconds:.0f} s ahead"


def head(process: dict[str, Any]) -> str:
    return (
        f"pid {process['pid']} on {process['host']} since {process['started']}: {packages_of(process)}, "
        f"bundle {bundle_of(process)}{heard(process)}"
    )


def command_of(process: dict[str, Any]) -> str:
    return " ".join(" ".join(process["argv"]).split())[:200]


def versioned(patch: dict[str, Any]) -> str:
    """Its name, and its version where the report has one."""
    return patch["name"] if patch.get("version") is None else f"{patch['name']}@{patch['version']}"


def why(patch: dict[str, Any]) -> str:
    return " ".join(f"{patch['reason']}: {patch['detail']}".split()) if patch["reason"] else ""


def counted(counters: dict[str, int], kinds: int | None = None) -> str:
    """Counters in a cell, the highest first where there are more than so many kinds."""
    shown = (
        sorted(counters.items()) if kinds is None or len(counters) <= kinds else Counter(counters).most_common(kinds)
    )
    return ", ".join(f"{kind} {number}" for kind, number in shown) + (", ..." if len(shown) < len(counters) else "")


def processes_text(reports: Reports) -> str:
    """Every live process and its patches."""
    lines: list[str] = []
    for process in reports.live:
        lines += [head(process), f"  {command_of(process)}"]
        rows = [
            (versioned(patch), patch["state"], patch["verdict"] or "-", counted(patch["counters"]) or "-", why(patch))
            for patch in process["patches"]
        ]
        lines += columns([("patch", "state", "verdict", "counters", "why"), *rows])
    return "\n".join(lines) or "no live patched process has a report"


def summary(reports: Reports) -> dict[str, Any]:
    """All processes together."""
    bundles: dict[str, dict[str, Any]] = {}
    patches: dict[str, dict[str, Any]] = {}
    troubles: dict[tuple[str, str, str], dict[str, Any]] = {}
    for process in reports.live:
        bundle = bundles.setdefault(bundle_of(process), {"processes": 0, "packages": []})
        bundle["processes"] += 1
        if packages_of(process) not in bundle["packages"]:
            bundle["packages"].append(packages_of(process))
        for patch in process["patches"]:
            of_all = patches.setdefault(versioned(patch), {**dict.fromkeys(STATES, 0), "counters": Counter()})
            of_all[patch["state"]] += 1
            of_all["counters"].update(patch["counters"])
            if is_missing(patch):
                first = {**{key: patch[key] for key in ("name", "state", "reason", "detail")}, "processes": 0}
                first["example"] = {"pid": process["pid"], "host": process["host"]}
                troubles.setdefault((patch["name"], patch["state"], patch["reason"]), first)["processes"] += 1
    silent = sum(
        not seen and not is_heard_of(process) for process, seen in zip(reports.live, reports.seen, strict=True)
    )
    return {
        "processes": len(reports.live),
        "hosts": len({process["host"] for process in reports.live}),
        "unheard": silent,
        "bundles": bundles,
        "patches": {name: {**found, "counters": dict(found["counters"])} for name, found in sorted(patches.items())},
        "troubles": list(troubles.values()),
    }


def _many(number: int, noun: str) -> str:
    return f"{number} {noun if number == 1 else {'process': 'processes'}.get(noun, f'{noun}s')}"


def summary_text(found: dict[str, Any]) -> str:
    """At most a screen, however many processes there are."""
    silent = f", {found['unheard']} of them not heard of for three minutes" if found["unheard"] else ""
    lines = [f"{_many(found['processes'], 'process')} on {_many(found['hosts'], 'host')}{silent}"]
    lines += [
        f"bundle {name}: {_many(bundle['processes'], 'process')}; {'; '.join(bundle['packages'][:_KINDS])}"
        + (f"; {len(bundle['packages']) - _KINDS} other sets of packages" if len(bundle["packages"]) > _KINDS else "")
        for name, bundle in sorted(found["bundles"].items())
    ]
    if len(found["bundles"]) > 1:
        lines.append("more than one bundle is in use")
    rows = [
        (name, *(str(patch[state]) for state in STATES), counted(patch["counters"], _KINDS) or "-")
        for name, patch in found["patches"].items()
    ]
    lines += columns([("patch", *STATES, "counted, all processes together"), *rows]) if rows else []
    troubles = found["troubles"]
    for trouble in troubles[:_TROUBLES]:
        first = f"pid {trouble['example']['pid']} on {trouble['example']['host']}"
        where = f"{_many(trouble['processes'], 'process')}, such as {first}"
        line = f"{trouble['name']} is {trouble['state']} in {where}, {why(trouble)}"
        lines.append(line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}...")
    lines += [f"and {len(troubles) - _TROUBLES} more" for _ in troubles[_TROUBLES : _TROUBLES + 1]]
    return "\n".join(lines)


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """A table, its first row the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]

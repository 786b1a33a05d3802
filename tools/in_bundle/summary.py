"""`status` as plain text: each process, or hundreds of them in one screen."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .reading import STATES
from .status import Reports, age, is_missing

_TROUBLES = 8
_KINDS = 3
_BUNDLES = 6
_WIDTH = 200
_SCREEN = (200, 45)
"""Columns and lines where the output is no terminal."""
FEW = 4
"""So many processes are shown with all their patches; more of them have a line each, as many as a screen takes."""


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


def processes_text(reports: Reports, everything: bool = False) -> str:
    """Every live process and its patches. Where there are many: a screen of processes, unless `everything` is asked."""
    if is_a_crowd(reports, everything):
        return overview(reports)
    lines: list[str] = []
    for process in reports.live:
        lines += [head(process), f"  {command_of(process)}"]
        rows = [
            (versioned(patch), patch["state"], patch["verdict"] or "-", counted(patch["counters"]) or "-", why(patch))
            for patch in process["patches"]
        ]
        lines += columns([("patch", "state", "verdict", "counters", "why"), *rows])
    return "\n".join(lines) or "no live patched process has a report"


def is_a_crowd(reports: Reports, everything: bool) -> bool:
    """Whether there are too many processes to show each with its patches, and `everything` was not asked for."""
    return len(reports.live) > FEW and not everything


def overview(reports: Reports) -> str:
    """A line a process, as many as fit on the screen, those first in which something is amiss."""
    width, height = shutil.get_terminal_size(_SCREEN)
    usual = _usual_bundle(reports)
    silent = {id(process) for process in reports.silent}
    amiss = [(process, _amiss(process, usual, id(process) in silent)) for process in reports.live]
    amiss.sort(key=lambda one: not one[1])
    rows = []
    for process, what in amiss[: max(height - 5, FEW)]:
        states = Counter(patch["state"] for patch in process["patches"])
        counts = (str(states[state]) for state in STATES)
        rows.append((process["host"], str(process["pid"]), *counts, what or command_of(process)))
    lines = [_how_many(reports), *columns([("host", "pid", *STATES, "what is amiss, or else the command"), *rows])]
    if left := amiss[len(rows) :]:
        more = f"{len(left)} more {'process' if len(left) == 1 else 'processes'}"
        lines.append(f"and {more}, with something amiss in {sum(bool(what) for _, what in left) or 'none'} of them")
    lines.append("--all shows each process with its patches, --summary all processes together")
    return "\n".join(_cut(line, width) for line in lines)


def _amiss(process: dict[str, Any], usual: str, silent: bool) -> str:
    """What is amiss in a process among many, empty where nothing is. `usual` is the bundle of most of them."""
    found = [heard(process).removeprefix(", ") or "silent"] if silent else []
    found += [f"bundle {bundle_of(process)}"] if bundle_of(process) != usual else []
    missing = (patch for patch in process["patches"] if is_missing(patch))
    return "; ".join([*found, *(f"{patch['name']} {patch['state']} ({patch['reason']})" for patch in missing)])


def summary(reports: Reports) -> dict[str, Any]:
    """All processes together."""
    bundles: dict[str, dict[str, Any]] = {}
    patches: dict[str, dict[str, Any]] = {}
    troubles: dict[tuple[str, str, str], dict[str, Any]] = {}
    for process in reports.live:
        bundle = bundles.setdefault(bundle_of(process), {"processes": 0, "packages": [], "hosts": {}})
        bundle["processes"] += 1
        bundle["hosts"][process["host"]] = None
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
    return {
        "processes": len(reports.live),
        "hosts": len({process["host"] for process in reports.live}),
        "unheard": len(reports.silent),
        "unheard_hosts": sorted({process["host"] for process in reports.silent}),
        "bundles": {name: {**found, "hosts": sorted(found["hosts"])} for name, found in sorted(bundles.items())},
        "patches": {name: {**found, "counters": dict(found["counters"])} for name, found in sorted(patches.items())},
        "troubles": list(troubles.values()),
    }


def _usual_bundle(reports: Reports) -> str:
    """The bundle that most processes run."""
    return next((name for name, _ in Counter(map(bundle_of, reports.live)).most_common(1)), "")


def _processes(number: int) -> str:
    return f"{number} {'process' if number == 1 else 'processes'}"


def _how_many(reports: Reports) -> str:
    hosts = len({process["host"] for process in reports.live})
    return _heading(len(reports.live), hosts, len(reports.silent))


def _heading(processes: int, hosts: int, unheard: int) -> str:
    silent = f", {unheard} of them not heard of for three minutes" if unheard else ""
    return f"{_processes(processes)} on {hosts} {'host' if hosts == 1 else 'hosts'}{silent}"


def summary_text(found: dict[str, Any]) -> str:
    """At most a screen, however many processes there are. Names the hosts that are silent, or on another bundle."""
    lines = [_heading(found["processes"], found["hosts"], found["unheard"])]
    if found["unheard"]:
        lines.append(_named("not heard of:", found["unheard_hosts"]))
    bundles = sorted(found["bundles"].items(), key=lambda one: -one[1]["processes"])
    for place, (name, bundle) in enumerate(bundles[:_BUNDLES]):
        more = len(bundle["packages"]) - _KINDS
        others = f"; {more} other sets of packages" if more > 0 else ""
        line = f"bundle {name}: {_processes(bundle['processes'])}; {'; '.join(bundle['packages'][:_KINDS])}{others}"
        lines.append(_named(f"{line}; on", bundle["hosts"]) if place else line)
    if len(bundles) > 1:
        hidden = f", {len(bundles) - _BUNDLES} of them not shown" if len(bundles) > _BUNDLES else ""
        lines.append(f"{len(bundles)} bundles are in use{hidden}: a process keeps its own until it is restarted")
    rows = [
        (name, *(str(patch[state]) for state in STATES), counted(patch["counters"], _KINDS) or "-")
        for name, patch in found["patches"].items()
    ]
    lines += columns([("patch", *STATES, "counted, all processes together"), *rows]) if rows else []
    troubles = found["troubles"]
    for trouble in troubles[:_TROUBLES]:
        first = f"pid {trouble['example']['pid']} on {trouble['example']['host']}"
        where = f"{_processes(trouble['processes'])}, such as {first}"
        lines.append(_cut(f"{trouble['name']} is {trouble['state']} in {where}, {why(trouble)}", _WIDTH))
    lines += [f"and {len(troubles) - _TROUBLES} more" for _ in troubles[_TROUBLES : _TROUBLES + 1]]
    return "\n".join(lines)


def first(sentences: Sequence[str]) -> list[str]:
    """As many of them as fit on a screen, and how many more there are."""
    room = max(shutil.get_terminal_size(_SCREEN).lines - 5, FEW)
    if len(sentences) <= room:
        return [*sentences]
    return [*sentences[:room], f"and {len(sentences) - room} more, with --all"]


def _named(what: str, hosts: Iterable[str]) -> str:
    """A line with as many hosts as it takes, and how many more there are."""
    left = list(hosts)
    line = f"{what} {left.pop(0)}"
    while left and len(line) + len(left[0]) < _WIDTH - len(", and 1000000 more (--json names all)"):
        line += f", {left.pop(0)}"
    return _cut(f"{line} and {len(left)} more (--json names all)" if left else line, _WIDTH)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 3]}..."


def columns(rows: list[tuple[str, ...]]) -> list[str]:
    """A table, its first row the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]

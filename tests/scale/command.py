"""Loads without a fault, at many sizes, on real schedulers, connectors and workers: stock and patched side by side."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.measured import measured_on

from tests.scale import fleets, judge, plans
from tests.simulation import setups

# Found as setups finds it.
import interpreter  # isort: skip
from prefill_decode_drive import nixl_site  # isort: skip

HERE = Path(__file__).parent
DRIVER = "../../scale/driver"
"""Where Interpreter.run, which looks in its own folder, finds ours."""
RELEASES = ("0.29.0", "0.32.0", "0.33.0")
LMCACHE = "0.5.6"
SHORT_SECONDS = 1500
LONG_SECONDS = 6 * 3600
"""Longest time for one driver, which plays several loads."""
MOST = 4
"""So many findings of one load are reported."""
KEPT = HERE.parents[1] / "tests" / "results" / "scale.json"


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    parsed = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__)
    parsed.add_argument("--release", action="append", help=f"may be given again (default: {', '.join(RELEASES)})")
    parsed.add_argument("--bundle", type=Path, help="a bundle's directory (default: one of this checkout is made)")
    parsed.add_argument("--load", action="append", help="a load's name; may be given again (default: all)")
    parsed.add_argument("--long", action="store_true", help="the long form, of hours")
    parsed.add_argument(
        "--requests", type=int, default=plans.LIFE, help="requests of a long life (default: %(default)s)"
    )
    parsed.add_argument("--write", action="store_true", help=f"keep each release's report in {KEPT.name}")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it, and print the report; 1 where something was found."""
    asked = parser().parse_args(arguments)
    groups = plans.long(asked.requests) if asked.long else plans.SHORT
    if asked.load:
        groups = [plans.Group(each.environ, [job for job in each.jobs if job["name"] in asked.load]) for each in groups]
    interpreter.SECONDS = LONG_SECONDS if asked.long else SHORT_SECONDS
    if asked.long:
        groups = [plans.Group({**each.environ, "SCALE_LIMIT_SECONDS": str(LONG_SECONDS)}, each.jobs) for each in groups]
    reports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w", encoding="utf-8") as nowhere:
        bundle = asked.bundle and asked.bundle.resolve()
        bundle = bundle or setups.made_bundle(Path(directory) / "bundle")
        mixed = [fleet for fleet in fleets.FLEETS if asked.long and fleet.name in (asked.load or [fleet.name])]
        others = fleets.older(Path(directory)) if mixed else {}
        with pair() as interpreters:
            for release in asked.release or RELEASES:
                begun = time.monotonic()
                with contextlib.redirect_stdout(nowhere):  # what drivers say is for pytest
                    loads = compare(interpreters, release, bundle, [each for each in groups if each.jobs])
                    for fleet in mixed:
                        loads |= fleets.played(interpreters, release, bundle, others, fleet)
                print(f"{release}: {found_in(loads) or 'nothing found'}", file=sys.stderr)
                reports[release] = {
                    **measured_on(HERE.parents[1]),
                    "command": shlex.join(
                        ["python", "-m", "tests.scale", *(sys.argv[1:] if arguments is None else arguments)]
                    ),
                    "lmcache": LMCACHE,
                    "wall_seconds": round(time.monotonic() - begun),
                    "loads": loads,
                }
                if asked.write:
                    keep(": ".join([release, *(asked.load or ())]), reports[release])
    print(json.dumps(reports))
    return 1 if any(found_in(report["loads"]) for report in reports.values()) else 0


def keep(release: str, report: Mapping[str, Any], place: Path = KEPT) -> None:
    """Put what a release's report comes to in the place of its last one. Another run may play the next release, or others
    of its loads.

    Of each load: how long it took on stock and patched, in seconds. Of those with findings, these.
    """
    kept = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    loads = report["loads"]
    found = {name: load["found"] for name, load in loads.items() if load["found"]}
    report = {**report, "loads": {name: load.get("seconds") for name, load in loads.items()}, "found": found}
    place.write_text(json.dumps({**kept, release: report}, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def pair() -> Iterator[list[interpreter.Interpreter]]:
    """Warm interpreters for stock and for patched processes."""
    interpreter.SECONDS = max(interpreter.SECONDS, SHORT_SECONDS)
    with setups.interpreters(2, setups.engine_python()) as both:
        yield both


def found_in(loads: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All findings of one release."""
    return [f"{name}: {finding}" for name, load in loads.items() for finding in load["found"]]


def compare(
    interpreters: Sequence[interpreter.Interpreter], release: str, bundle: Path, groups: Sequence[plans.Group]
) -> dict[str, dict[str, Any]]:
    """Play the loads on one release, on stock and patched at a time; what was found of each, by its name."""
    result: dict[str, dict[str, Any]] = {}
    for group in groups:
        with ThreadPoolExecutor(2) as pool:
            stock, patched = pool.map(play, interpreters, [release] * 2, [None, bundle], [group] * 2)
        for before, after in zip(stock, patched, strict=True):
            result[after["name"]] = {
                "found": [finding[:200] for finding in judge.findings(before, after)[:MOST]],
                "ends": after["ends"],
                "seconds": [before["seconds"], after["seconds"]],
            }
    return result


def play(warm: interpreter.Interpreter, release: str, bundle: Path | None, group: plans.Group) -> list[dict[str, Any]]:
    """What a group's loads came to, in one driver's process."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        (work / "job.json").write_text(json.dumps(group.jobs), encoding="utf-8")
        result = warm.run(
            DRIVER,
            {"vllm": release, "lmcache": LMCACHE},
            work,
            bundle=bundle,
            environ=group.environ,
            arguments=[str(work / "job.json")],
            path=[setups.DRIVERS, setups.ROOT, nixl_site(setups.engine_python())],
        )
    loads: list[dict[str, Any]] = result["loads"]
    return loads

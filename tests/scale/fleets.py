"""Mixed fleets: engines and servers with this bundle beside others with an older one, or with none.

NIXL's push engines, Mooncake's engines, and LMCache's server and workers, each pair in two processes, and nothing fails.
A pair is played as a pair without any bundle is; it must hear and hold the same. The requests are those of the driver.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.lab import environments, revisions

from tests.scale import judge, plans
from tests.simulation import setups

# Found as setups finds it.
import interpreter  # isort: skip
from prefill_decode_drive import nixl_site  # isort: skip

OLDER = {"0.1.5": "53fbf18", "0.1.9": "c775e6c"}
"""Versions that a fleet may still have, and the revisions that they are made of."""


@dataclass(frozen=True)
class Fleet:
    """A load of two processes: a driver, and its two `roles`, of which the process with this bundle has one."""

    name: str
    driver: str
    roles: tuple[str, str]
    environ: Mapping[str, str]
    needs: Callable[[Path], Sequence[Path]]
    """What an interpreter lacks of it: folders for its path."""
    arguments: tuple[str, ...] = ()
    """The driver's, before the role."""


FLEETS = (
    Fleet("fleet, NIXL push", "push_mixed", ("prefill", "decode"), plans.PUSH, lambda python: [nixl_site(python)]),
    Fleet(
        "fleet, Mooncake",
        "mooncake_mixed",
        ("prefill", "decode"),
        plans.MOONCAKE,
        lambda python: [environments.mooncake(python)],
        ("1.0",),
    ),
    Fleet("fleet, LMCache", "lmcache_mixed", ("worker", "server"), plans.DEFAULT, lambda _: []),
)


def older(directory: Path) -> dict[str, str]:
    """What the other process of a pair may have: no bundle, or one of an older version, made in this directory."""
    others = {"none": "none"}
    for version, revision in OLDER.items():
        others[version] = str(directory / version)
        revisions.command_line("generate", "--out", others[version], path=revisions.checkout(revision))
    return others


def played(
    warm: Sequence[interpreter.Interpreter], release: str, bundle: Path, others: Mapping[str, str], fleet: Fleet
) -> dict[str, dict[str, Any]]:
    """Each pair of a fleet, by its name: what of it is not as on stock (`found`), and what each case came to (`ends`)."""
    stock, _ = pair(warm[0], release, None, fleet, fleet.roles[0], "none")
    result = {}
    for version, other in others.items():
        expected = 2 - (other == "none")
        with ThreadPoolExecutor(2) as pool:
            both = pool.map(pair, warm, [release] * 2, [bundle] * 2, [fleet] * 2, fleet.roles, [other] * 2)
        for role, (cases, acting) in zip(fleet.roles, both, strict=True):
            found = judge.differences(stock, cases)
            if acting != expected:
                found.append(f"{acting} of {expected} bundles have acted")
            result[f"{fleet.name}: {role} with this bundle, the other with {version}"] = {"found": found, "ends": cases}
    return result


def pair(
    warm: interpreter.Interpreter, release: str, bundle: Path | None, fleet: Fleet, role: str, other: str
) -> tuple[dict[str, Any], int]:
    """What each request comes to, where one process has this bundle and the other has another, or how the driver fails;
    and how many bundles have acted."""
    with tempfile.TemporaryDirectory() as work:
        try:
            cases: dict[str, Any] = warm.run(
                fleet.driver,
                {"vllm": release},
                Path(work),
                bundle=bundle,
                environ=fleet.environ,
                path=fleet.needs(setups.engine_python()),
                arguments=[*fleet.arguments, role, other],
            )["cases"]
        except AssertionError as error:
            cases = {judge.FAILS: str(error)}
        return cases, acted(Path(work) / "state")


def acted(state: Path) -> int:
    """Of how many bundles a process has reported there that a patch is applied."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in state.glob("*.json")]
    return len({r["bundle"] for r in reports if any(patch["state"] == "applied" for patch in r["patches"])})

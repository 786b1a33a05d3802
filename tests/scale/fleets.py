"""`python -m tests.scale.fleets`: NIXL push engines with the bundle beside engines with an older one, and with none.

Each pair is played as a pair without any bundle is; it must hear and hold the same. The requests are push_mixed.py's. Of
LMCache's server and worker and of Mooncake's engines there is no such pair yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.lab import revisions

from tests.scale import command, plans
from tests.simulation import setups

# Found as setups finds it.
import interpreter  # isort: skip
from prefill_decode_drive import nixl_site  # isort: skip

OLDER = {"0.1.5": "53fbf18", "0.1.9": "c775e6c"}
"""Versions that a fleet may still have, and the revisions that they are made of."""
ROLES = ("prefill", "decode")
"""Which of the two has this checkout's bundle."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the pairs, and print what each came to where that is not what two stock engines come to; 1 where one did."""
    parsed = argparse.ArgumentParser(prog="python -m tests.scale.fleets", description=__doc__)
    parsed.add_argument(
        "--release", action="append", help=f"may be given again (default: {', '.join(command.RELEASES)})"
    )
    asked = parsed.parse_args(arguments)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, setups.interpreters(1, setups.engine_python()) as (warm,):
        bundle = setups.made_bundle(Path(directory) / "bundle")
        others = {"none": "none"}
        for version, revision in OLDER.items():
            others[version] = str(Path(directory) / version)
            revisions.command_line("generate", "--out", others[version], path=revisions.checkout(revision))
        for release in asked.release or command.RELEASES:
            stock = pair(warm, release, None, "prefill", "none")
            for version, other in others.items():
                for role in ROLES:
                    name = f"{release}: {role} with this bundle, the other with {version}"
                    cases = pair(warm, release, bundle, role, other)
                    found[name] = {case: came for case, came in cases.items() if came != stock[case]}
                    print(f"{name}: {found[name] or 'as on stock'}", file=sys.stderr, flush=True)
    print(json.dumps(found))
    return 1 if any(found.values()) else 0


def pair(warm: interpreter.Interpreter, release: str, bundle: Path | None, role: str, other: str) -> dict[str, Any]:
    """What decode hears and holds of each request, where one engine has this bundle and the other has another."""
    with tempfile.TemporaryDirectory() as work:
        result = warm.run(
            "push_mixed",
            {"vllm": release},
            Path(work),
            bundle=bundle,
            environ=plans.PUSH,
            path=[nixl_site(setups.engine_python())],
            arguments=[role, other],
        )
    cases: dict[str, Any] = result["cases"]
    return cases


if __name__ == "__main__":
    sys.exit(main())

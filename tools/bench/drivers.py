"""Runs of the release tests' drivers in the engine's environment and behind a bundle."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_livepatch.tools.bundles import bundle, catalogue, placing
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.proving.playing import DRIVERS
from vllm_livepatch.tools.releases import sources


def run(
    driver: str,
    release: str,
    arguments: Sequence[int],
    python: Path,
    path: Path = DRIVERS,
    variables: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What driver/`driver`.py prints as JSON on a vLLM release, with ``path`` searched last. Raises UserError."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary, "bundle")
        placing.write_directory(bundle.contents(catalogue.load()), place)
        done = subprocess.run(
            [str(python), str(DRIVERS / f"{driver}.py"), *map(str, arguments)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, (place, sources.site_packages("vllm", release), path))),
                "LIVEPATCH_STATE_DIR": temporary,
                "VLLM_TARGET_DEVICE": "cpu",
                **(variables or {}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise UserError(f"the driver failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result

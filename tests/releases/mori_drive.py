"""Fresh interpreters for the two MoRI patches: a release's sources and the stand-in for mori, patched or not."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_livepatch.tools import sources

HERE = Path(__file__).parent
STANDINS = HERE.parent / "standins"
SECONDS = 300
"""Longest time for one interpreter: 15 s is usual, half of it importing vLLM."""


def drive(
    driver: str,
    release: str,
    python: Path,
    work: Path,
    bundle: Path | None,
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Run driver/`driver`.py on a release in a fresh interpreter, and return its result; fails where it has none."""
    source = sources.site_packages("vllm", release)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LIVEPATCH", "PYTHON", "VLLM_"))}
    process = subprocess.run(
        [str(python), str(HERE / "driver" / f"{driver}.py"), *arguments],
        cwd=work,
        env={
            **kept,
            **variables,
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, [bundle, source, STANDINS]))),
            "LIVEPATCH_STATE_DIR": str(work / "state"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CACHE_ROOT": str(work / "cache"),
            "VLLM_CONFIG_ROOT": str(work / "config"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "",
            "VLLM_TARGET_DEVICE": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert process.returncode == 0, f"vLLM {release} cannot be driven:\n{process.stderr[-4000:]}"
    print(process.stderr)  # shown by pytest where a comparison fails
    result: dict[str, Any] = json.loads(process.stdout)
    assert Path(result["vllm"]).is_relative_to(source), "another vLLM than the release's was driven"
    return result


def reported(work: Path, patch: str) -> dict[str, Any]:
    """What the bundle reported of a patch in the one process that was run in `work`."""
    (file,) = (work / "state").glob("*.json")
    (found,) = (entry for entry in json.loads(file.read_text(encoding="utf-8"))["patches"] if entry["name"] == patch)
    return dict(found)

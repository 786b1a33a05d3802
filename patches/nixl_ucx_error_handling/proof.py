"""Real NIXL agents of connectors' workers, on CPU memory: the error handling mode that each one's UCX backend has.

NIXL is needed. What ROCm has in its place (rixl, nixl_rocm) is stood in for by NIXL's own files.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import tempfile
from pathlib import Path

import prefill_decode as driver
from result import NotBuilt

ROCM_PACKAGES = ("rixl", "nixl_rocm")
THREADS = 3


def cases() -> dict[str, str | None]:
    """Agents made in every way that matters, and what they read of each other."""
    agents = driver.nixl_agents
    driver.real.quiet()
    with tempfile.TemporaryDirectory() as temporary:
        model_config = driver.real.make_model_config(Path(temporary))
        found = agents.play(model_config, Path(temporary))
        threads = agents.taken(agents.make_worker(model_config, {"num_threads": THREADS})).get_backend_params("UCX")
    if found["rocm_package"].partition(".")[0] not in ROCM_PACKAGES:
        raise NotBuilt(f"as on ROCm, agents come from {found['rocm_package']}")

    def unless(mode: str | None, wanted: str) -> str | None:
        """What an agent does instead; without a mode of its own it has NIXL's."""
        does = (
            f"its mode is {mode}" if mode else f"it has no mode of its own, and NIXL's own is {found['nixl_default']}"
        )
        return None if (mode or found["nixl_default"]) == wanted else does

    return {
        "the agent of a worker has error handling mode none": unless(found["plain"], "none"),
        "as on ROCm, an agent has error handling mode none": unless(found["on_rocm"], "none"),
        "the mode that the connector's configuration names holds": unless(found["configured"], "peer"),
        "the mode that a connector's configuration inside a MultiConnector names holds": unless(
            found["in_multi_connector"], "peer"
        ),
        "the mode that a caller names holds": unless(found["set_by_caller"], "peer"),
        "the worker's own parameters hold": (
            None if threads["num_threads"] == str(THREADS) else f"{threads} instead of {THREADS} threads"
        ),
        "an agent reads another's memory": None if found["arrived"] else "other bytes arrived",
        "an agent whose mode was configured reads another's memory": (
            None if found["arrived_at_configured"] else "other bytes arrived"
        ),
    }

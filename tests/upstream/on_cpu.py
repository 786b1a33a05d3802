"""A pytest plugin, in the engine's environment: the sources on the path are no installation, and so tell no platform."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.platforms

if not hasattr(torch._C._cpu, "_is_avx512_supported"):
    torch._C._cpu._is_avx512_supported = lambda: False  # releases to 0.17 ask for it by a name that torch lacks now
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()
torch.accelerator.current_device_index = lambda: "cpu"  # there is none, and Mooncake's worker asks


def pytest_collection_finish() -> None:
    """Upstream collects garbage after each test: without this, that takes most of the time, over what was imported."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write which tests passed, and which did not: also the files that were not collected, and what was skipped."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    stats = reporter.stats
    others = {report.nodeid for kind in ("failed", "error", "skipped") for report in stats.get(kind, ())}
    passed = {report.nodeid for report in stats.get("passed", ())} - others
    Path(os.environ["UPSTREAM_REPORT"]).write_text(json.dumps({"passed": sorted(passed), "others": sorted(others)}))

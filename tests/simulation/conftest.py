"""What the simulator's tests share: a warm interpreter for each worker of the test run, and the bundle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_livepatch.tools import environments

from tests.simulation import arms


@pytest.fixture(scope="session")
def warm() -> Iterator[arms.Interpreter]:
    """An interpreter that has imported what all releases need."""
    given = os.environ.get("LIVEPATCH_TEST_PYTHON")
    with arms.interpreters(1, Path(given) if given else environments.engine()) as (interpreter,):
        yield interpreter


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, made by the command that users make theirs with."""
    directory = tmp_path_factory.mktemp("bundle") / "bundle"
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", str(directory)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return directory

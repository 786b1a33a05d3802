"""What the simulator's tests share: a warm interpreter for each worker of the test run, and the bundle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_livepatch.tools.lab import environments, revisions

from tests.simulation import arms

VERSION_0_1_0 = "26663bb"


def python_of_engine() -> Path:
    """The interpreter that has what vLLM needs."""
    given = os.environ.get("LIVEPATCH_TEST_PYTHON")
    return Path(given) if given else environments.engine()


@pytest.fixture(scope="session")
def warm() -> Iterator[arms.Interpreter]:
    """An interpreter that has imported what all releases need."""
    with arms.interpreters(1, python_of_engine()) as (interpreter,):
        yield interpreter


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, made by the command that users make theirs with."""
    directory = tmp_path_factory.mktemp("bundle") / "bundle"
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", str(directory)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return directory


@pytest.fixture(scope="session")
def first_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of version 0.1.0, by the code of then."""
    directory = tmp_path_factory.mktemp("first") / "bundle"
    revisions.command_line("generate", "--out", str(directory), path=revisions.checkout(VERSION_0_1_0))
    return directory

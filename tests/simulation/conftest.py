"""What the simulator's tests share: a warm interpreter for each worker of the test run, and the bundle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_livepatch.tools.lab import revisions

from tests.simulation import setups

VERSION_0_1_0 = "26663bb"


@pytest.fixture(scope="session")
def warm() -> Iterator[setups.Interpreter]:
    """An interpreter that has imported what all releases need."""
    with setups.interpreters(1, setups.engine_python()) as (interpreter,):
        yield interpreter


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of all patches."""
    made: Path = setups.made_bundle(tmp_path_factory.mktemp("bundle") / "bundle")
    return made


@pytest.fixture(scope="session")
def first_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of version 0.1.0, by the code of then."""
    directory = tmp_path_factory.mktemp("first") / "bundle"
    revisions.command_line("generate", "--out", str(directory), path=revisions.checkout(VERSION_0_1_0))
    return directory

"""The bundle that `generate` makes by default, by way of the registry, fits every interpreter that it serves."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit import interpreters
from tests.unit.support import finish

SHOW = "from _vllm_livepatch.vendor import wrapt; print(wrapt.__wrapt__._using_c_extension, wrapt.__file__)"


def test_it_has_the_compiled_form_for_every_interpreter_and_machine(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    wanted = [
        f"_wrappers.cpython-{version.replace('.', '')}-{arch}-linux-gnu.so"
        for version in interpreters.SERVED
        for arch in ("aarch64", "x86_64")
    ]
    assert manifest["extensions"] == sorted(wanted)


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_each_interpreter_takes_its_own(bundle: Path, version: str) -> None:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(bundle)}
    done = finish([str(interpreters.find(version)), "-c", SHOW], environ)
    assert done.code == 0, done.err
    compiled, file = done.out.split()
    assert compiled == "True"
    assert Path(file).is_relative_to(bundle)

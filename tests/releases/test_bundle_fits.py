"""The bundle that `generate` makes of a patch that asks for wrapt, by way of the registry, fits every interpreter."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import bundle, catalogue, extensions, placing

from tests.unit import interpreters
from tests.unit.support import finish

SHOW = "from _vllm_livepatch.vendor import wrapt; print(wrapt.__wrapt__._using_c_extension, wrapt.__file__)"
FACTS = 'title = "Asks"\npackage = "vllm"\ntargets = ["vllm.one:step"]\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("asks")
    folder = place / "patches" / "asks"
    folder.mkdir(parents=True)
    (folder / "patch.toml").write_text(FACTS)
    (folder / "wrappers.py").write_text("from ...vendor import wrapt\n")
    entries = catalogue.load([place / "patches"], own=False)
    files = bundle.contents(entries, extensions.gathered(extensions.chosen(), print))
    placing.write_directory(files, place / "bundle")
    return place / "bundle"


def test_it_has_the_compiled_form_for_every_interpreter_and_machine(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_bytes())
    wanted = [
        f"_wrappers.cpython-{version.replace('.', '')}-{arch}-linux-gnu.so"
        for version in interpreters.SERVED
        for arch in ("aarch64", "x86_64")
    ]
    assert manifest["extensions"] == sorted(wanted)


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_each_interpreter_takes_its_own(made: Path, version: str) -> None:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(made)}
    done = finish([str(interpreters.find(version)), "-c", SHOW], environ)
    assert done.code == 0, done.err
    compiled, file = done.out.split()
    assert compiled == "True"
    assert Path(file).is_relative_to(made)

"""The two distributions of this checkout, built as pip builds them: what each holds."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import bundle
from vllm_livepatch.tools.toml import tomllib

ROOT = Path(__file__).resolve().parents[2]
PLACES = {"vllm-livepatch": ROOT, "vllm-livepatch-lab": ROOT / "tools" / "lab"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zipfile.ZipFile]:
    """Both, built from copies: a build leaves files in the folder that it is of."""
    out = tmp_path_factory.mktemp("wheels")
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    copy = tmp_path_factory.mktemp("checkout")
    for name in files.stdout.decode().split("\0"):
        source, place = ROOT / name, copy / name
        if name and source.is_file() and not name.startswith("docs/"):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(source.read_bytes())
    found = {}
    for name, place in PLACES.items():
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "-q",
            "-w",
            str(out),
            str(copy / place.relative_to(ROOT)),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
        (file,) = out.glob(f"{name.replace('-', '_')}-{bundle.version()}-*.whl")
        found[name] = zipfile.ZipFile(file)
    return found


def modules(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if not name.partition("/")[0].endswith(".dist-info")}


def test_no_file_is_in_both(wheels: dict[str, zipfile.ZipFile]) -> None:
    main, lab = (modules(wheels[name]) for name in PLACES)
    assert not main & lab
    rooms = {name.split("/")[2] for name in main if name.startswith("vllm_livepatch/tools/") and name.count("/") > 2}
    assert not rooms & {"lab", "bench", "upkeep"}
    assert {name.split("/")[2] for name in lab} == {"lab", "bench"}
    proofs = {f"vllm_livepatch/patches/{file.parent.name}/proof.py" for file in ROOT.glob("patches/*/proof.py")}
    assert proofs <= main
    assert len(proofs) > 0


def test_they_say_the_same_of_what_they_need() -> None:
    """The checkout's environment, whose extra is `lab`, is that of who installs the second distribution."""
    said = {
        name: tomllib.loads((place / "pyproject.toml").read_text("utf-8"))["project"] for name, place in PLACES.items()
    }
    main, lab = said.values()
    assert lab["version"] == main["version"]
    assert lab["dependencies"] == [f"vllm-livepatch=={main['version']}", *main["optional-dependencies"]["lab"]]
    assert lab["requires-python"] == main["requires-python"]

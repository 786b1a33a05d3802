"""The bundle: self-contained, the same bytes for the same input, whole or not there at all."""

from __future__ import annotations

import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from vllm_livepatch.tools import bundle
from vllm_livepatch.tools.errors import UserError

from tests.unit.support import PATCHED, PYTHON, USE_STEP, Sandbox, finish


@pytest.fixture
def files(sandbox: Sandbox) -> dict[str, bytes]:
    sandbox.patch()
    return bundle.contents(sandbox.entries())


def test_it_adds_two_importable_names(files: dict[str, bytes]) -> None:
    tops = {name.partition("/")[0] for name in files}
    assert tops == {"sitecustomize.py", "_vllm_livepatch", "manifest.json"}


def test_it_is_self_contained(patched: Sandbox) -> None:
    """In an environment with nothing installed, wrapt comes from the bundle and nobody else can import that copy."""
    venv = patched.root / "venv"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    done = finish([python, "-c", USE_STEP], patched.environ())
    assert (done.code, done.out) == (0, PATCHED)
    done = finish([python, "-c", f"{USE_STEP}; import wrapt"], patched.environ())
    assert done.lines[-1] == "ModuleNotFoundError: No module named 'wrapt'"


def test_the_same_input_gives_the_same_bytes(sandbox: Sandbox, files: dict[str, bytes]) -> None:
    assert bundle.contents(sandbox.entries()) == files
    for name in ("one.zip", "two.zip"):
        bundle.write_zip(files, sandbox.root / name)
    assert (sandbox.root / "one.zip").read_bytes() == (sandbox.root / "two.zip").read_bytes()


def test_another_patch_is_another_bundle(sandbox: Sandbox, files: dict[str, bytes]) -> None:
    sandbox.patch(title="another")
    assert bundle.contents(sandbox.entries())["manifest.json"] != files["manifest.json"]


def test_what_is_written_is_verified(sandbox: Sandbox, files: dict[str, bytes]) -> None:
    place, archive = sandbox.root / "new", sandbox.root / "new.zip"
    bundle.write_directory(files, place)
    bundle.write_zip(files, archive)
    assert bundle.differences(place) == ([], len(files) - 1)
    assert bundle.differences(archive) == ([], len(files) - 1)
    with zipfile.ZipFile(archive, "a") as more:
        more.writestr("more.py", "")
    assert bundle.differences(archive)[0] == ["more.py was added"]


def test_bytecode_that_an_interpreter_cached_is_no_difference(patched: Sandbox) -> None:
    assert patched.python(USE_STEP).out == PATCHED
    assert list(patched.bundle.rglob("*.pyc"))
    assert bundle.differences(patched.bundle)[0] == []


@pytest.mark.parametrize("write", [bundle.write_directory, bundle.write_zip])
def test_a_full_disk_leaves_nothing(sandbox: Sandbox, files: dict[str, bytes], write: object) -> None:
    """Stood in for by a limit on the size of a file, which fails a write half-way as a full disk does."""
    name = getattr(write, "__name__", "")
    code = f"""
import resource, signal, sys
from pathlib import Path
from vllm_livepatch.tools import bundle, catalogue
from vllm_livepatch.tools.errors import UserError
files = bundle.contents(catalogue.load())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    bundle.{name}(files, Path(sys.argv[1]))
except UserError as error:
    print(error)
"""
    out = sandbox.root / "place" / "new"
    done = finish([sys.executable, "-B", "-c", code, out], sandbox.environ(path=[]))
    assert (done.code, done.out.strip()) == (0, f"the bundle cannot be written to {out}: File too large"), done
    assert list(out.parent.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_a_place_that_cannot_be_written_is_said(files: dict[str, bytes]) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        bundle.write_directory(files, Path("/proc/new"))


def test_the_cache_is_used_again_and_mended(
    sandbox: Sandbox, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(sandbox.root / "cache"))
    place = bundle.cached(files)
    (place / "sitecustomize.py").write_text("# damaged\n")
    assert bundle.cached(files) == place
    assert bundle.differences(place)[0] == []

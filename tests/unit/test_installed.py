"""The distribution that people install: `uv tool install` of the wheel of its sdist, in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from vllm_livepatch.tools.bundles import bundle, catalogue

from tests.unit import debian
from tests.unit.support import PYTHON, Sandbox, finish

ROOT = Path(__file__).parents[2]
UV = (sys.executable, "-m", "uv")
DIGEST = "from vllm_livepatch.tools.bundles import bundle, catalogue; print(bundle.digest(bundle.contents(catalogue.load())))"
"""Of the bundle without compiled wrapt, which it would ask the registry for."""
PROOF = """\
    import result
    from fakeengine.scheduler import Scheduler

    def cases():
        return {"A step is marked.": result.outcome_of(lambda: None if len(Scheduler().step(7)) == 2 else "it is not")}
    """
NO_INDEX = re.compile("error sending request|dns error|Failed to fetch|Network connectivity is disabled")


def test_uv_tool_install(tmp_path: Path, sandbox: Sandbox) -> None:
    """The wheel, which is built of the sdist: in a home that has nothing it generates this checkout's bundle, to the byte."""
    subprocess.run([*UV, "build", "--quiet", "--out-dir", tmp_path, ROOT], check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert len(list(tmp_path.glob("*.tar.gz"))) == 1
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    install: list[str | Path] = [*UV, "tool", "install", "--quiet", "--python", PYTHON, wheel]
    done = finish(install, environ | places, timeout=300)
    if NO_INDEX.search(done.err):
        debian.lack("an index that uv reaches")
    assert done.code == 0, done.err
    assert [file.name for file in (tmp_path / "bin").iterdir()] == ["vllm-livepatch"]
    command = tmp_path / "bin/vllm-livepatch"
    clean = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "LC_ALL": "C.UTF-8"}
    assert finish([command, "--version"], clean).out.strip() == f"vllm-livepatch {bundle.version()}"
    done = finish([tmp_path / "tools/vllm-livepatch/bin/python", "-c", DIGEST], clean, cwd=tmp_path)
    assert (done.code, done.out.strip()) == (0, bundle.digest(bundle.contents(catalogue.load()))), done.err
    done = finish([command, "deploy", "kubernetes"], clean)
    assert (done.code, done.err) == (0, "")
    done = finish([command, "lab", "pd-nixl", "--dry-run"], clean)
    assert (done.code, len(done.lines)) == (2, 1)
    assert f"pip install vllm-livepatch-lab=={bundle.version()}" in done.err
    # What proofs are made of is in it.
    sandbox.patch()
    sandbox.write({"proof.py": PROOF}, sandbox.patches / "around")
    where = ("--python", PYTHON, "--site-packages", sandbox.site)
    done = finish([command, "prove", "--patch-dir", sandbox.patches, "--only", *where], clean)
    assert done.out.split()[:2] == ["around", "proven"], done

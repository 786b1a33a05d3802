"""docs/frameworks.md: its patches lock on a real release and do what they say, and so does a bundle in a wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from vllm_livepatch.tools.releases import sources

from tests.unit.local_index import make_wheel
from tests.unit.support import PYTHON, Cli, Sandbox

PAGE = (Path(__file__).parents[2] / "docs/frameworks.md").read_text("utf-8")
CODE = {
    re.findall(r'return \{"(.+?)":', block)[0].rpartition(".")[2].rpartition(":")[2]: block
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    if "def wrappers" in block
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "_build_runtime_env": [{"name": "PYTHON", "default": "", "help": "x"}],
    "get_open_port": [{"name": "PORT", "default": 0, "help": "x"}],
}
CALLS = {"from_request": ["vllm.v1.request:Request.priority"]}
# Shaped as the release's, which imports torch.
MODULES = {
    "vllm/__init__.py": "",
    "vllm/_version.py": '__version__ = "0.33.0"\n',
    "vllm/v1/request.py": "class Request:\n    def __init__(self, priority): self.priority = priority\n",
    "vllm/v1/executor/ray_executor_v2.py": """
class RayExecutorV2:
    def _build_runtime_env(self): return {"env_vars": {}}
""",
    "vllm/v1/core/sched/output.py": """
from dataclasses import dataclass
@dataclass
class NewRequestData:
    req_id: str
    @classmethod
    def from_request(cls, request, block_ids, prefill_token_ids=None): return cls("r")
""",
    "vllm/utils/network_utils.py": "def get_open_port(): return -1\n",
    "vllm/taken.py": "from vllm.utils.network_utils import get_open_port\n",
}
USES = {
    "_build_runtime_env": (
        "from vllm.v1.executor.ray_executor_v2 import RayExecutorV2\nprint(RayExecutorV2()._build_runtime_env())",
        "{'env_vars': {}, 'py_executable': 'mine'}",
    ),
    "from_request": (
        "import pickle\nfrom vllm.v1.request import Request\nfrom vllm.v1.core.sched.output import NewRequestData\n"
        "data = NewRequestData.from_request(Request(7), block_ids=())\n"
        "print(data, pickle.loads(pickle.dumps(data)).acme_priority)",
        "NewRequestData(req_id='r') 7",
    ),
    "get_open_port": ("from vllm.taken import get_open_port\nprint(get_open_port())", "7000"),
}


def folder(name: str, out: Path) -> Path:
    """The page's code, as a patch's folder."""
    target = re.findall(r'return \{"(.+?)":', CODE[name])[0]
    place = out / f"acme_{name.strip('_')}"
    place.mkdir(parents=True)
    said = {"title": "x", "package": "vllm", "targets": [target], "calls": CALLS.get(name, [])}
    (place / "patch.toml").write_text(tomli_w.dumps({**said, "option": OPTIONS.get(name, [])}), "utf-8")
    (place / "wrappers.py").write_text(CODE[name], "utf-8")
    return place


def test_all_of_them_are_looked_at() -> None:
    assert {*CODE} == {*USES}


def test_they_lock_on_the_release(cli: Cli, tmp_path: Path) -> None:
    """Their parameters are the targets', and what they call is there."""
    for name in CODE:
        folder(name, tmp_path)
    done = cli("lock", str(tmp_path), "--site-packages", str(sources.site_packages("vllm", "0.33.0")))
    said = [line.partition(": ")[2] for line in done.out.splitlines()]
    assert (done.code, said) == (0, ["locked for 0.33.0 (1 form of the code)"] * len(CODE)), done


@pytest.mark.parametrize("name", CODE)
def test_it_does_what_it_says(name: str, sandbox: Sandbox, cli: Cli) -> None:
    sandbox.write(MODULES)
    place = folder(name, sandbox.patches)
    assert cli("lock", str(place), "--site-packages", str(sandbox.site)).code == 0
    sandbox.generate()
    use, printed = USES[name]
    values = {"PYTHON": "mine", "PORT": "7000"}
    asked = {f"LIVEPATCH_{place.name.upper()}_{one['name']}": values[one["name"]] for one in OPTIONS.get(name, [])}
    done = sandbox.python(use, **asked)
    assert (done.out, done.others) == (f"{printed}\n", [])
    assert sandbox.reported(place.name.replace("_", "-"))["state"] == "applied"


def test_a_bundle_in_a_wheel(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.patch()
    bundle = sandbox.generate()
    files = {
        f"acme/livepatch/{file.relative_to(bundle)}": file.read_bytes() for file in bundle.rglob("*") if file.is_file()
    }
    place = re.findall(r"`(os\.path\.join\(.+?\))` first on PYTHONPATH", PAGE)[0]
    files |= {"acme/__init__.py": b"", "acme/start.py": f"import os\nimport acme\nprint({place})\n".encode()}
    wheel, site = tmp_path / "acme-1.0-py3-none-any.whl", tmp_path / "site"
    files["acme-1.0.dist-info/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files["acme-1.0.dist-info/RECORD"] = b""
    wheel.write_bytes(make_wheel("acme", "1.0", files))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", site, wheel], check=True, timeout=120)
    first = sandbox.bare("import acme.start", PYTHONPATH=str(site)).out.strip()
    environ = {**sandbox.environ(path=[first, sandbox.site]), "PATH": os.environ["PATH"]}
    code = "from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))"
    done = subprocess.run([PYTHON, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['patched', 7]\n"
    doctor = [PYTHON, str(site / "acme/livepatch"), "doctor"]
    assert subprocess.run(doctor, env=environ, capture_output=True, timeout=60, check=False).returncode == 0

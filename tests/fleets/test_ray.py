"""Real engines on Ray's executor, over a head and a node on this machine: who is patched, and who says where not."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_livepatch.tools import deploy
from vllm_livepatch.tools.in_bundle import status
from vllm_livepatch.tools.lab import environments, model

from tests.fleets import by_hand
from tests.unit.support import Sandbox

STANDINS = Path(__file__).parent / "standins"
VLLM = os.environ.get("FLEETS_VLLM", "0.32.0")
PATCH = "idle-stepping"
"""It has a target that each process of an engine imports."""
WORKER = "default_worker.py"
SECONDS = 900
V1 = {"VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "0"}
"""The executor of releases before 0.21."""


@dataclass(frozen=True)
class Place:
    """An environment with vLLM, Ray and the guard; a bundle; a model."""

    python: Path
    bundle: Path
    model: Path
    root: Path

    def environ(self, **more: str) -> dict[str, str]:
        """What a shell would have that knows nothing of a bundle."""
        return {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "HOME": str(self.root / "home"),
            "USER": "me",
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **environments.vllm_cache(VLLM),
            "LIVEPATCH_STATE_DIR": str(self.root / "state"),
            **more,
        }

    @property
    def patched(self) -> dict[str, str]:
        """What `deploy ray` says to export on every node."""
        (line,) = re.findall(r"^#   export (.*)$", deploy.text("ray", "image", "model"), re.MULTILINE)
        script = f'export {line}; echo "$PYTHONPATH"; echo "$LIVEPATCH"'.replace("/opt/livepatch", str(self.bundle))
        output = subprocess.run(["sh", "-euc", script], env={}, capture_output=True, text=True, check=True).stdout
        return dict(zip(("PYTHONPATH", "LIVEPATCH"), output.split(), strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("ray")
    engine = environments.engine(VLLM)
    command: list[str | Path] = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", root / "bundle"]
    subprocess.run([*command, "--guard", root / "guard"], check=True, capture_output=True)
    subprocess.run([engine, "-m", "venv", "--without-pip", root / "venv"], check=True)
    (site,) = (root / "venv/lib").glob("python3*/site-packages")
    (beside,) = engine.parents[1].glob("lib/python3*/site-packages")
    (site / "others.pth").write_text(f"{environments.ray(engine)}\n{beside}\n")
    shutil.copy(STANDINS / "ray_cpu.py", site)
    about = site / "ray_cpu-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-cpu\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.platform_plugins]\nray_cpu = ray_cpu:register\n")
    python = root / "venv/bin/python"
    install: list[str | Path] = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--offline",
        "--no-index",
        "--python",
        python,
    ]
    subprocess.run([*install, root / "guard"], check=True)
    (root / "home").mkdir()
    return Place(python, root / "bundle", model.make(root / "model"), root)


@contextmanager
def cluster(place: Place, nodes: int, **variables: str) -> Iterator[str]:
    """A head and other nodes, each with one GPU that is none: the head's address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"{socket.gethostbyname(socket.gethostname())}:{free.getsockname()[1]}"
    begun: list[psutil.Popen] = []
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path has a hundred characters at most
    ray: list[str | Path] = [place.python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    ray += ["--num-gpus", "1", "--num-cpus", "2", "--object-store-memory", "100000000"]
    head = ["--head", "--port", address.rpartition(":")[2], "--include-dashboard=false", f"--temp-dir={temporary}"]
    try:
        for words in (head, *([["--address", address]] * (nodes - 1))):
            with open(f"{temporary}/{len(begun)}.out", "wb") as out:
                started = psutil.Popen(
                    [*ray, *words], env=place.environ(**variables), stdin=subprocess.DEVNULL, stdout=out, stderr=out
                )
            begun.append(started)
        yield address
    finally:
        ended = [process for one in begun for process in (one, *one.children(recursive=True))]
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ended, 30)
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class Outcome:
    logged: list[str]
    """The lines of ours that the engine's log has, its workers' among them."""
    answered: bool
    processes: list[dict[str, Any]]
    """While it served."""
    unmet: list[str]

    @property
    def workers(self) -> list[dict[str, Any]]:
        return [process for process in self.processes if WORKER in " ".join(process["argv"])]


def run(place: Place, address: str, size: int, **variables: str) -> Outcome:
    """An engine whose own environment has these."""
    shutil.rmtree(place.root / "state", ignore_errors=True)
    (place.root / "state").mkdir()
    command: list[str | Path] = [place.python, STANDINS / "drive.py", place.model, str(size)]
    environ = place.environ(RAY_ADDRESS=address, **variables)
    pipe: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    engine = psutil.Popen(["timeout", "-k", "5", str(SECONDS), *command], env=environ, text=True, **pipe)
    lines: list[str] = []
    found: status.Reports | None = None
    for line in engine.stdout:
        lines.append(line)
        if line.startswith("answered:"):
            found = status.read(place.root / "state")
            engine.stdin.close()
    engine.wait()
    print(*lines[-60:], sep="")  # pytest shows it where the test fails
    # Ray ends a job's workers behind it; none may be there to write a report for the next engine.
    for process in found.live if found is not None else ():
        with suppress(psutil.NoSuchProcess):
            psutil.Process(process["pid"]).wait(60)
    logged = [line.partition("vllm-livepatch: ")[2] for line in lines if "vllm-livepatch: " in line]
    if found is None:
        return Outcome(logged, False, [], [])
    return Outcome(logged, True, found.live, status.unmet(found, [status.Required(PATCH)]))


def state_of(process: dict[str, Any]) -> tuple[str, str | None]:
    (patch,) = (patch for patch in process["patches"] if patch["name"] == PATCH)
    return patch["state"], patch["reason"]


@pytest.fixture(scope="module")
def unprepared(place: Place) -> Iterator[str]:
    """A cluster that was started without anything of ours: its address."""
    with cluster(place, 1) as address:
        yield address


def test_what_deploy_ray_prints(place: Place) -> None:
    """The head and the other node are started with it, and so is the engine: on both, its workers are patched."""
    with cluster(place, 2, **place.patched) as address:
        found = run(place, address, 2, **place.patched)
    assert found.answered
    assert len(found.workers) == 2
    assert len(found.processes) >= 4  # the engine's own two as well
    assert {state_of(process)[0] for process in found.processes} == {"applied"}
    assert {process["settings"]["mode"] for process in found.processes} == {"strict"}
    assert found.unmet == []


@by_hand
def test_started_without_it_strict_ends_the_worker(place: Place, unprepared: str) -> None:
    found = run(place, unprepared, 1, **place.patched)
    assert not found.answered
    assert any(f"LIVEPATCH=strict: {PATCH} is not applied (late)" in line for line in found.logged)


@by_hand
def test_started_without_it_the_guard_arms_late_and_says_so(place: Place, unprepared: str) -> None:
    """The executor of today gives its workers the engine's whole environment, once they run."""
    found = run(place, unprepared, 1, **place.patched | {"LIVEPATCH": "auto"})
    assert found.answered
    assert any("the bundle was armed late, by the guard" in line for line in found.logged)
    assert [state_of(process) for process in found.workers] == [("skipped", "late")]
    assert len(found.unmet) == 1
    assert f"{PATCH} is skipped in pid {found.workers[0]['pid']}" in found.unmet[0]


@by_hand
def test_the_executor_before_hands_on_neither(place: Place, unprepared: str) -> None:
    found = run(place, unprepared, 1, **place.patched, **V1)
    copied = run(place, unprepared, 1, **place.patched, **V1, VLLM_RAY_EXTRA_ENV_VARS_TO_COPY="LIVEPATCH")
    assert found.answered  # `strict` did not reach the worker
    assert any("no bundle is armed in this process" in line for line in found.logged)
    assert [state_of(process) for process in found.workers] == [("skipped", "late")]
    assert found.unmet
    assert not copied.answered
    assert any("LIVEPATCH=strict: no bundle is armed in this process" in line for line in copied.logged)


JOB = """
import os, ray
ray.init(num_cpus=1, num_gpus=0, object_store_memory=10**8, include_dashboard=False, log_to_driver=False)
@ray.remote
def step():
    import sys
    from fakeengine.scheduler import Scheduler
    return Scheduler().step(7), os.environ["LIVEPATCH"], os.path.basename(sys.argv[0])
print(ray.get(step.remote()))
"""


def test_the_runtime_environment_that_deploy_ray_prints(place: Place, tmp_path: Path) -> None:
    """Of a job whose cluster was started without it. `ray job submit` hands it on by this variable."""
    (printed,) = re.findall(r"--runtime-env-json '(.*)'", deploy.text("ray", "image", "model"))
    sandbox = Sandbox(tmp_path / "sandbox")
    sandbox.patch()
    paths = f"{sandbox.generate()}:{sandbox.site}"  # what the nodes have follows after a colon
    variables = json.loads(printed.replace("/opt/livepatch", paths))["env_vars"]
    assert variables == {"PYTHONPATH": paths, "LIVEPATCH": "strict"}
    job = json.dumps({"runtime_env": {"env_vars": variables}})
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as short:  # as above
        environ = place.environ(RAY_TMPDIR=short, RAY_JOB_CONFIG_JSON_ENV_VAR=job)
        done = subprocess.run([place.python, "-c", JOB], env=environ, capture_output=True, text=True, timeout=300)
    assert done.stdout == f"(['patched', 7], 'strict', '{WORKER}')\n", done.stderr[-3000:]


@by_hand
def test_a_job_s_runtime_environment_patches_its_workers(place: Place, unprepared: str) -> None:
    """As `ray job submit --runtime-env-json` sets it: the cluster may have been started without anything."""
    job = {"runtime_env": {"env_vars": place.patched}}
    found = run(place, unprepared, 1, **place.patched, RAY_JOB_CONFIG_JSON_ENV_VAR=json.dumps(job))
    assert found.answered
    assert [state_of(process)[0] for process in found.workers] == ["applied"]
    assert found.unmet == []

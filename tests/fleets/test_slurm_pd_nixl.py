"""The lab's `pd-nixl` through a real Slurm: each engine is a job that `deploy slurm` printed, on one of two nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from vllm_livepatch.tools import deploy
from vllm_livepatch.tools.in_bundle import status
from vllm_livepatch.tools.lab import environments, model, topology
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.supervisor import Part

from tests.unit import slurm
from tests.unit.support import until

VLLM = os.environ.get("FLEETS_VLLM", "0.32.0")
PATCHES = ["idle-stepping", "nixl-lease-guard"]
NODES = {"prefill": "n1", "decode": "n2", "other": "n1"}
LOADED = "vllm:external_prefix_cache_hits_total"
BOOT_SECONDS = 900.0
THE_JOBS_OWN = ("PYTHONPATH", "LIVEPATCH", "LIVEPATCH_STATE_DIR")
ENGINE = """\
#!{python}
# In the place of `vllm serve MODEL`, a command that the CPU build lacks: the lab's own command of the same server.
import json, os, sys
assert sys.argv[1:] == ["serve", "{model}"], sys.argv
part = json.load(open(os.environ["PART"]))
os.execve(part["command"][0], part["command"], part["environment"] | {{name: os.environ[name] for name in {kept}}})
"""


class Jobs:
    """The engines' jobs; `stop` them."""

    def __init__(self, cluster: slurm.Cluster, root: Path, bundle: Path, tiny: Path, engine: Path) -> None:
        self.state, self._cluster, self._root, self._bundle = root / "state", cluster, root, bundle
        self._ids: list[str] = []
        self._bin = root / "bin"
        self._bin.mkdir()
        # A link to it would not be the environment's interpreter: that is found from where it lies.
        (self._bin / "python3").write_text(f'#!/bin/sh\nexec {engine} "$@"\n')
        (self._bin / "vllm").write_text(ENGINE.format(python=sys.executable, model=tiny, kept=THE_JOBS_OWN))
        for file in self._bin.iterdir():
            file.chmod(0o755)
        self._job = root / "job.sh"
        self._job.write_text(deploy.text("slurm", "image", str(tiny)))

    def log(self, part: Part) -> str:
        output = self._root / f"{part.name}.out"
        return output.read_text() if output.exists() else ""

    def submit(self, part: Part, *options: str) -> str:
        """Returns the job's id."""
        described = self._root / f"{part.name}.json"
        described.write_text(json.dumps({"command": part.command, "environment": dict(part.environment)}))
        variables = {"PART": str(described), "BUNDLE": str(self._bundle), "LIVEPATCH_STATE_DIR": str(self.state)}
        variables["PATH"] = f"{self._bin}:{self._cluster.environ['PATH']}"
        variables["PYTHONPATH"] = part.environment["PYTHONPATH"]
        output = f"--output={self._root / part.name}.out"
        done = self._cluster("sbatch", "--gpus-per-node=0", output, "--parsable", *options, self._job, **variables)
        assert done.code == 0, done
        self._ids.append(done.out.strip())
        return self._ids[-1]

    def ended(self, job: str) -> bool:
        return self._cluster("squeue", "--noheader", f"--jobs={job}", "--states=RUNNING,PENDING").out == ""

    def up(self, part: Part, job: str) -> None:
        until(lambda: self.ended(job) or healthy(part), BOOT_SECONDS)
        assert healthy(part), self.log(part)[-4000:]

    def stop(self) -> None:
        if self._ids:
            self._cluster("scancel", *self._ids)
            until(lambda: all(self.ended(job) for job in self._ids), 60)


def healthy(part: Part) -> bool:
    with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(part.health, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    out = tmp_path / "bundle"
    command: list[str | Path] = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", out]
    subprocess.run(command, check=True, capture_output=True)
    return out


@pytest.fixture(params=["everywhere", "not on n2"])
def cluster(request: pytest.FixtureRequest, bundle: Path, tmp_path: Path) -> Iterator[slurm.Cluster]:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    made = slurm.Cluster(tmp_path / "slurm", bundle if request.param == "not on n2" else nothing)
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture
def jobs(cluster: slurm.Cluster, bundle: Path, tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(cluster, tmp_path, bundle, model.make(tmp_path / "model"), environments.engine(VLLM))
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def parts(jobs: Jobs, tmp_path: Path) -> dict[str, Part]:
    """What the lab would start, with nothing injected: the job's script does that."""
    engine = environments.engine(VLLM)
    injected = topology.with_path(environments.vllm_cache(VLLM), [str(environments.nixl(engine))])
    deployed = topology.local(topology.load("pd-nixl"), engine, tmp_path / "model", injected, environments.router())
    return {part.name: part for part in deployed.parts}


async def answers(url: str, prompts: Sequence[str]) -> list[str]:
    async with Client(url, topology.MODEL_NAME, 120) as client:
        return [await client.complete((prompt,), 16) for prompt in prompts]


async def loaded(part: Part) -> float:
    async with Client(part.health.removesuffix("/health"), topology.MODEL_NAME) as client:
        return await client.metric(LOADED)


@pytest.mark.parametrize("cluster", ["everywhere"], indirect=True)
def test_every_engine_of_it_is_patched(jobs: Jobs, parts: dict[str, Part], tmp_path: Path) -> None:
    """The answers are right, decode loads what prefill computed, and each engine has the patches."""
    begun = {name: jobs.submit(parts[name], f"--nodelist={node}") for name, node in NODES.items()}
    for name, job in begun.items():
        jobs.up(parts[name], job)
    router = parts["router"]
    with open(tmp_path / "router.out", "wb") as out:
        running = subprocess.Popen(router.command, env=dict(router.environment), stdout=out, stderr=out)
    try:
        until(lambda: healthy(router), 60)
        prompts = model.prompts(6, 5 * topology.BLOCK_SIZE, seed=1)
        behind = asyncio.run(answers(router.health.removesuffix("/health"), prompts))
        assert behind == asyncio.run(answers(parts["prefill"].health.removesuffix("/health"), prompts))
        assert all(asyncio.run(loaded(parts[name])) > 0 for name in ("decode", "other"))
        reports = status.read(jobs.state)
        assert len(reports.live) >= 3  # each engine has a process that serves and one that computes, at least
        assert status.unmet(reports, [*map(status.Required, PATCHES)]) == []
        assert {process["settings"]["mode"] for process in reports.live} == {"strict"}
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("cluster", ["not on n2"], indirect=True)
def test_a_node_that_would_not_be_patched_serves_nothing(jobs: Jobs, parts: dict[str, Part]) -> None:
    job = jobs.submit(parts["decode"], "--nodelist=n2")
    until(lambda: jobs.ended(job), 60)
    assert "srun: error: n2: task 0: Exited with exit code" in jobs.log(parts["decode"])
    assert not healthy(parts["decode"])
    assert not jobs.state.exists() or not status.read(jobs.state).live

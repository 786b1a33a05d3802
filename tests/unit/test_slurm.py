"""The job that `deploy slurm` prints, through a real Slurm: a controller and two nodes on this machine, Debian's own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.slurm import Cluster
from tests.unit.support import PATCHED, PYTHON, USE_STEP, Cli, Sandbox, until


@pytest.fixture
def cluster(patched: Sandbox, tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path / "slurm", patched.bundle)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_the_printed_job(patched: Sandbox, cluster: Cluster, cli: Cli, tmp_path: Path) -> None:
    """On a node that has the bundle it serves; where a node has not, it ends before anything is served, and says which."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "python3").symlink_to(PYTHON)
    engine = bin_ / "vllm"
    engine.write_text(f"#!{PYTHON}\nimport sys\nprint(*sys.argv[1:])\n{USE_STEP}\n")
    engine.chmod(0o755)
    job = tmp_path / "job.sh"
    job.write_text(cli("deploy", "slurm", "--model", "org/model").out)
    path = f"{bin_}:{cluster.environ['PATH']}"
    variables = {"BUNDLE": str(patched.bundle), "PYTHONPATH": str(patched.site), "PATH": path}
    variables |= {"LIVEPATCH_STATE_DIR": str(patched.state), "LIVEPATCH_STATE_KEEP": "1"}
    output = tmp_path / "said"
    # Before what the script asks for; these nodes have no GPU.
    options = ["--gpus-per-node=0", "--wait", f"--output={output}", "--parsable"]

    done = cluster("sbatch", *options, "--nodelist=n1", job, **variables)
    assert done.code == 0, (done, output.exists() and output.read_text())
    lines = output.read_text()
    assert "processes that are started like this one are patched" in lines
    assert f"serve org/model\n{PATCHED}" in lines
    assert "applied=around" in lines
    assert patched.report()["settings"]["mode"] == "strict"

    done = cluster("sbatch", *options, "--nodes=2", job, **variables)
    assert done.code == 1
    lines = output.read_text()
    assert "serve org/model" not in lines
    assert re.search("srun: error: n2: task 1: Exited with exit code", lines), lines
    assert len(patched.reports()) == 1


def test_nothing_of_a_cluster_runs_on(patched: Sandbox, tmp_path: Path) -> None:
    """A job that still runs when its node is stopped leaves its slurmstepd, and its own processes, behind."""
    cluster = Cluster(tmp_path / "slurm", patched.bundle)
    try:
        cluster.start()
        script = tmp_path / "job.sh"
        script.write_text("#!/bin/sh\nsrun sleep 600\n")
        done = cluster("sbatch", "--nodelist=n1", "--parsable", script)
        assert done.code == 0, done
        until(lambda: "sleep\n" in commands(cluster), 40)
        assert "slurmstepd\n" in commands(cluster)
    finally:
        cluster.stop()
    assert cluster.steps() == []


def commands(cluster: Cluster) -> list[str]:
    """The names of its processes."""
    found = []
    for pid in cluster.steps():
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/comm").read_text())
    return found

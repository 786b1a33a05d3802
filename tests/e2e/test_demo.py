"""The demo, shortened: the real engine and the real LMCache server, stock and patched, under the same storm."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.lab.demo import stale_ids

SECONDS = 20
PATCH = "stale-finished-recving"
VLLM, LMCACHE = "0.32.0", "0.5.6"
# Only a process that imports a target leaves a report; these targets are the worker's and the server's own.
WORKER_TARGET = "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model"
SERVER_TARGET = "lmcache.v1.multiprocess.modules.lookup:LookupModule.end_session"
PROBE = """
def wrappers(livepatch):
    def counted(wrapped, instance, args, kwargs):
        livepatch.count("calls")
        return wrapped(*args, **kwargs)
    return {{"{target}": counted}}
"""


@dataclass(frozen=True)
class Run:
    """A demo that has ended: its exit code, what it printed, its output directory and its result."""

    code: int
    printed: str
    out: Path
    result: dict[str, Any]

    def read(self, name: str) -> Any:
        return json.loads((self.out / name).read_text(encoding="utf-8"))


def write_probe(directory: Path, name: str, package: str, release: str, target: str, site: Path) -> None:
    """A patch that counts the calls of ``target`` and changes nothing: it shows that a process is reached."""
    module, _, qualname = target.partition(":")
    source = site.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    found = fingerprint.of_names(source, {target: qualname})
    folder = directory / name
    folder.mkdir(parents=True)
    variant = {"releases": [release], "code": found}
    facts = {"title": "A probe", "package": package, "targets": [target], "variant": [variant]}
    (folder / "patch.toml").write_text(tomli_w.dumps(facts), encoding="utf-8")
    (folder / "wrappers.py").write_text(PROBE.format(target=target), encoding="utf-8")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out, probes = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("probes")
    site = next(environments.engine(VLLM, LMCACHE).parents[1].glob("lib/python3*/site-packages"))
    write_probe(probes, "probe_worker", "vllm", VLLM, WORKER_TARGET, site)
    write_probe(probes, "probe_server", "lmcache", LMCACHE, SERVER_TARGET, site)
    command = [sys.executable, "-m", "vllm_livepatch.tools.lab.demo", "--seconds", str(SECONDS), "--out", str(out)]
    command += ["--patch-dir", str(probes)]
    # Progress (stderr) goes where pytest puts it: it is what one needs to see when the run fails.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert (out / "result.json").is_file(), "the demo ended before it had a result; its progress is above"
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return Run(done.returncode, done.stdout, out, result)


def test_stock_dies_on_the_assertion_when_clients_hang_up(demo: Run) -> None:
    stock = demo.result["setups"]["stock"]
    assert not stock["survived"]
    assert stock["completed"] > 0, "it was well as long as clients were patient"
    assert stock["assertion"][-1] == "AssertionError"
    assert any("assert req_id in self.requests" in line for line in stock["assertion"])
    assert any("_update_from_kv_xfer_finished" in line for line in stock["assertion"])


def test_patched_lives_with_right_outputs_and_gives_all_blocks_back(demo: Run) -> None:
    patched = demo.result["setups"]["patched"]
    assert patched["survived"]
    assert patched["failed"] == 0, patched["errors"]
    assert patched["errors_logged"] == {"lmcache": 0, "engine": 0}
    assert patched["mismatches"] == 0
    assert patched["completed"] > demo.result["setups"]["stock"]["completed"]
    assert patched["disconnected"] > 0
    assert patched["loaded_tokens"] > 0
    assert patched["kv_usage_at_end"] == {"engine": 0}
    assert sum(stale_ids(patched["status"]).values()) > 0
    assert len(patched["per_second"]["completed"]) >= SECONDS
    assert patched["first_token"]["0.5"] > 0, "half of the clients have it streamed"
    assert patched["goodput"] > 0
    assert patched["restarts"] == {}


@pytest.mark.parametrize(
    ("part", "title", "patch", "package", "release"),
    [
        ("engine", "VLLM::EngineCore", PATCH, "vllm", VLLM),
        ("engine", "VLLM::Worker", "probe-worker", "vllm", VLLM),
        ("lmcache", "lmcache", "probe-server", "lmcache", LMCACHE),
    ],
)
def test_core_worker_and_server_each_leave_a_report(
    demo: Run, part: str, title: str, patch: str, package: str, release: str
) -> None:
    processes = [entry for entry in demo.read("patched/processes.json") if entry["part"] == part]
    (pid,) = [entry["pid"] for entry in processes if entry["name"] == title]
    (report,) = [entry for entry in demo.read("patched/status.json") if entry["pid"] == pid]
    assert report["packages"][package] == release
    (found,) = [entry for entry in report["patches"] if entry["name"] == patch]
    assert (found["state"], found["verdict"]) == ("applied", "needed")
    assert sum(found["counters"].values()) > 0


def test_the_run_ends_well_with_table_picture_and_records(demo: Run) -> None:
    assert demo.code == 0
    assert [check for check in demo.result["checks"] if not check["passed"]] == []
    for line in ("AssertionError", "survived", "send_unknown: ", "completions.png"):
        assert line in demo.printed
    for picture in ("completions.png", "blocks.png"):
        assert (demo.out / picture).read_bytes().startswith(b"\x89PNG")
    for side in ("stock", "patched"):
        for part in ("lmcache", "engine"):
            record = demo.read(f"{side}/{part}.json")
            assert record["command"]
            assert ("LIVEPATCH_STATE_DIR" in record["environment"]) == (side == "patched")
            assert (demo.out / side / f"{part}.log").stat().st_size > 0


def test_nothing_is_left_running(demo: Run) -> None:
    sides = [(side, part) for side in ("stock", "patched") for part in ("lmcache", "engine")]
    pids = {int(demo.read(f"{side}/{part}.json")["pid"]) for side, part in sides}
    pids |= {int(entry["pid"]) for entry in demo.read("patched/processes.json")}
    assert [pid for pid in sorted(pids) if psutil.pid_exists(pid)] == []

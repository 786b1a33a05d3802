"""The stale completion fault of 0.29.0, corrected by a diff instead of our wrapper, under the demo's storm.

The diff is made of the published source when the test runs, from the anchors below.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.tools.lab import demo, environments, loads, model, topology
from vllm_livepatch.tools.lab.client import Client
from vllm_livepatch.tools.lab.setups import drained
from vllm_livepatch.tools.lab.storm import Visitors
from vllm_livepatch.tools.lab.supervisor import Supervisor, tail
from vllm_livepatch.tools.lab.tally import Tally
from vllm_livepatch.tools.releases import sources

from tests.e2e import by_hand
from tests.releases import source_diffs

pytestmark = by_hand
VLLM, LMCACHE = "0.29.0", "0.5.6"
SCHEDULER = "vllm/v1/core/sched/scheduler.py"
SECONDS = 10
TARGET = "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished"
COUNTS = f"""
def wrappers(livepatch):
    def counted(wrapped, instance, args, kwargs):
        livepatch.count("calls")
        return wrapped(*args, **kwargs)
    return {{{TARGET!r}: counted}}
"""
LOGGED = "left out a stale completion of request"
INDENT = " " * 12
LEAVE_OUT = f"{INDENT}    logger.warning('{LOGGED} %s', req_id)\n{INDENT}    continue\n"
KNOWN = "assert req_id in self.requests\n"
FINISHED = "RequestStatus.is_finished(self.requests[req_id].status)"
CHANGES = [
    (f"{INDENT}{KNOWN}{INDENT}req =", f"{INDENT}if req_id not in self.requests:\n{LEAVE_OUT}{INDENT}req ="),
    (
        f"{INDENT}else:\n{INDENT}    assert RequestStatus.is_finished(req.status)\n",
        f"{INDENT}elif RequestStatus.is_finished(req.status):\n",
    ),
    (
        f"{INDENT}{KNOWN}{INDENT}self._free",
        f"{INDENT}if req_id not in self.requests or not {FINISHED}:\n{LEAVE_OUT}{INDENT}self._free",
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What the storm came to, and where the engine's log and the reports are."""

    figures: dict[str, Any]
    log: list[str]
    status: list[dict[str, Any]]
    processes: list[dict[str, Any]]


def command_line(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def write_counter(folder: Path, changed: str) -> None:
    """A wrapper of the method that the diff changes, verified on what the diff makes of it; it counts the calls."""
    folder.mkdir(parents=True)
    code = fingerprint.of_names(changed, {TARGET: TARGET.partition(":")[2]})
    variant = {"releases": [VLLM], "code": code}
    facts = {"title": "Counts", "package": "vllm", "targets": [TARGET], "variant": [variant]}
    (folder / "patch.toml").write_text(tomli_w.dumps(facts), "utf-8")
    (folder / "wrappers.py").write_text(COUNTS, "utf-8")


async def stormed(python: Path, work: Path, path: list[Path]) -> Outcome:
    """The demo's deployment and load, one side of it. Raises PartFailed where the engine or the server dies."""
    injected = {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "LIVEPATCH_STATE_DIR": str(work / "state"),
        "LIVEPATCH": "strict",
    }
    injected["XDG_CACHE_HOME"] = str(work / "cache")
    deployed = topology.local(topology.load("lmcache"), python, model.make(work / "model", seed=1), injected)
    load, tally = loads.Storm(prompts=demo.PROMPTS, calm=2, stream="no"), Tally()
    async with Supervisor(work / "parts", print) as parts:
        await parts.start(deployed.parts)
        async with Client(deployed.url, topology.MODEL_NAME) as client:
            visitors = Visitors(client, load, demo.CLIENTS, 1, tally)
            await parts.guard(visitors.undisturbed())
            await parts.guard(visitors.load(SECONDS))
            usage = await parts.guard(drained(client))
        status = json.loads(command_line("status", "--json", "--state-dir", work / "state"))
        return Outcome(
            {**tally.summary(SECONDS), "kv_usage_at_end": usage},
            tail(work / "parts" / "engine.log", lines=sys.maxsize),
            status,
            parts.processes(),
        )


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    work = tmp_path_factory.mktemp("diff")
    (work / "state").mkdir()
    source = sources.site_packages("vllm", VLLM)
    (work / "stale.diff").write_text(source_diffs.replacing(source, {SCHEDULER: CHANGES}, context=1), "utf-8")
    output = command_line("from-diff", work / "stale.diff", "--name", "stale-by-diff", "--out", work / "mine")
    assert ["vllm", VLLM, "applies"] in [line.split() for line in output.splitlines()], output
    write_counter(work / "mine" / "counter", source_diffs.replaced((source / SCHEDULER).read_text("utf-8"), CHANGES))
    chosen: list[str | Path] = ["--patch", "stale-by-diff", "--patch", "counter", "--patch-dir", work / "mine"]
    command_line("generate", "--out", work / "bundle", *chosen)
    given = os.environ.get("LIVEPATCH_TEST_PYTHON")
    python = Path(given) if given else environments.engine(lmcache=LMCACHE)
    return asyncio.run(stormed(python, work, [work / "bundle", environments.other_vllm(python, VLLM)]))


def test_the_diffed_engine_lives(outcome: Outcome) -> None:
    figures = outcome.figures
    assert figures["failed"] == 0, figures["errors"]
    assert figures["mismatches"] == 0
    assert figures["completed"] > 0
    assert figures["disconnected"] > 0
    assert figures["kv_usage_at_end"] == 0


def test_the_fault_was_met_and_the_changed_lines_ran(outcome: Outcome) -> None:
    lines = [line for line in outcome.log if LOGGED in line]
    assert lines
    assert all("scheduler.changed.py:" in line for line in lines), "what was logged names the lines that ran"
    assert not [line for line in outcome.log if "AssertionError" in line]


def test_the_engine_core_reports_both_kinds_and_no_patch_of_ours(outcome: Outcome) -> None:
    (core,) = [entry["pid"] for entry in outcome.processes if entry["name"] == "VLLM::EngineCore"]
    (report,) = [entry for entry in outcome.status if entry["pid"] == core]
    assert report["packages"] == {"vllm": VLLM}
    patches = {patch["name"]: (patch["state"], patch["reason"], patch["verdict"]) for patch in report["patches"]}
    assert set(patches) == {"stale-by-diff", "counter", "compile-cache-key"}
    assert set(patches.values()) == {("applied", None, "needed")}
    (counted,) = [patch["counters"] for patch in report["patches"] if patch["name"] == "counter"]
    assert counted["calls"] >= len([line for line in outcome.log if LOGGED in line]), "the wrapper is around the change"

"""A whole run of the lab, with an engine of a few lines: it dies of the first client that hangs up, unless patched."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_livepatch.tools.lab import environments, faults, lab, topology
from vllm_livepatch.tools.lab.faults import Fault
from vllm_livepatch.tools.lab.loads import Storm
from vllm_livepatch.tools.lab.setups import Setup
from vllm_livepatch.tools.lab.stages import Stages
from vllm_livepatch.tools.lab.storm import Visitors
from vllm_livepatch.tools.lab.supervisor import Part, PartFailed
from vllm_livepatch.tools.lab.topology import Deployment, Role, Topology

from tests.unit.test_lab_supervisor import record

ENGINE = """
import asyncio, os, sys, traceback
from aiohttp import web
patched, loaded = "LIVEPATCH_STATE_DIR" in os.environ, 0

async def complete(request):
    global loaded
    said = (await request.json())["prompt"]
    try:
        await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        if not patched:
            print("Traceback (most recent call last):\\n  in update\\nAssertionError", flush=True)
            os._exit(3)
        raise
    loaded += 100
    return web.json_response({"choices": [{"text": said[::-1]}]})

async def metrics(request):
    names = {"vllm:kv_cache_usage_perc": 0, "vllm:external_prefix_cache_hits_total": loaded}
    return web.Response(text="".join(f"# TYPE {name} gauge\\n{name} {value}\\n" for name, value in names.items()))

async def fine(request):
    return web.json_response({"success": True})

app = web.Application()
app.add_routes([web.post("/v1/completions", complete), web.get("/metrics", metrics), web.get("/health", fine)])
app.add_routes([web.post("/reset_prefix_cache", fine)])
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), handler_cancellation=True, print=None)
"""
DESCRIBED = Topology("one", "One engine", "engine", (Role("engine", "engine"),))
LOAD = Storm(prompts=3, tokens=5, stream="no", within=0.04)


@pytest.fixture(autouse=True)
def small_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(
        described: Topology,
        python: Path,
        tiny: Path,
        injected: Mapping[str, str],
        router: Any = None,
        device: str = "cpu",
    ) -> Deployment:
        (port,) = topology.free_ports(1)
        own = {name: value for name, value in injected.items() if name != "PYTHONPATH"}
        health = f"http://127.0.0.1:{port}/health"
        part = Part("engine", (str(python), "-c", ENGINE, str(port)), topology.environment(python, own), health)
        return Deployment((part,), health.removesuffix("/health"))

    monkeypatch.setattr(topology, "local", local)
    monkeypatch.setattr(environments, "engine", lambda vllm, lmcache: Path(sys.executable))


def run(tmp_path: Path, **options: Any) -> dict[str, Any]:
    given = {"seconds": 1.0, "clients": 4, "load": LOAD, "drain_seconds": 2.0, **options}
    result = asyncio.run(lab.run(lab.Options(out=tmp_path, **{"topology": DESCRIBED, **given})))
    for name in result["setups"]:
        assert not psutil.pid_exists(int(str(record(tmp_path / name, "engine")["pid"])))
    return result


def test_stock_dies_of_a_hang_up_and_patched_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    class Recorded(Stages):
        def __init__(self, total: int) -> None:
            steps.append(f"of {total}")
            super().__init__(total)

        def done(self, what: str) -> None:
            steps.append(what)

        def end(self) -> None:
            steps.append("end")
            super().end()

    monkeypatch.setattr(lab, "Stages", Recorded)
    result = run(tmp_path, setups=("stock", "patched"), disconnects=True)
    stock, patched = result["setups"]["stock"], result["setups"]["patched"]
    assert not stock["survived"]
    assert stock["death"] == "engine ended with exit code 3"
    assert 0 <= stock["died_after"] < 1
    assert stock["assertion"][-1] == "AssertionError"
    assert stock["errors_logged"]["engine"] == 1
    assert set(stock["errors"]) <= {"ServerDisconnectedError", "ClientOSError", "ClientConnectorError"}
    assert stock["failed"] == sum(stock["errors"].values())
    assert "kv_usage_at_end" not in stock
    assert patched["survived"]
    assert patched["disconnected"] > 0
    assert (patched["failed"], patched["mismatches"], patched["errors_logged"]) == (0, 0, {"engine": 0})
    assert patched["kv_usage_at_end"] == {"engine": 0}
    assert patched["goodput"] == patched["completed"]
    # What is asked to end a load is answered, too: a nudge of the engine, and another every two seconds.
    nudges, rest = divmod(patched["loaded_tokens"] - 100 * patched["completed"], 100)
    assert (0 <= nudges < patched["completed"], rest) == (True, 0)
    assert patched["kv_usage"]["engine"]
    assert (tmp_path / "patched" / "status.json").is_file()
    assert steps[:3] == ["of 4", lab.BUNDLES, lab.ENVIRONMENTS]
    assert sorted(steps[3:5]) == ["starting patched engine", "starting stock engine"]
    assert steps[5:] == ["end", "end"]


def test_setups_take_turns_and_a_part_that_was_brought_back_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = Fault("kill", "engine", at=0.6, lasts=0.2)
    result = run(tmp_path, setups=("stock", "patched"), rounds=3, seconds=1.5, faults=(fault,))
    for setup in result["setups"].values():
        assert setup["survived"]
        assert setup["restarts"] == {"engine": 1}
        assert [part for part, _ in setup["loaded_again"]] == ["engine"]
        assert setup["disconnected"] == setup["mismatches"] == 0
        assert setup["failed"] > 0
        assert setup["completed"] > 0
        assert len(setup["per_second"]["completed"]) >= 2
    lines = capsys.readouterr().err.splitlines()
    killed = [line.split("] ")[1] for line in lines if "was killed" in line or "load is over" in line]
    over = "the load is over; waiting for blocks to come back"
    assert killed == [
        "patched: engine was killed",
        "stock: engine was killed",
        f"stock: {over}",
        f"patched: {over}",
    ], "of three rounds, the second is begun by the other"


def test_what_a_topology_cannot_run_without_rides_in_with_every_setup_and_alone_with_stock(tmp_path: Path) -> None:
    needs = replace(DESCRIBED, changes=("mooncake-on-cpu",))
    run(tmp_path, topology=needs, setups=("stock", "patched"))
    patches = {}
    for setup in ("stock", "patched"):
        manifest = json.loads((tmp_path / f"bundle-{setup}" / "manifest.json").read_text(encoding="utf-8"))
        patches[setup] = set(manifest["patches"])
        environment = record(tmp_path / setup, "engine")["environment"]
        assert isinstance(environment, dict)
        assert environment["LIVEPATCH_MOONCAKE_ON_CPU"] == "on"
    assert patches["stock"] == {"mooncake-on-cpu"}
    assert patches["stock"] < patches["patched"]


def test_lost_prefills_begin_with_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: dict[str, list[bool]] = {}

    def look(setup: Setup) -> None:
        environment = record(tmp_path / setup.name, "engine")["environment"]
        assert isinstance(environment, dict)
        begun.setdefault(setup.name, []).append(Path(environment["LIVEPATCH_LOST_PREFILLS_AFTER"]).exists())

    prepare, settle = Setup.prepare, Setup.settle

    async def prepared(setup: Setup, *args: Any) -> None:
        await prepare(setup, *args)
        look(setup)

    async def settled(setup: Setup, *args: Any) -> None:
        look(setup)
        await settle(setup, *args)

    monkeypatch.setattr(Setup, "prepare", prepared)
    monkeypatch.setattr(Setup, "settle", settled)
    run(tmp_path, injected=faults.injected(["lost-prefills=0.5"]), setups=("stock", "patched"))
    assert begun == {"stock": [False, True], "patched": [False, True]}


def test_the_right_answers_may_be_those_of_an_engine_that_is_asked_before_and_is_gone_then(tmp_path: Path) -> None:
    result = run(tmp_path, setups=("stock", "patched"), alone=True)
    assert result["alone"]
    for setup in result["setups"].values():
        assert (setup["undisturbed_differ"], setup["mismatches"]) == (0, 0)
        assert setup["completed"] > 0
    found = record(tmp_path / "alone", "engine")
    assert "LIVEPATCH_STATE_DIR" not in str(found["environment"])
    assert not psutil.pid_exists(int(str(found["pid"])))
    assert "undisturbed_differ" not in run(tmp_path)["setups"]["patched"]


def test_a_setup_may_have_the_bundle_of_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    setups = ("stock", "earlier", "patched")
    result = run(tmp_path, setups=setups, revisions={"earlier": "HEAD"}, disconnects=True)
    assert tuple(result["setups"]) == setups
    assert [setup["survived"] for setup in result["setups"].values()] == [False, True, True]
    assert result["revisions"] == {"earlier": "HEAD"}
    (used,) = (tmp_path / "cache").glob("vllm-livepatch/revisions/*/vllm_livepatch/tools/cli.py")
    assert used.is_file()
    for setup in ("earlier", "patched"):
        assert (tmp_path / f"bundle-{setup}" / "manifest.json").is_file()
        environment = record(tmp_path / setup, "engine")["environment"]
        assert isinstance(environment, dict)
        assert environment["LIVEPATCH_STATE_DIR"] == str(tmp_path / f"state-{setup}")
        assert (tmp_path / setup / "status.json").is_file()


def test_a_part_that_dies_while_it_waits_for_its_turn_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deadly(Visitors):
        async def load(self, seconds: float) -> None:
            psutil.Process(int(str(record(tmp_path / "patched", "engine")["pid"]))).kill()
            await asyncio.Event().wait()

    monkeypatch.setattr(lab, "Visitors", Deadly)
    with pytest.raises(PartFailed, match="engine was ended by SIGKILL"):
        run(tmp_path, setups=("stock", "patched"))

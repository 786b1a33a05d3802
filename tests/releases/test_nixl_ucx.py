"""Every pinned vLLM release's NIXL workers and agents, with the real NIXL on CPU memory, stock and patched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from packaging.version import Version
from prefill_decode_drive import RELEASES, Run, drive, shared_directory
from vllm_livepatch.sitecustomize import decision, installed
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import sources

PATCH = "nixl-ucx-error-handling"


@pytest.fixture
def run(
    warm: interpreter.Interpreter, engine_python: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """The function that gives a release's run of a manner."""

    def of(release: str, manner: str) -> Run:
        return drive(release, manner, warm, engine_python, bundle, shared_directory(tmp_path_factory))

    return of


def rocm_package(release: str) -> str:
    """The package that a release takes its agents from on ROCm."""
    return "rixl._api" if Version(release) < Version("0.27") else "nixl_rocm._api"


def expected(release: str, mode: str | None, configured: str | None) -> dict[str, Any]:
    """What the driver finds where agents get `mode`, and `configured` where `kv_connector_extra_config` says peer."""
    return {
        "nixl_default": "peer",
        "plain": mode,
        "threads": "4",  # the worker's own parameter, which must stay
        "configured": configured,
        "arrived": True,
        "arrived_at_configured": True,
        "in_multi_connector": configured,
        "set_by_caller": "peer",
        "rocm_package": rocm_package(release),
        "on_rocm": mode,
    }


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_stock(release: str, run: Any) -> None:
    """No agent gets a mode, and `kv_connector_extra_config` cannot give it one: NIXL's own default is peer."""
    assert run(release, "stock").agents == expected(release, None, None)


@pytest.mark.parametrize("release", executed.first(RELEASES))
def test_patched(release: str, run: Any) -> None:
    """Agents get `none`, whichever package they come from; what is configured, or passed by a caller, wins."""
    patched = run(release, "patched")
    assert patched.agents == expected(release, "none", "peer")
    patch = patched.patches[PATCH]
    assert (patch["state"], patch["verdict"], patch["reason"]) == ("applied", "needed", None), patch
    assert patch["counters"] == {"mode_none": 2, "mode_peer": 2, "set_by_caller": 1}


@pytest.mark.parametrize("release", RELEASES)
def test_verdict(release: str) -> None:
    """Needed everywhere; `auto` applies it on ROCm only, `on` anywhere."""
    patch = catalogue.load()[PATCH].patch
    found = installed.look(patch, installed.Tree([str(sources.site_packages("vllm", release))]))
    for toggle, rocm in (("auto", True), ("auto", False), ("on", False)):
        there = decision.Installed(found.release, found.code, rocm)
        decided = decision.decide(patch, there, decision.Environment(toggles={PATCH: toggle}))
        assert (decided.verdict, decided.apply) == ("needed", rocm or toggle == "on")


def test_peer_by_option(run: Any) -> None:
    """The option's other value is NIXL's default, said aloud."""
    patched = run("0.29.0", "peer")
    assert patched.agents == expected("0.29.0", "peer", "peer")
    assert patched.patches[PATCH]["counters"] == {"mode_peer": 4, "set_by_caller": 1}


def test_not_asked(run: Any) -> None:
    """Outside ROCm nothing happens unless it is asked for."""
    patched = run("0.32.0", "not asked")
    assert patched.agents == expected("0.32.0", None, None)
    patch = patched.patches[PATCH]
    assert (patch["state"], patch["reason"], patch["verdict"]) == ("skipped", "optional", "needed"), patch
    assert "outside ROCm" in patch["detail"]

"""Wrappers around the real scheduler's methods raise, each once: the engine's steps are those of stock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import interpreter
import pytest
import tomli_w
from vllm_livepatch.sitecustomize import fingerprint
from vllm_livepatch.tools.releases import registry, sources

RELEASES = [pin.version for pin in registry.pins("vllm")]
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
METHODS = ("schedule", "update_from_output", "_update_from_kv_xfer_finished", "_free_request", "add_request")
RAISES = """\
def wrappers(livepatch):
    calls = []

    def around(wrapped, instance, args, kwargs):
        calls.append(1)
        if livepatch.options["WHEN"] == "before" and len(calls) == 3:
            raise RuntimeError("an error of its own")
        result = wrapped(*args, **kwargs)
        if livepatch.options["WHEN"] == "after" and len(calls) == 3:
            raise RuntimeError("an error of its own")
        return result

    return {TARGET: around}
"""


@pytest.fixture(scope="module")
def raising(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with one patch for each method, which raises in its third call."""
    work = tmp_path_factory.mktemp("raising")
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", "generate", "--out", str(work / "bundle")]
    for method in METHODS:
        target = f"{SCHEDULER}.{method}"
        variants: list[dict[str, Any]] = []
        for release in (RELEASES[0], RELEASES[-1]):
            file = sources.site_packages("vllm", release) / "vllm/v1/core/sched/scheduler.py"
            code = fingerprint.of_names(file.read_text("utf-8"), {target: target.partition(":")[2]})
            if code not in [variant["code"] for variant in variants]:
                variants.append({"releases": [release], "code": code})
        facts = {
            "title": "Raises",
            "package": "vllm",
            "targets": [target],
            "variant": variants,
            "option": [{"name": "WHEN", "default": "before", "choices": ["before", "after"]}],
            "auto": "off",
        }
        folder = work / "mine" / _name(method).replace("-", "_")
        folder.mkdir(parents=True)
        (folder / "patch.toml").write_text(tomli_w.dumps(facts), "utf-8")
        (folder / "wrappers.py").write_text(f"TARGET = {target!r}\n\n\n{RAISES}", "utf-8")
        command += ["--patch", _name(method)]
    subprocess.run([*command, "--patch-dir", str(work / "mine")], check=True, capture_output=True)
    return work / "bundle"


@pytest.mark.parametrize("release", [RELEASES[0], RELEASES[-1]])
def test_the_engines_steps_are_those_of_stock(
    release: str, raising: Path, warm: interpreter.Interpreter, tmp_path: Path
) -> None:
    (tmp_path / "stock").mkdir()
    stock = warm.run("own_errors", {"vllm": release}, tmp_path / "stock", arguments=METHODS)
    assert (stock["left"], stock["free again"]) == ([], True)
    assert sum(map(bool, stock["steps"])) > 5
    variables = [f"LIVEPATCH_{_name(method).upper().replace('-', '_')}" for method in METHODS]
    for when in ("before", "after"):
        work = tmp_path / when
        work.mkdir()
        environ = dict.fromkeys(variables, "on") | {f"{variable}_WHEN": when for variable in variables}
        found = warm.run("own_errors", {"vllm": release}, work, bundle=raising, environ=environ, arguments=METHODS)
        assert found == stock
        for method in METHODS:
            report = interpreter.reported(work, _name(method))
            assert (report["state"], report["reason"]) == ("failed", "raised"), (method, when, report)
            assert report["detail"].startswith(f"{SCHEDULER}.{method}: RuntimeError: an error of its own")


def _name(method: str) -> str:
    """The patch that wraps the method."""
    return f"raises-{method.strip('_').replace('_', '-')}"

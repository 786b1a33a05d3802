"""`[when]` in patch.toml: conditions that are known when a target is imported, decided alike by `check` and a process."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_livepatch.sitecustomize import settings
from vllm_livepatch.sitecustomize.conditions import When
from vllm_livepatch.sitecustomize.decision import Environment, Installed, Patch, PatchError, Variant, decide
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import registry, sources

from tests.unit.support import PATCHED, STOCK, USE_STEP, Cli, Sandbox, finish
from tests.unit.test_strict import edit

FACTS = {"title": "one", "package": "engine", "targets": ["engine.a:f"]}
PATCH = Patch("one", "engine", "", ("engine.a:f",), (), (Variant({"engine.a:f": "f"}, ("1.0",)),))
THERE = Installed("1.0", {"engine.a:f": "f"})


@pytest.mark.parametrize(
    ("when", "environ", "unmet"),
    [
        ({}, {}, ""),
        ({"environ": {"MODE": "fast"}}, {"MODE": "fast"}, ""),
        ({"environ": {"MODE": "fast"}}, {"MODE": "FAST"}, "MODE is not 'fast'"),
        ({"environ": {"MODE": "fast"}}, {"MODE": ""}, "MODE is not 'fast'"),
        ({"environ": {"MODE": "fast"}}, {}, "MODE is not 'fast'"),
        ({"environ": {"MODE": ""}}, {}, ""),
        ({"environ": {"MODE": ""}}, {"MODE": "  "}, ""),
        ({"environ": {"MODE": ""}}, {"MODE": "0"}, "MODE is set"),
        ({"environ": {"MODE": "fast", "SIZE": "2"}}, {"MODE": "fast", "SIZE": "3"}, "SIZE is not '2'"),
        ({"platform": "here"}, {}, ""),
        ({"platform": "there"}, {}, "the platform is not there"),
        ({"platform": "rocm"}, {}, "the platform is not rocm"),
        ({"platform": "here", "environ": {"MODE": "1"}}, {"MODE": "0"}, "MODE is not '1'"),
    ],
)
@pytest.mark.parametrize("toggle", ["auto", "on", "force"])
def test_a_condition_holds_under_every_toggle(
    when: dict[str, Any], environ: dict[str, str], unmet: str, toggle: str
) -> None:
    patch = dataclasses.replace(PATCH, when=When(**when), auto="needed" if toggle == "auto" else "off")
    environment = settings.read([patch], {**environ, "LIVEPATCH_ONE": toggle})
    decision = decide(patch, THERE, dataclasses.replace(environment, platform="here"))
    assert (decision.verdict, decision.apply, decision.wanted) == ("needed", not unmet, not unmet)
    assert decision.reason == ("condition" if unmet else "needed")
    assert decision.detail == "engine 1.0 has the fault" + (f"; {unmet}" if unmet else "")


def test_a_build_for_rocm_is_a_platform() -> None:
    patch = dataclasses.replace(PATCH, when=When(platform="rocm"))
    assert decide(patch, dataclasses.replace(THERE, rocm=True), Environment()).apply


def test_off_comes_first_and_the_platform_is_this_ones() -> None:
    patch = dataclasses.replace(PATCH, when=When(platform="elsewhere"))
    assert decide(patch, THERE, Environment("auto", {"one": "off"})).reason == "off"
    assert Environment().platform == sys.platform


def test_nothing_else_of_the_environment_is_kept() -> None:
    patch = dataclasses.replace(PATCH, when=When({"MODE": "1"}))
    environment = settings.read([patch], {"MODE": "0", "TOKEN": "a secret"})
    assert environment.variables == {"MODE": "0"}
    assert "'0'" not in decide(patch, THERE, environment).detail, "a value may be a secret"


@pytest.mark.parametrize(
    ("when", "line"),
    [
        ("linux", "when must be a table"),
        ({"model": "llama"}, "when has environ and platform, and no model"),
        ({"environ": "MODE=1"}, "when.environ is a table of variables and the texts that they must have"),
        ({"environ": {"MODE": 1}}, "when.environ is a table of variables and the texts that they must have"),
        ({"platform": ""}, "when.platform is a text"),
        ({"platform": ["linux"]}, "when.platform is a text"),
    ],
)
def test_what_is_no_condition_is_refused(when: Any, line: str) -> None:
    with pytest.raises(PatchError) as error:
        to_patch("one", {**FACTS, "when": when})
    assert str(error.value).startswith(f"patch one: {line}")


def test_check_and_a_process_decide_alike(sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.patch(when={"environ": {"ACME_MODE": "fast"}, "platform": sys.platform}, must=True)
    sandbox.generate()
    question = ["check", "--site-packages", str(sandbox.site), "--patch-dir", str(sandbox.patches), "--only"]
    for mode, reason in (("fast", "needed"), ("slow", "condition"), ("", "condition")):
        monkeypatch.setenv("ACME_MODE", mode)
        done = cli(*question, "--json")
        (found,) = json.loads(done.out)["patches"]
        assert (done.code, found["verdict"], found["reason"]) == (0, "needed", reason)
        assert finish([sys.executable, sandbox.bundle, "check"], sandbox.environ(ACME_MODE=mode)).code == 0
        done = sandbox.python(USE_STEP, ACME_MODE=mode, LIVEPATCH="strict")
        assert (done.code, done.out, done.others) == (0, PATCHED if mode == "fast" else STOCK, [])
    (line,) = [line for line in cli(*question).out.splitlines() if line.startswith("around")]
    assert line.split(maxsplit=3)[1:] == ["needed", "no", "ACME_MODE is not 'fast'"]
    states = {(one["patches"][0]["state"], one["patches"][0]["reason"]) for one in sandbox.reports()}
    assert states == {("applied", None), ("skipped", "condition")}
    assert cli(*question, "--require", "around").code == 1


def test_code_that_drifted_is_not_missed_where_a_condition_does_not_hold(sandbox: Sandbox) -> None:
    sandbox.patch(when={"environ": {"ACME_MODE": "fast"}})
    sandbox.generate()
    edit(sandbox)
    assert sandbox.python(USE_STEP, LIVEPATCH="strict").code == 0
    assert sandbox.python(USE_STEP, LIVEPATCH="strict", ACME_MODE="fast").code == 78


FINISH = "vllm.v1.core.sched.scheduler:Scheduler.finish_requests"
CONFIG = "vllm.v1.core.sched.scheduler:Scheduler.vllm_config"
VLLM = {
    "vllm/__init__.py": "",
    "vllm/_version.py": '__version__ = "0.33.0"\n',
    "vllm/v1/core/sched/scheduler.py": """
        class Scheduler:
            def __init__(self, vllm_config): self.vllm_config = vllm_config
            def finish_requests(self, request_ids, finished_status=None): return request_ids
        """,
}
USE_TWO = """
from types import SimpleNamespace as Of
from vllm.v1.core.sched.scheduler import Scheduler
for hybrid in (False, True, True):
    print(Scheduler(Of(model_config=Of(is_hybrid=hybrid))).finish_requests("r", finished_status=1))
"""


def test_what_the_configuration_knows_a_wrapper_asks_its_object(sandbox: Sandbox, cli: Cli) -> None:
    """As docs/patch-toml.md has it: there locked on the release's own code, here run."""
    page = (Path(__file__).parents[2] / "docs/patch-toml.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(def wrappers.*?)^```", page, re.M | re.S)
    sandbox.write(VLLM)
    sandbox.patch("acme", [FINISH], code, package="vllm", calls=[CONFIG], variant=[])
    place = str(sandbox.patches / "acme")
    for site in (sources.site_packages("vllm", "0.33.0"), sandbox.site):
        done = cli("lock", place, "--site-packages", str(site))
        assert done.out.endswith("locked for 0.33.0 (1 form of the code)\n"), done
    sandbox.generate()
    done = sandbox.python(USE_TWO, LIVEPATCH="strict")
    assert (done.code, done.out, sandbox.reported("acme")["counters"]) == (0, "r\n" * 3, {"of_hybrids": 2})


def test_every_listed_release_gives_its_scheduler_the_configuration(sandbox: Sandbox) -> None:
    """By the lock of a patch that asks for it: `__init__` keeps it in the same words everywhere."""
    sandbox.write(VLLM)
    forms = catalogue.load()["failed-loads"].patch.forms("vllm")
    assert {release for form in forms for release in form.releases} == {pin.version for pin in registry.pins("vllm")}
    assert {form.code[CONFIG] for form in forms} == {*sandbox.fingerprints(CONFIG).values()}

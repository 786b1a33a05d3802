"""What changed between neighbouring releases, as a diff on the older one: it loads the newer one's modules.

The diffs are of modules of the scheduler and of KV transfer, together with what they newly import: `from-diff` tells
what is lacking. They are made of the published sources when the test runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import executed
import interpreter
import pytest
import source_diffs
from vllm_livepatch.tools.bundles import catalogue
from vllm_livepatch.tools.releases import sources

WRAPPERS = "stale-finished-recving"
CORE = "vllm/v1/core"
CONNECTORS = "vllm/distributed/kv_transfer/kv_connector"
SECONDS = 300


@dataclass(frozen=True)
class Step:
    """From one release to the next."""

    old: str
    new: str
    files: list[str]


STEPS = [
    Step(
        "0.22.1",
        "0.23.0",
        [
            f"{CORE}/block_pool.py",
            f"{CORE}/kv_cache_coordinator.py",
            f"{CORE}/kv_cache_manager.py",
            f"{CORE}/kv_cache_utils.py",
            f"{CORE}/sched/async_scheduler.py",
            f"{CORE}/sched/scheduler.py",
            f"{CORE}/single_type_kv_cache_manager.py",
            f"{CONNECTORS}/v1/mooncake/store/coordinator.py",
            f"{CONNECTORS}/v1/moriio/moriio_common.py",
            f"{CONNECTORS}/v1/moriio/moriio_connector.py",
            f"{CONNECTORS}/v1/moriio/moriio_engine.py",
            f"{CONNECTORS}/v1/multi_connector.py",
            f"{CONNECTORS}/v1/nixl/connector.py",
            f"{CONNECTORS}/v1/nixl/worker.py",
            "vllm/multimodal/utils.py",
            "vllm/v1/kv_cache_spec_registry.py",
        ],
    ),
    Step(
        "0.30.0",
        "0.31.0",
        [
            f"{CORE}/kv_cache_manager.py",
            f"{CORE}/sched/async_scheduler.py",
            f"{CORE}/sched/scheduler.py",
            f"{CONNECTORS}/utils.py",
            f"{CONNECTORS}/v1/multi_connector.py",
            f"{CONNECTORS}/v1/nixl/base_worker.py",
            f"{CONNECTORS}/v1/nixl/pull_worker.py",
            "vllm/distributed/aux_output_connector/__init__.py",
            "vllm/distributed/aux_output_connector/connector.py",
            "vllm/distributed/ec_transfer/ec_connector/metrics.py",
        ],
    ),
    Step(
        "0.31.0",
        "0.32.0",
        [
            f"{CORE}/kv_cache_coordinator.py",
            f"{CORE}/kv_cache_manager.py",
            f"{CORE}/kv_cache_utils.py",
            f"{CORE}/sched/scheduler.py",
            f"{CONNECTORS}/utils.py",
            f"{CONNECTORS}/v1/multi_connector.py",
            f"{CONNECTORS}/v1/nixl/base_worker.py",
            f"{CONNECTORS}/v1/nixl/connector.py",
            "vllm/v1/metrics/cache_hit_source.py",
            "vllm/v1/metrics/stats.py",
        ],
    ),
    Step(
        "0.32.0",
        "0.33.0",
        [
            f"{CORE}/sched/async_scheduler.py",
            f"{CORE}/sched/scheduler.py",
            f"{CONNECTORS}/v1/moriio/moriio_connector.py",
            f"{CONNECTORS}/v1/moriio/moriio_layout.py",
            f"{CONNECTORS}/v1/moriio/moriio_tp_mapping.py",
            f"{CONNECTORS}/v1/multi_connector.py",
            f"{CONNECTORS}/v1/nixl/base_worker.py",
            f"{CONNECTORS}/v1/nixl/pull_scheduler.py",
            "vllm/distributed/nixl_utils.py",
        ],
    ),
]


def command_line(*arguments: str | Path, ends: tuple[int, ...] = (0,)) -> str:
    """What the project's command prints, run as a user runs it."""
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", *map(str, arguments)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LIVEPATCH_TEST_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environ)
    assert done.returncode in ends, done.stderr
    return done.stdout


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def digests(directory: Path, files: list[str]) -> dict[str, bytes | None]:
    return {name: (directory / name).read_bytes() if (directory / name).is_file() else None for name in files}


@pytest.mark.parametrize(
    "step", STEPS if executed.by_hand() else STEPS[:2], ids=lambda step: f"{step.old} to {step.new}"
)
def test_a_release_as_the_next_one(step: Step, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    old, new = (sources.site_packages("vllm", release) for release in (step.old, step.new))
    before = digests(old, step.files)
    (tmp_path / "step.diff").write_text(source_diffs.between(old, new, step.files), "utf-8")

    output = command_line("from-diff", tmp_path / "step.diff", "--name", "the-next-one", "--out", tmp_path / "mine")
    verdicts = {
        line.split()[1]: line.split()[-1] for line in output.splitlines() if line.startswith(f"vllm {step.old} ")
    }
    assert verdicts == {step.old: "applies"}, output
    fixed = next(line for line in output.splitlines() if "fixed-upstream" in line)
    assert fixed.startswith(f"vllm {step.new} "), output

    mine = ("--patch-dir", tmp_path / "mine")
    command_line("generate", "--out", tmp_path / "bundle", "--patch", "the-next-one", "--patch", WRAPPERS, *mine)
    # Exit 1: a patch of ours may be for code that the diff changes; what it says of the diff is the question here.
    checked = json.loads(command_line("check", "--json", "--site-packages", old, *mine, ends=(0, 1)))["patches"]
    offline = {patch["name"]: patch["verdict"] for patch in checked}
    assert offline["the-next-one"] == "needed"

    modules = [module_of(file) for file in step.files]
    found = warm.run(
        "changed_modules",
        {"vllm": step.old},
        tmp_path,
        bundle=tmp_path / "bundle",
        environ={"XDG_CACHE_HOME": str(tmp_path / "user")},
        arguments=[str(new), *modules],
    )["modules"]
    assert list(found) == modules
    for name, module in found.items():
        assert (module["text"], module["code"], module["shown"]) == (True, True, True), name
        assert module["equal"] == module["functions"], f"{name}: {module}"
        added = before[step.files[modules.index(name)]] is None
        assert Path(module["file"]).is_relative_to(old) is not added, name
    assert sum(module["functions"] for module in found.values()) > 100

    report = interpreter.reported(tmp_path, "the-next-one")
    assert (report["state"], report["reason"], report["verdict"]) == ("applied", None, "needed")
    assert set(report["targets"]) == set(modules)
    # The wrapper of the scheduler's method is decided on, and wraps, what the diff makes of it.
    around = interpreter.reported(tmp_path, WRAPPERS)
    assert (around["state"], around["verdict"]) == ("applied", offline[WRAPPERS])
    targets = catalogue.load()[WRAPPERS].patch.modules
    assert [name for name, module in found.items() if module["wrapped"]] == [name for name in found if name in targets]
    assert "vllm.v1.core.sched.scheduler" in found
    assert digests(old, step.files) == before, "the sources on disk are as they were"


def test_modules_that_do_not_fit_together_are_named_before_start(tmp_path: Path) -> None:
    """Of two modules that changed together only the one that needs the other."""
    old, new = (sources.site_packages("vllm", release) for release in ("0.31.0", "0.32.0"))
    (tmp_path / "half.diff").write_text(source_diffs.between(old, new, [f"{CORE}/sched/scheduler.py"]), "utf-8")
    command = ["from-diff", str(tmp_path / "half.diff"), "--name", "half", "--out", str(tmp_path / "mine")]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_livepatch.tools.cli", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "it imports what is not there: vllm.v1.metrics.stats:KV_FETCH_" in " ".join(done.stdout.split())
    assert "nothing was written" in done.stdout
    assert not (tmp_path / "mine").exists()

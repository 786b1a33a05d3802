"""A diff that changes what a shipped patch is bound to turns that patch off: told when it is made, and when bundled."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import source_diffs
from vllm_livepatch.tools.releases import sources

SCHEDULER = "vllm/v1/core/sched/scheduler.py"


def vllm_livepatch(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_livepatch", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def made(name: str, function: str, place: Path) -> list[str]:
    """What from-diff says of other patches, of a diff that gives a function of 0.29.0's scheduler one statement more."""
    release = sources.site_packages("vllm", "0.29.0")
    text = (release / SCHEDULER).read_text("utf-8")
    (line,) = (line for line in text.splitlines(True) if f"def {function}(" in line)
    more = f"{line}        self.livepatch_test = 0\n"
    diff = place / f"{name}.diff"
    diff.write_text(source_diffs.replacing(release, {SCHEDULER: [(line, more)]}), "utf-8")
    stderr = vllm_livepatch("from-diff", diff, "--name", name, "--out", place / "patches").stderr
    return [line for line in stderr.splitlines() if "warning" in line]


def test_a_diff_that_turns_a_patch_off(tmp_path: Path) -> None:
    *warnings, last = made("one_more", "_free_blocks", tmp_path)
    assert last.startswith("warning: `vllm-livepatch prove ")
    assert "kv-block-reaper" in last
    (reaper,) = (line for line in warnings if "kv-block-reaper" in line)
    changed = (
        "warning: one-more disables kv-block-reaper on vllm 0.26.0 to 0.30.0: it changes the same code; without it, "
    )
    assert reaper.startswith(f"{changed}blocks of requests whose completion was lost are held until a restart")
    assert "preemption-livelock" not in " ".join(warnings)  # it neither wraps nor calls that function
    bundled = vllm_livepatch("generate", "--out", tmp_path / "bundle", "--patch-dir", tmp_path / "patches")
    assert bundled.stderr.splitlines() == [f"vllm-livepatch: {line}" for line in (*warnings, last)]

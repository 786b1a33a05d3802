"""Each line of the command blocks of README.md and docs/operate.md is run: here in a shell, or by the test that is named.

Here `vllm` and `kubectl` are stood in for; `vllm-livepatch` is this checkout's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_livepatch.tools.releases import registry, sources

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/operate.md")
ELSEWHERE = {
    "pip install .": "tests/unit/test_installed.py::test_uv_tool_install",
    "vllm-livepatch check --release vllm==0.33.0 --release lmcache==0.5.6": (
        "tests/releases/test_cold_check.py::test_the_pair_in_the_readme_fetches_little"
    ),
    "tools/demo.sh": "tests/e2e/test_demo.py::test_patched_lives_with_right_outputs_and_gives_all_blocks_back",
    "tools/test.sh": "",  # this is it
}
"""Lines that are run by other tests. `.ci/run` calls tools/test.sh."""

PROGRAMS = {
    # What an injected process does, without an engine: it says whether the bundle is armed.
    "vllm": '#!/bin/sh\nexec {python} -c \'import _vllm_livepatch, sys; print("armed", *sys.argv[1:])\' "$@"\n',
    "kubectl": '#!/bin/sh\ncase "$1 $2" in "get pods") echo pod/a;; "exec "*) shift 3; test "$1" = python3 && echo applied;; *) echo "$@";; esac\n',
}


def blocks() -> dict[str, list[str]]:
    """The lines of each page's blocks, without what is a remark."""
    return {
        f"{page}:{number}": [line.partition("   #")[0].rstrip() for line in block.splitlines()]
        for page in PAGES
        for number, block in enumerate(
            re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)
        )
    }


BLOCKS = blocks()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory to work in, with the programs that are stood in for."""
    directory = tmp_path_factory.mktemp("commands")
    for name, text in PROGRAMS.items():
        program = directory / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text.replace("{python}", getattr(sys, "_base_executable", sys.executable)), "utf-8")
        program.chmod(0o755)
    (directory / "state").mkdir()
    return directory


@pytest.mark.parametrize("block", BLOCKS)
def test_its_lines_run(block: str, place: Path) -> None:
    text = "\n".join(line for line in BLOCKS[block] if line not in ELSEWHERE)
    if not text:
        return
    newest = registry.pins("vllm")[-1].version
    text = re.sub(r"\bDIR\b", str(sources.site_packages("vllm", newest)), text)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LIVEPATCH", "PYTHON"))}
    path = f"{place / 'bin'}:{Path(sys.executable).parent}:{environ['PATH']}"
    environ |= {"PATH": path, "LIVEPATCH_STATE_DIR": str(place / "state"), "XDG_CACHE_HOME": str(place / "cache")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=place, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for line, printed in EXPECTED.items():
        if line in text:
            assert printed in done.stdout, line


EXPECTED = {
    "vllm serve MODEL": "armed serve MODEL",
    "generate --out bundle": "sha256:",
    "deploy kubernetes": "IMAGE",
    "for pod in": "pod/a yes",
    "show stale-finished-recving": "stale-finished-recving",
    "LIVEPATCH=strict": "set env deployment/vllm LIVEPATCH_STALE_FINISHED_RECVING- LIVEPATCH=strict",
}
"""What must be among what a block prints, by a part of one of its lines."""


def test_each_block_is_here() -> None:
    lines = [line for block in BLOCKS.values() for line in block]
    assert len(BLOCKS) >= 7
    for line in (*ELSEWHERE, *EXPECTED):
        assert any(line in one for one in lines), line


@pytest.mark.parametrize(("line", "test"), [(line, test) for line, test in ELSEWHERE.items() if test])
def test_the_other_test_is_there(line: str, test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text("utf-8"), line

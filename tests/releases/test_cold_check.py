"""The README's first command, with an empty cache and the real registry: what it fetches."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
MEGABYTES = 4
COUNTED = """
import sys
from vllm_livepatch.tools import cli
from vllm_livepatch.tools.releases import registry
try:
    cli.main()
finally:
    print(registry.traffic.answers, registry.traffic.bytes, file=sys.stderr)
"""


def test_the_pair_in_the_readme_fetches_little(tmp_path: Path) -> None:
    (command,) = re.findall(
        r"^vllm-livepatch (check --release \S+ --release \S+)", README.read_text("utf-8"), re.MULTILINE
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LIVEPATCH")}
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, *shlex.split(command)],
        env={**environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    answers, fetched = map(int, done.stderr.splitlines()[-1].split())
    assert answers > 0, "the cache was not empty"
    assert fetched <= MEGABYTES * 1e6

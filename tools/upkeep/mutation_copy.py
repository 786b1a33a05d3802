"""A copy of the tree to change, with an environment that imports the copy, and the process that runs its tests."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("mutation_worker.py")


class Copy:
    """One copy; `root` is emptied first."""

    def __init__(self, checkout: Path, root: Path) -> None:
        shutil.rmtree(root, ignore_errors=True)
        self.tree, self.tests, self.probes = root / "tree", root / "tests", root / "probes"
        listed = ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
        for name in filter(None, names):
            if (checkout / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, self.tree / name)
        self.probes.write_bytes(b"")
        self.probes.chmod(0o666)
        # Seconds, one for each change: a compiled file of the text before is never taken for this one's.
        self._ages = itertools.count(1_000_000_000)
        python = self._environment(root / "environment")
        command = [str(python), str(WORKER), str(root / "result.json")]
        self._worker = subprocess.Popen(
            command,
            cwd=self.tree,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _environment(self, place: Path) -> Path:
        """The interpreter of an environment with the copy installed; all else is this interpreter's."""
        quiet = {"check": True, "stdout": subprocess.DEVNULL}
        subprocess.run([sys.executable, "-m", "uv", "venv", "-q", "-p", sys.executable, str(place)], **quiet)  # type: ignore[call-overload]
        python = place / "bin" / "python"
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--python", str(python)]
        subprocess.run([*install, "-e", str(self.tree)], **quiet)  # type: ignore[call-overload]
        (here,) = place.glob("lib/python*/site-packages")
        # A path in a .pth file: the .pth files there, which install the checkout, are not read.
        (here / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
        shown = "import vllm_livepatch.sitecustomize as it; print(it.__path__[0])"
        found = subprocess.run([str(python), "-c", shown], check=True, capture_output=True, text=True, cwd="/").stdout
        if not Path(found.strip()).is_relative_to(self.tree):
            raise RuntimeError(f"the copy's environment imports {found.strip()}, not the copy")
        return python

    def write(self, module: str, text: str) -> None:
        place = self.tree / module
        place.write_text(text, "utf-8")
        age = next(self._ages)
        os.utime(place, (age, age))

    def run(self, tests: Sequence[str], seconds: float, *, record: bool = False) -> dict[str, Any]:
        """Run these tests, in a process of their own; see `mutation_worker`."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        shutil.rmtree(self.tests, ignore_errors=True)
        request = {
            "tests": [f"--basetemp={self.tests}", *tests],
            "seconds": seconds,
            "probes": str(self.probes) if record else None,
            "warm": any(test.startswith("tests/releases/") for test in tests),
        }
        self._worker.stdin.write(json.dumps(request) + "\n")
        answer: dict[str, Any] = json.loads(self._worker.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._worker.stdin is not None
        self._worker.stdin.close()
        self._worker.wait(60)

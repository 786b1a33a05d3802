"""What `git apply`, `patch --fuzz=3` and `from-diff` make of one diff on three releases.

    python -m vllm_livepatch.tools.bench.git_apply

The diff is of the modules in MODULES from vLLM 0.31.0 to 0.32.0, as they were published. It is applied to copies: of
the release before, of the one that it was made for, and of the one that has the change already.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from vllm_livepatch.sitecustomize.installed import Tree
from vllm_livepatch.tools.bench.figures import Figures
from vllm_livepatch.tools.diffs import judging, reading
from vllm_livepatch.tools.releases import sources

MODULES = ("vllm/v1/core/kv_cache_manager.py", "vllm/v1/core/sched/scheduler.py", "vllm/v1/metrics")
FROM, TO = "0.31.0", "0.32.0"
RELEASES = ("0.30.0", FROM, TO)
COLUMNS = (
    "on vLLM",
    "`git apply`",
    "then `patch`: exit",
    "files changed",
    "hunks left out",
    "hunks put in with lines of context wrong",
    "files that no longer parse",
    "`from-diff`",
)


def copied(release: str, place: Path) -> Path:
    """The modules of a release, at `place`."""
    tree = sources.site_packages("vllm", release)
    for name in MODULES:
        for file in [tree / name] if name.endswith(".py") else sorted((tree / name).glob("*.py")):
            there = place / file.relative_to(tree)
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, there)
    return place


def made(work: Path) -> Path:
    """The diff from one release to the next, as git writes it."""
    for name, release in (("a", FROM), ("b", TO)):
        copied(release, work / name)
    command = ["git", "diff", "--no-index", "--no-prefix", "a", "b"]
    done = subprocess.run(command, cwd=work, capture_output=True, check=False)
    diff = work / "release.diff"
    diff.write_bytes(done.stdout)
    return diff


def applied(diff: Path, place: Path) -> list[str]:
    """`git apply --check || patch -p1 --fuzz=3 --batch`, in a copy of a release."""
    git = subprocess.run(["git", "apply", "--check", str(diff)], cwd=place, capture_output=True, check=False)
    if git.returncode == 0:
        return ["applies", "", "", "", "", ""]
    before = contents(place)
    done = subprocess.run(
        ["patch", "-p1", "--fuzz=3", "--batch", "-i", str(diff)], cwd=place, capture_output=True, text=True, check=False
    )
    after = contents(place)
    taken_back = "Reversed (or previously applied) patch detected" in done.stdout
    return [
        "refused",
        f"{done.returncode}, the change taken back" if taken_back else str(done.returncode),
        str(sum(before.get(name) != after.get(name) for name in {*before, *after})),
        str(len(re.findall(r"^Hunk #\d+ FAILED", done.stdout, re.MULTILINE))),
        str(len(re.findall(r"^Hunk #\d+ succeeded .*with fuzz", done.stdout, re.MULTILINE))),
        str(sum(not parses(text) for text in after.values())),
    ]


def contents(place: Path) -> dict[str, str]:
    return {file.relative_to(place).as_posix(): file.read_text("utf-8") for file in place.rglob("*.py")}


def parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def measured() -> Figures:
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        diff = made(Path(temporary))
        read = reading.parse(diff.read_bytes())
        for release in RELEASES:
            tree = sources.site_packages("vllm", release)
            judged = judging.judge(read, release, Tree([str(tree)]).source)
            row = applied(diff, copied(release, Path(temporary, release)))
            rows.append([release, *row, "applies" if judged.verdict == "needed" else f"`{judged.verdict}`"])
    return Figures("python -m vllm_livepatch.tools.bench.git_apply", COLUMNS, rows)


if __name__ == "__main__":
    measured().show()

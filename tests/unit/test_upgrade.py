"""A bundle is replaced under processes that start, run, and import targets later: each has one bundle, and all of it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import bundle, placing
from vllm_livepatch.tools.in_bundle.verifying import verified

from tests.unit import debian, interpreters, upgrades
from tests.unit.support import PYTHON, USE_STEP, Done, Sandbox

WAIT = "print('waits', flush=True)\ninput()\n"
BOTH = f"""
from fakeengine.scheduler import Scheduler
first = Scheduler().step(7)
{WAIT}
from fakeengine import worker
print([first, worker.work(8)])
"""
LATER = f"{WAIT}from fakeengine.scheduler import Scheduler\nprint(Scheduler().step(7))"


def upgrade(sandbox: Sandbox, number: int) -> None:
    placing.write_directory(upgrades.numbered(sandbox, number), sandbox.bundle)


def generations(sandbox: Sandbox) -> list[str]:
    return sorted(folder.name for folder in sandbox.bundle.glob("livepatch-*"))


class Waiting:
    """A process that has come to its WAIT, and goes on when it is told to."""

    def __init__(self, sandbox: Sandbox, code: str, python: str = PYTHON, **more: str) -> None:
        pipe = subprocess.PIPE
        command, environ = [python, "-c", code], sandbox.environ(**more)
        self._process = subprocess.Popen(command, env=environ, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "waits\n"

    def ended(self) -> Done:
        out, err = self._process.communicate("\n", timeout=60)
        return Done(self._process.returncode, out, err)


# Starts


def test_no_start_is_unpatched_and_none_is_mixed(sandbox: Sandbox) -> None:
    """The short form of `python -m tests.unit.upgrades`, which CI runs too: 1,000 starts during 100 upgrades."""
    found = upgrades.run(sandbox, starts=24, upgrades=12)
    assert found.wrong == []
    assert found.whole == 24
    assert len(found.of) > 3


def test_a_container_sees_the_upgrade_through_its_mount(sandbox: Sandbox, tmp_path: Path) -> None:
    """A bind mount holds on to the directory itself: what takes the place of its name does not show in there."""
    upgrade(sandbox, 1)
    before = sandbox.bundle.stat()
    mount = tmp_path / "mount"
    mount.mkdir()
    start = f"{PYTHON} -c 'from fakeengine.scheduler import Scheduler; print(Scheduler().step(7))'"
    script = f"mount --bind {sandbox.bundle} {mount} && while read line; do {start}; done"
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    if subprocess.run([*command[:4], "mount", "--bind", str(sandbox.bundle), str(mount)], check=False).returncode:
        debian.lack("the right to mount")
    environ = sandbox.environ(path=[mount, sandbox.site])
    pipe = subprocess.PIPE
    container = subprocess.Popen(command, env=environ, text=True, stdin=pipe, stdout=pipe, bufsize=1)
    assert container.stdin is not None
    assert container.stdout is not None
    container.stdin.write("\n")
    assert container.stdout.readline() == "[1, [7]]\n"
    upgrade(sandbox, 2)
    container.stdin.write("\n")
    assert container.stdout.readline() == "[2, [7]]\n"
    container.communicate("")
    assert (sandbox.bundle.stat().st_ino, sandbox.bundle.stat().st_dev) == (before.st_ino, before.st_dev)


def test_the_entry_is_replaced_last_and_in_one_step(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the writer is killed, a start finds one whole bundle."""
    upgrade(sandbox, 1)
    files = upgrades.numbered(sandbox, 2)
    seen: list[str] = []
    replace = os.replace

    def looked_at(source: Path | str, target: Path | str) -> None:
        if Path(target).parent == sandbox.bundle:
            for moment in ("before", "after"):
                if moment == "after":
                    replace(source, target)
                seen.append(f"{moment} {Path(target).name}: {sandbox.python(USE_STEP).out.strip()}")
        else:
            replace(source, target)

    monkeypatch.setattr(os, "replace", looked_at)
    placing.write_directory(files, sandbox.bundle)
    ours = [line for line in seen if "sitecustomize" in line]
    assert ours == ["before sitecustomize.py: [1, [7]]", "after sitecustomize.py: [2, [7]]"]
    assert seen[-2:] == ours
    assert all(line.endswith("[1, [7]]") for line in seen[:-2])


def test_cached_bytecode_is_never_taken_for_the_new_entrys(sandbox: Sandbox) -> None:
    """Python compares a source's seconds and size, and both may be those of the entry that was replaced."""
    upgrade(sandbox, 1)
    entry = sandbox.bundle / "sitecustomize.py"
    before = entry.stat()
    later = int(time.time()) + 100  # as if it had been written in the same second as what follows
    os.utime(entry, (later, later))
    assert sandbox.python(USE_STEP).out == "[1, [7]]\n"
    assert list(sandbox.bundle.glob("__pycache__/sitecustomize.*"))
    upgrade(sandbox, 2)
    assert entry.stat().st_size == before.st_size
    assert int(entry.stat().st_mtime) > later
    assert sandbox.python(USE_STEP).out == "[2, [7]]\n"


# Processes that run


def test_a_process_keeps_its_bundle(sandbox: Sandbox) -> None:
    upgrade(sandbox, 1)
    first = bundle.digest(upgrades.numbered(sandbox, 1))
    running, waiting = Waiting(sandbox, BOTH), Waiting(sandbox, LATER)
    for number in (2, 3, 4):
        upgrade(sandbox, number)
    assert running.ended().out == "[[1, [7]], [1, [8]]]\n"
    assert waiting.ended().out == "[1, [7]]\n"
    assert {report["digest"] for report in sandbox.reports()} == {first}
    assert {report["bundle"] for report in sandbox.reports()} == {str(sandbox.bundle)}


def test_a_process_whose_bundle_is_gone_says_so(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "KEPT_SECONDS", 0.0)
    upgrade(sandbox, 1)
    running, waiting = Waiting(sandbox, BOTH), Waiting(sandbox, LATER)
    strict = Waiting(sandbox, LATER, LIVEPATCH="strict")
    upgrade(sandbox, 2)
    assert len(generations(sandbox)) == 1
    done = running.ended()
    assert (done.code, done.out) == (0, "[[1, [7]], [8]]\n")
    assert "other is not applied (replaced): the bundle that this process started with was replaced" in done.lines[-1]
    done = waiting.ended()
    assert (done.code, done.out) == (0, "[7]\n")
    (line,) = done.lines
    assert "nothing is patched: " in line
    assert line.endswith("is not there: was it replaced since this process started?")
    ended = strict.ended()
    assert (ended.code, ended.out) == (78, "")
    assert sandbox.python(USE_STEP).out == "[2, [7]]\n"


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
def test_a_zip_that_is_replaced_is_not_mixed_with_the_new_one(sandbox: Sandbox, version: str) -> None:
    archive = sandbox.root / "livepatch.zip"
    path = os.pathsep.join(map(str, (archive, sandbox.site)))
    python = str(interpreters.find(version))

    def waiting(code: str) -> Waiting:
        return Waiting(sandbox, code, python, PYTHONPATH=path)

    placing.write_zip(upgrades.numbered(sandbox, 1), archive)
    same = waiting(BOTH)
    placing.write_zip(upgrades.numbered(sandbox, 1), archive)
    assert same.ended().out == "[[1, [7]], [1, [8]]]\n"
    running, later = waiting(BOTH), waiting(LATER)
    files = upgrades.numbered(sandbox, 2)
    placing.write_zip({**files, "_padding": os.urandom(5000)}, archive)
    done = running.ended()
    assert (done.code, done.out) == (0, "[[1, [7]], [8]]\n")
    assert "other is not applied (replaced): " in done.lines[-1]
    done = later.ended()
    assert (done.code, done.out, len(done.lines)) == (0, "[7]\n", 1)
    assert "was it replaced since this process started?" in done.err


# What stays and what goes


def test_a_replaced_bundle_stays_for_an_hour(sandbox: Sandbox) -> None:
    for number in (1, 2, 3):
        upgrade(sandbox, number)
    assert len(generations(sandbox)) == 3
    found = verified(sandbox.bundle)
    assert (found.differences, len(found.earlier)) == ([], 2)
    now = time.time()
    for age, folder in enumerate(sorted(sandbox.bundle.glob("livepatch-*"), key=lambda folder: folder.stat().st_mtime)):
        os.utime(folder, (now, now - 10800 + 3600 * age))  # the third has been in use for an hour
    third = str(json.loads((sandbox.bundle / "manifest.json").read_bytes())["generation"])
    upgrade(sandbox, 4)
    fourth = str(json.loads((sandbox.bundle / "manifest.json").read_bytes())["generation"])
    assert generations(sandbox) == sorted([third, fourth])
    upgrade(sandbox, 4)
    assert generations(sandbox) == sorted([third, fourth])


def test_back_to_an_earlier_bundle(sandbox: Sandbox) -> None:
    upgrade(sandbox, 1)
    first = sandbox.package
    upgrade(sandbox, 2)
    (first / "patches/around/wrappers.py").write_text("broken")
    (first / "more.py").write_text("")
    differences = verified(sandbox.bundle).differences
    assert [line.rpartition("/")[2] for line in differences] == ["wrappers.py was changed", "more.py was added"]
    for folder in sandbox.bundle.glob("livepatch-*"):
        os.utime(folder, (0, 0))  # long ago; what is replaced now is replaced now
    upgrade(sandbox, 1)
    assert verified(sandbox.bundle).differences == []
    assert sandbox.python(USE_STEP).out == "[1, [7]]\n"
    assert len(generations(sandbox)) == 2


def test_what_is_not_the_bundles_goes(patched: Sandbox) -> None:
    (patched.bundle / "left over.txt").write_text("")
    (patched.bundle / "folder").mkdir()
    (patched.bundle / ".new-of-a-killed-one").mkdir()
    assert verified(patched.bundle).differences == ["left over.txt was added"]
    patched.patch("other")
    patched.generate()
    assert verified(patched.bundle).differences == []
    assert sorted(json.loads((patched.bundle / "manifest.json").read_text())["patches"]) == ["around", "other"]
    names = {path.name for path in patched.bundle.iterdir()}
    assert names == {"sitecustomize.py", "__main__.py", "manifest.json", "sbom.cdx.json", *generations(patched)}
    assert not [path for path in patched.root.iterdir() if path.name.startswith(".")]


def test_a_damaged_bundle_is_made_good(patched: Sandbox) -> None:
    (patched.bundle / "manifest.json").write_text("{")
    (patched.package / "sitecustomize/hook.py").write_text("")
    (patched.package / "catalogue.json").unlink()
    shutil.rmtree(patched.package / "patches")
    patched.generate()
    assert verified(patched.bundle).differences == []


def test_a_bundle_of_version_0_1_is_upgraded_under_its_processes(patched: Sandbox) -> None:
    """It had no generations: its package lay beside its entry."""
    package = patched.package
    package.rename(patched.bundle / "_vllm_livepatch")
    shutil.rmtree(package.parent)
    entry = patched.bundle / "sitecustomize.py"
    text = entry.read_text().replace(f'GENERATION = "{package.parent.name}"', 'GENERATION = ""')
    entry.write_text(text.replace("return os.path.join(HERE, GENERATION)", "return HERE"))
    manifest = json.loads((patched.bundle / "manifest.json").read_bytes())
    listed = {name.removeprefix(f"{package.parent.name}/"): sha256 for name, sha256 in manifest["files"].items()}
    (patched.bundle / "manifest.json").write_text(json.dumps({"vllm-livepatch": "0.1.1", "files": listed}))
    running = Waiting(patched, LATER)
    upgrade(patched, 2)
    found = verified(patched.bundle)
    assert (found.differences, found.earlier) == ([], ["_vllm_livepatch"])
    assert running.ended().out == "['patched', 7]\n"
    assert patched.python(USE_STEP).out == "[2, [7]]\n"
    os.utime(patched.bundle / "_vllm_livepatch", (0, 0))
    os.utime(patched.package.parent, (1, 1))
    upgrade(patched, 3)
    assert not (patched.bundle / "_vllm_livepatch").exists()


def test_everybody_can_read_it_whatever_the_umask(sandbox: Sandbox) -> None:
    before = os.umask(0o077)
    try:
        for number in (1, 2, 1):
            upgrade(sandbox, number)
        placing.write_zip(upgrades.numbered(sandbox, 1), sandbox.root / "livepatch.zip")
    finally:
        os.umask(before)
    for path in (sandbox.bundle, *sandbox.bundle.rglob("*"), sandbox.root / "livepatch.zip"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path


def test_two_writers_take_turns(sandbox: Sandbox) -> None:
    both = [upgrades.numbered(sandbox, number) for number in (1, 2)]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(placing.write_directory, both[turn % 2], sandbox.bundle) for turn in range(12)]:
            done.result()
    assert verified(sandbox.bundle).differences == []
    assert verified(sandbox.bundle).digest in map(bundle.digest, both)


def test_a_bundle_that_lies_there_already_is_not_written_again(patched: Sandbox) -> None:
    before = {path: path.stat().st_mtime_ns for path in patched.bundle.rglob("*")}
    patched.generate()
    assert {path: path.stat().st_mtime_ns for path in patched.bundle.rglob("*")} == before

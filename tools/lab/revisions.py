"""The project's own command line: of this checkout as it is, or as it was in an earlier revision."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from filelock import FileLock
from vllm_livepatch.tools import user_cache
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.toml import tomllib

ROOT = Path(__file__).resolve().parents[2]


def checkout(revision: str) -> Path:
    """A directory for PYTHONPATH that holds the packages as they were in a revision of this checkout; made once.

    Raises UserError where there is no such revision.
    """
    found = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found.returncode:
        raise UserError(f"{revision} is no revision of {ROOT}, or of what was cloned of it: git fetch --unshallow")
    commit = found.stdout.decode().strip()  # a name may move to another
    place = user_cache.directory() / "revisions" / commit
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.is_dir():
            new = place.with_name(f"{commit}.new")
            shutil.rmtree(new, ignore_errors=True)
            folders = ("patches", "sitecustomize", "tools", "pyproject.toml")
            archive = _git("archive", "--prefix=vllm_livepatch/", commit, *folders)
            if archive.returncode:
                raise UserError(f"{revision} cannot be read: {archive.stderr.decode(errors='replace').strip()}")
            with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
                files.extractall(new, filter="data")
            _name_release(new)
            new.rename(place)
    return place


def _name_release(place: Path) -> None:
    """So that its bundles say the version that they are of, and not that of the checkout which makes them."""
    facts = tomllib.loads((place / "vllm_livepatch" / "pyproject.toml").read_text(encoding="utf-8"))
    name, version = facts["project"]["name"], facts["project"]["version"]
    directory = place / f"{name.replace('-', '_')}-{version}.dist-info"
    directory.mkdir()
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (directory / "METADATA").write_text(text, encoding="utf-8")


def command_line(*arguments: str, path: Path | None = None) -> str:
    """What the command prints, of the checkout at ``path``, by default of this one. It is run as a user runs it.

    What it remarks is shown if it fails: then raises CalledProcessError. A file is to be named by its whole path.
    """
    command = [sys.executable, "-m", "vllm_livepatch.tools.cli", *arguments]
    # Where it runs comes before what is installed, and PYTHONPATH where Python leaves that out.
    environment = None if path is None else {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, capture_output=True, check=False, text=True, env=environment, cwd=path)
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
        done.check_returncode()
    return done.stdout


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, check=False)

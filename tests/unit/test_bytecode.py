"""Bytecode in a bundle: Python runs it in a source's place, so `verify` and `doctor` look at it, and `generate` removes it."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_livepatch.tools.bundles import bundle
from vllm_livepatch.tools.in_bundle import bytecode
from vllm_livepatch.tools.in_bundle.verifying import verified

from tests.unit import interpreters
from tests.unit.support import PATCHED, PYTHON, STOCK, USE_STEP, Cli, Sandbox
from tests.unit.test_doctor import ask

UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
CHECKED = py_compile.PycInvalidationMode.CHECKED_HASH
OTHER = "import sys; sys.stdout.write('planted ')\n"


def cached(sandbox: Sandbox, source: Path, python: str = PYTHON, *flags: str) -> Path:
    """Where an interpreter keeps a source's bytecode."""
    code = f"import importlib.util as u; print(u.cache_from_source({str(source)!r}))"
    return Path(sandbox.bare(code, *flags, python=python).out.strip())


def plant(sandbox: Sandbox, text: str, mode: py_compile.PycInvalidationMode, header_of: Path | None = None) -> Path:
    """Bytecode of `text` where Python looks for that of the bundle's entry."""
    source = sandbox.root / "planted.py"
    source.write_text(text)
    place = cached(sandbox, sandbox.bundle / "sitecustomize.py")
    py_compile.compile(str(source), str(place), doraise=True, invalidation_mode=mode)
    if header_of is not None:
        place.write_bytes(header_of.read_bytes()[:16] + place.read_bytes()[16:])
    return place


def test_bytecode_of_other_code_is_a_difference(patched: Sandbox, cli: Cli) -> None:
    patched.python("pass")
    own = patched.root / "own.pyc"
    entry = cached(patched, patched.bundle / "sitecustomize.py")
    shutil.copy(entry, own)
    digest = verified(patched.bundle).digest
    place = plant(patched, OTHER, UNCHECKED, header_of=own)
    assert patched.python(USE_STEP).out == f"planted {STOCK}"  # it does run
    name = place.relative_to(patched.bundle)
    for asked in ([], ["--digest", digest]):
        done = cli("verify", str(patched.bundle), *asked)
        assert (done.code, done.out.startswith(f"{name} is bytecode, and not what Python 3.")) == (1, True)
        done = ask(patched, "verify", *asked)
        assert (done.code, "planted " not in done.err, str(name) in done.out) == (1, True, True)
    shutil.copy(own, place)
    assert verified(patched.bundle).differences == []


@pytest.mark.parametrize("text", [OTHER, None], ids=["of another source", "of its own source"])
def test_bytecode_that_asks_for_no_source_is_a_difference(patched: Sandbox, text: str | None) -> None:
    """Of its own source it is harmless until that is replaced."""
    own = (patched.bundle / "sitecustomize.py").read_text()
    place = plant(patched, text or own, UNCHECKED)
    assert verified(patched.bundle).differences == [
        f"{place.relative_to(patched.bundle)} is bytecode that runs whatever its source is"
    ]
    patched.generate()
    assert (place.exists(), verified(patched.bundle).differences) == (False, [])
    assert patched.python(USE_STEP).out == PATCHED


def test_generate_removes_bytecode_of_what_it_writes_again(patched: Sandbox) -> None:
    assert patched.python(USE_STEP).out == PATCHED
    planted = cached(patched, patched.package / "sitecustomize/hook.py")
    planted.write_bytes(b"")
    assert [line for line in verified(patched.bundle).differences if planted.name in line]
    patched.generate()
    assert list(patched.bundle.rglob("*.pyc")) == []
    assert verified(patched.bundle).differences == []


def test_bytecode_of_its_source_is_none_however_it_is_checked(patched: Sandbox) -> None:
    plant(patched, (patched.bundle / "sitecustomize.py").read_text(), CHECKED)
    assert verified(patched.bundle).differences == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[:16],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[:16] + b"\xff" * 40,
        lambda data: data[:16] + b"N",
    ],
    ids=["no code", "cut off", "empty", "noise", "no code object"],
)
def test_what_is_no_bytecode_is_a_difference(patched: Sandbox, spoil: Callable[[bytes], bytes]) -> None:
    place = plant(patched, (patched.bundle / "sitecustomize.py").read_text(), CHECKED)
    place.write_bytes(spoil(place.read_bytes()))
    (found,) = verified(patched.bundle).differences
    assert found.startswith(f"{place.relative_to(patched.bundle)} is bytecode")


@pytest.mark.parametrize("version", interpreters.each(interpreters.SERVED))
@pytest.mark.parametrize("flags", [[], ["-O"], ["-OO"], ["-X", "no_debug_ranges"]], ids=" ".join)
def test_what_an_interpreter_keeps_is_no_difference_to_itself(patched: Sandbox, version: str, flags: list[str]) -> None:
    python = str(interpreters.find(version))
    assert patched.python(USE_STEP, *flags, python=python).out == PATCHED
    kept = [file for file in patched.bundle.rglob("*.pyc") if "sitecustomize" in file.parts]
    assert len(kept) > 5
    answer = json.loads(ask(patched, "verify", "--json", flags=("-B",), python=python).out)
    assert (answer["differences"], answer["not_compared"]) == ([], [])


@pytest.mark.parametrize("version", interpreters.each(("2.7", "3.6", "3.10", "3.12")))
def test_what_another_python_keeps_is_named_and_must_be_of_the_source(patched: Sandbox, cli: Cli, version: str) -> None:
    patched.python("pass", python=str(interpreters.find(version)))
    found = verified(patched.bundle)
    (kept,) = found.foreign
    assert (found.differences, Path(kept).suffix) == ([], ".pyc")
    done = cli("verify", str(patched.bundle))
    assert (done.code, "all as written" in done.out) == (0, True)
    assert done.err == f"vllm-livepatch: not compared: {kept}, bytecode of another Python; {HINT}\n"
    entry = patched.bundle / "sitecustomize.py"
    os.utime(entry, (1, 1))  # as if it had been replaced
    found = verified(patched.bundle)
    assert found.differences == [f"{kept} is bytecode of another Python, and not of this source"]
    assert found.foreign == []


HINT = "verify with that one, or remove it"


def test_other_flags_than_those_of_a_time_and_a_size_are_of_no_source() -> None:
    """Of another Python nothing else can be compared: an unchecked header has a hash in their place."""
    stamp = (5).to_bytes(4, "little") + (3).to_bytes(4, "little")
    for header, right in (
        (b"\x01\x02\r\n" + b"\0\0\0\0" + stamp, True),
        (b"\x01\x02\r\n" + b"\1\0\0\0" + stamp, False),
        (b"\x01\x02\r\n" + b"\0\0\0\0" + stamp[::-1], False),
        (b"\x01\x02\r\n" + stamp, True),  # Python 3.6
        (b"\x01\x02\r\n", False),
    ):
        assert (bytecode.wrong("x.pyc", header, b"1+1", 5) == "") == right, header


def test_numbers_of_another_sign_or_kind_are_other_code(tmp_path: Path) -> None:
    """`==` calls some of them equal."""
    file = tmp_path / "x.py"
    for one, other in (("0.0", "-0.0"), ("1", "True"), ("(1, 2)", "(1.0, 2)"), ("{'a'}", "{'b'}"), ("'a'", "b'a'")):
        sources = [f"def function():\n    return x in {value}, {value}\n".encode() for value in (one, other)]
        file.write_bytes(sources[0])
        data = Path(str(py_compile.compile(str(file), str(tmp_path / "x.pyc"), doraise=True))).read_bytes()
        assert bytecode.wrong("x.pyc", data, sources[0], 0) == ""
        assert bytecode.wrong("x.pyc", data, sources[1], 0) != "", (one, other)


def test_bytecode_in_a_zip_file_was_added(patched: Sandbox) -> None:
    """`generate` puts none there, and no interpreter does."""
    patched.python(USE_STEP)
    archive = Path(shutil.make_archive(str(patched.root / "bundle"), "zip", patched.bundle))
    found = verified(archive).differences
    files = [line for line in found if not line.endswith("/ was added")]  # folders, which `generate` names none of
    assert len(files) > 5
    assert all(line.endswith(".pyc was added") for line in files)


def test_a_link_is_a_difference(patched: Sandbox) -> None:
    outside = patched.root / "outside.py"
    names = ("sitecustomize.py", "manifest.json", str(patched.package.relative_to(patched.bundle) / "catalogue.json"))
    for name in names:
        shutil.copy(patched.bundle / name, outside)
        (patched.bundle / name).unlink()
        (patched.bundle / name).symlink_to(outside)
        assert verified(patched.bundle).differences == [f"{name} is a link"]
        assert ask(patched, "verify").code == 1
        text = outside.read_text()
        patched.generate()
        assert verified(patched.bundle).differences == []
        assert outside.read_text() == text


def test_generate_writes_to_no_place_that_a_linked_folder_leads_to(patched: Sandbox) -> None:
    for folder in (patched.package / "sitecustomize", patched.package.parent):
        outside = patched.root / f"outside-{folder.name}"
        folder.rename(outside)
        folder.symlink_to(outside)
        (file,) = outside.rglob("hook.py")
        file.write_text("own")
        assert any(line.endswith("was added") for line in verified(patched.bundle).differences)
        patched.generate()
        assert verified(patched.bundle).differences == []
        assert file.read_text() == "own"


def test_bytecode_of_the_bundle_that_lay_there_before(patched: Sandbox) -> None:
    """Unpacked with a fixed time, the entry of another bundle has the size and the time of the one before."""
    entry = patched.bundle / "sitecustomize.py"
    size = entry.stat().st_size
    os.utime(entry, (1e9, 1e9))
    assert patched.python(USE_STEP).out == PATCHED
    before = patched.package.parent.name
    patched.patch("around", title="another title")
    files = bundle.contents(patched.entries())
    assert len(files["sitecustomize.py"]) == size
    for file, data in files.items():  # as `tar` does it
        (patched.bundle / file).parent.mkdir(parents=True, exist_ok=True)
        (patched.bundle / file).write_bytes(data)
    shutil.rmtree(patched.bundle / before)
    os.utime(entry, (1e9, 1e9))
    assert patched.python(USE_STEP).out == STOCK  # the fault
    name = cached(patched, entry).relative_to(patched.bundle)
    (found,) = verified(patched.bundle).differences
    assert found.startswith(f"{name} is bytecode, and not what")
    answer = json.loads(ask(patched, "doctor", "--json").out)
    failed = {check["name"]: check["message"] for check in answer["checks"] if check["result"] == "failed"}
    assert (answer["patched"], set(failed)) == (False, {"bundle", "loaded"})
    assert f"the entry of {before}" in failed["loaded"]
    assert str(name) in failed["loaded"]
    (patched.bundle / name).unlink()
    assert json.loads(ask(patched, "doctor", "--json").out)["patched"]
    assert patched.python(USE_STEP).out == PATCHED


def test_a_program_that_is_of_another_bundle_says_what_to_remove(patched: Sandbox) -> None:
    """`python BUNDLE` is kept as bytecode, too."""
    patched.package.parent.rename(patched.bundle / "elsewhere")
    done = ask(patched, "doctor", path=[patched.site])
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("; if another one lay there before, remove its __pycache__\n")

"""wrapt's compiled forms: pinned, fetched once, and each taken by the interpreter that it is for; and the bill of all."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from vllm_livepatch.tools.bundles import bundle, catalogue, extensions, placing, sbom
from vllm_livepatch.tools.bundles.extensions import Extension
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.in_bundle.verifying import verified
from vllm_livepatch.tools.releases import registry

from tests.unit import interpreters
from tests.unit.local_index import LocalIndex, serving
from tests.unit.support import PATCHED, STEP, USE_STEP, Cli, Sandbox, finish

ROOT = Path(__file__).resolve().parents[2]
GATHERED = extensions.gathered
WRAPT = """
def wrappers(livepatch):
    from ...vendor import wrapt
    @wrapt.decorator
    def marked(wrapped, instance, args, kwargs):
        return ["compiled" if wrapt.__wrapt__._using_c_extension else "pure", *wrapped(*args, **kwargs)]
    def around(wrapped, instance, args, kwargs):
        return marked(wrapped)(*args, **kwargs)
    return dict.fromkeys(TARGETS, around)
"""


def test_every_served_interpreter_is_pinned_on_both_machines() -> None:
    version, pinned = extensions.pinned()
    assert {(one.python, one.arch) for one in pinned} == {
        (python, arch) for python in interpreters.SERVED for arch in ("x86_64", "aarch64")
    }
    for one in pinned:
        tag = f"cp{one.python.replace('.', '')}"
        assert one.wheel.startswith(f"wrapt-{version}-{tag}-{tag}-manylinux")
        assert one.file == f"_wrappers.cpython-{tag[2:]}-{one.arch}-linux-gnu.so"
    assert len({one.sha256 for one in pinned} | {one.wheel_sha256 for one in pinned}) == 2 * len(pinned)
    assert version == metadata.version("wrapt")
    assert f'"wrapt=={version}"' in (ROOT / "pyproject.toml").read_text("utf-8")


def test_what_is_asked_for() -> None:
    assert len(extensions.chosen()) == 10
    assert [one.what_for for one in extensions.chosen(["3.12"], ["arm64"])] == ["3.12 aarch64"]
    assert len(extensions.chosen(["3.12", "3.13"])) == 4
    assert len(extensions.chosen((), ["x86-64"])) == 5
    for arguments, message in (
        ((["3.9"], []), "--python 3.9: a bundle is for 3.10, "),
        (([], ["mips"]), "--arch mips: "),
    ):
        with pytest.raises(UserError, match=message):
            extensions.chosen(*arguments)


# From the registry


def offer(index: LocalIndex, python: str, content: bytes, platform: str = "x86_64") -> Extension:
    """A wheel on the index, as wrapt's are."""
    name = f"wrapt-{metadata.version('wrapt')}-cp{python.replace('.', '')}-none-linux_{platform}.whl"
    file = f"_wrappers.test-{python}-{platform}.so"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("wrapt/__init__.py", "raise SystemExit('executed')")
        archive.writestr(f"wrapt/{file}", content)
    digest = index.add("wrapt", name, buffer.getvalue())
    return Extension(python, platform, name, digest, file, hashlib.sha256(content).hexdigest())


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalIndex]:
    """A local index, and an empty cache."""
    with serving(LocalIndex()) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        yield index


def test_they_are_fetched_once(index: LocalIndex) -> None:
    wanted = [offer(index, python, python.encode()) for python in ("3.11", "3.10")]
    notices: list[str] = []
    found = extensions.gathered(wanted, notices.append)
    assert found == {wanted[1].file: b"3.10", wanted[0].file: b"3.11"}
    assert list(found) == sorted(found)
    assert notices == ["fetching wrapt's compiled form, 2 files, once"]
    asked = index.requests
    assert extensions.gathered(wanted, notices.append) == found
    assert (index.requests, len(notices)) == (asked, 1)


def test_a_damaged_file_of_the_cache_is_fetched_again(index: LocalIndex, tmp_path: Path) -> None:
    wanted = [offer(index, "3.10", b"right")]
    extensions.gathered(wanted, lambda line: None)
    (kept,) = (tmp_path / "cache").rglob("*.so")
    kept.write_bytes(b"wrong")
    assert extensions.gathered(wanted, lambda line: None) == {wanted[0].file: b"right"}
    assert kept.read_bytes() == b"right"


@pytest.mark.parametrize("fault", ["another wheel", "another file in it", "not there", "no network", "another wrapt"])
def test_what_cannot_be_had_is_left_out_and_named(
    index: LocalIndex, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    good, bad = offer(index, "3.10", b"good"), offer(index, "3.11", b"bad")
    message, lacking = "", "3.11 x86_64"
    if fault == "another wheel":
        index.files["wrapt"][bad.wheel] = index.files["wrapt"][bad.wheel] + b" "
        message = f"the registry's {bad.wheel} is damaged"
    elif fault == "another file in it":
        bad = Extension(bad.python, bad.arch, bad.wheel, bad.wheel_sha256, bad.file, "0" * 64)
        message = f"{bad.file} in {bad.wheel} is not the pinned one"
    elif fault == "not there":
        del index.files["wrapt"][bad.wheel]
        message = f"{bad.wheel} is not in the registry"
    elif fault == "no network":
        monkeypatch.setattr(registry, "Retry", lambda **_: 0)
        monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple/")
        message, lacking = (
            "the registry at 127.0.0.1 cannot be reached; is there a network?",
            "3.10 x86_64, 3.11 x86_64",
        )
    else:
        extensions.gathered([good, bad], lambda line: None)  # they are in the cache, and do not fit
        monkeypatch.setattr(metadata, "version", lambda name: "2.0.0")
        message, lacking = (
            f"wrapt 2.0.0 is installed here, and {extensions.pinned()[0]} is pinned",
            "3.10 x86_64, 3.11 x86_64",
        )
    notices: list[str] = []
    found = extensions.gathered([good, bad], notices.append)
    assert found == ({good.file: b"good"} if lacking == "3.11 x86_64" else {})
    assert notices[-1].startswith(f"wrapt's compiled form is missing for {lacking} ({message}")
    assert "its digest is another" in notices[-1]
    assert "secret" not in "".join(notices)


def test_the_installed_one_is_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = [
        one
        for one in extensions.chosen()
        if one.what_for == f"{sys.version_info[0]}.{sys.version_info[1]} {os.uname().machine}"
    ]
    assert list(extensions.at_hand(here)) == [one.file for one in here]
    assert len(here) == 1


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("from ...vendor import wrapt", True),
        ("def wrappers(livepatch):\n    from ...vendor.wrapt import FunctionWrapper", True),
        ("import wrapt as w", True),
        ("from ... import vendor\nwrapt = vendor.wrapt", True),
        ("import pkgutil\nf = pkgutil.resolve_name('_vllm_livepatch.vendor.wrapt:decorator')", True),
        ("import importlib\nlibrary = importlib.import_module('...vendor.wrapt', __package__)", True),
        ("def wrappers(livepatch): return {'m:f': livepatch.wrapt(print)}", True),
        ('"""As wrapt does it."""\n# import wrapt\nwrapt = 1', False),
        ("import wrapt is what this does not parse as", True),
    ],
)
def test_what_asks_for_wrapt(sandbox: Sandbox, code: str, asks: bool) -> None:
    sandbox.patch(code="def wrappers(livepatch): return {}")
    (sandbox.patches / "around" / "more.py").write_text(code)
    assert bundle.asks_for_wrapt(sandbox.entries()) is asks


def test_a_bundle_without_wrapt(patched: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "gathered", GATHERED)
    arguments = ["generate", "--out", str(patched.bundle), "--patch-dir", str(patched.patches), "--patch", "around"]
    done = cli(*arguments, "--python", "3.12")
    assert (done.code, done.lines) == (
        0,
        ["vllm-livepatch: no patch asks for wrapt: --python and --arch change nothing"],
    )
    patched.python(USE_STEP)
    assert patched.report()["wrapt"] == "none"


def test_generate_puts_in_what_is_asked_for_and_says_what_is_missing(
    sandbox: Sandbox, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = sandbox
    sandbox.patch("around", [STEP], WRAPT)
    one = extensions.chosen(["3.12"], ["aarch64"])[0]
    monkeypatch.setattr(extensions, "gathered", GATHERED)
    monkeypatch.setattr(extensions, "_fetched", lambda wanted: ({one.file: b"compiled"}, "no such wheel"))
    arguments = ["generate", "--out", str(patched.bundle), "--patch-dir", str(patched.patches), "--patch", "around"]
    done = cli(*arguments, "--python", "3.12", "--arch", "aarch64")
    assert done.code == 0, done.err
    assert done.err == "vllm-livepatch: fetching wrapt's compiled form, 1 files, once\n"
    assert (patched.bundle / json.loads((patched.bundle / "manifest.json").read_bytes())["generation"]).is_dir()
    manifest = json.loads((patched.bundle / "manifest.json").read_bytes())
    assert manifest["extensions"] == [one.file]
    place = f"{manifest['generation']}/_vllm_livepatch/vendor/wrapt/{one.file}"
    assert (patched.bundle / place).read_bytes() == b"compiled"
    digest = verified(patched.bundle).digest
    assert f"\n  {digest}\n" in done.out
    assert cli("verify", str(patched.bundle), "--digest", digest).code == 0
    done = cli("verify", str(patched.bundle), "--digest", f"sha256:{'0' * 64}")
    assert (done.code, done.out) == (1, f"the bundle's digest is {digest}, not sha256:{'0' * 64}\n")
    done = cli(*arguments, "--python", "3.12", "--arch", "x86_64", "--arch", "aarch64")
    assert done.code == 0
    assert "is missing for 3.12 x86_64 (no such wheel): the bundle is whole without" in done.err


# In a process


def test_a_patch_gets_the_form_that_the_report_names(sandbox: Sandbox) -> None:
    sandbox.patch("around", [STEP], WRAPT)
    files = bundle.contents(sandbox.entries(), extensions.at_hand(extensions.chosen()))
    archive = sandbox.root / "livepatch.zip"
    placing.write_zip(files, archive)
    placing.write_directory(files, sandbox.bundle)
    zipped = os.pathsep.join(map(str, (archive, sandbox.site)))
    forms: dict[str, dict[str, str]] = {
        "compiled": {},
        "pure": {"WRAPT_DISABLE_EXTENSIONS": "1"},
        "pure from the zip": {"PYTHONPATH": zipped},
        "pure where there is none": {},
    }
    for number, (form, environ) in enumerate(forms.items()):
        if form.endswith("none"):
            sandbox.generate()
        state = sandbox.root / str(number)
        loaded = "import sys; print('_vllm_livepatch.vendor.wrapt._wrappers' in sys.modules)"
        done = sandbox.python(f"{USE_STEP}\n{loaded}", LIVEPATCH_STATE_DIR=str(state), **environ)
        (report,) = (json.loads(file.read_text("ascii")) for file in state.glob("*.json"))
        shown = form.split()[0]
        expected = f"['{shown}', 7]\n{shown == 'compiled'}\n"  # one that is turned off is not even loaded
        assert (done.out, report["wrapt"]) == (expected, shown), done.err


def test_nobody_elses_wrapt_is_touched(sandbox: Sandbox) -> None:
    """Not one that was imported before, nor one that is imported later; and ours takes nothing from it."""
    theirs = {"wrapt/__init__.py": "from . import exceptions\n", "wrapt/exceptions.py": "whose = 'theirs'\n"}
    sandbox.write(theirs)  # an old one: what ours wants of it is not there
    sandbox.patch("around", [STEP], WRAPT)
    placing.write_directory(bundle.contents(sandbox.entries(), extensions.at_hand(extensions.chosen())), sandbox.bundle)
    show = "import sys, wrapt\nprint(sys.modules['wrapt.exceptions'].whose, wrapt.exceptions.whose)"
    ours = "from _vllm_livepatch.vendor import wrapt as ours; print(ours.exceptions.__name__)"
    for before in ("", f"{show}\n"):
        done = sandbox.python(f"{before}{USE_STEP}\n{show}\n{ours}")
        expected = "['compiled', 7]\ntheirs theirs\n_vllm_livepatch.vendor.wrapt.exceptions\n"
        assert done.out == ("theirs theirs\n" if before else "") + expected, done.err


def test_no_process_loads_wrapt_that_no_patch_asks_for(patched: Sandbox) -> None:
    code = f"{USE_STEP}\nimport sys; print([name for name in sys.modules if 'wrapt' in name])"
    assert patched.python(code).out == f"{PATCHED}[]\n"


# The same bytes wherever it is made; and the bill

DIGEST = """
import sys
try:
    import tomllib
except ImportError:  # what the tools need of it on 3.10 comes with pip, too
    from pip._vendor import tomli
    sys.modules["tomli"] = tomli
from vllm_livepatch.tools.bundles import bundle, catalogue
print(bundle.digest(bundle.contents(catalogue.load(), {"_wrappers.one.so": b"1", "_wrappers.two.so": b"2"})))
"""


def test_one_digest_on_every_interpreter(tmp_path: Path) -> None:
    """The rooms as a tree of links: another interpreter knows nothing of how this one has them installed."""
    (tmp_path / "vllm_livepatch").mkdir()
    for room in ("patches", "sitecustomize", "tools"):
        (tmp_path / "vllm_livepatch" / room).symlink_to(ROOT / room)
    installed = Path(str(metadata.distribution("wrapt").locate_file("")))
    found: dict[str, str] = {}
    for turn, version in enumerate(interpreters.found(interpreters.SERVED)):
        environ = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, installed))),
            "PYTHONHASHSEED": str(turn),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TZ": ("UTC", "Pacific/Kiritimati")[turn % 2],
            "LC_ALL": ("C", "C.UTF-8")[turn % 2],
        }
        done = finish([str(interpreters.find(version)), "-c", DIGEST], environ, cwd=tmp_path)
        assert done.code == 0, done.err
        found[version] = done.out.strip()
    entries = catalogue.load()
    expected = bundle.digest(bundle.contents(entries, {"_wrappers.two.so": b"2", "_wrappers.one.so": b"1"}))
    assert found == dict.fromkeys(found, expected)
    assert bundle.digest(bundle.contents(entries, {"_wrappers.one.so": b"1"})) != expected


def test_the_bill_of_materials_is_one_and_lists_all(tmp_path: Path) -> None:
    entries = catalogue.load()
    files = bundle.contents(entries, {"_wrappers.one.so": b"1"})
    text = files[sbom.SBOM].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    found = {part["name"]: part for part in document["components"]}
    assert set(found) == {"wrapt", *entries}
    assert found["wrapt"]["version"] == metadata.version("wrapt")
    assert found["wrapt"]["components"][0]["hashes"][0]["content"] == hashlib.sha256(b"1").hexdigest()
    assert document["metadata"]["component"]["version"] == bundle.version()
    assert "timestamp" not in document["metadata"]
    other = json.loads(bundle.contents(entries)[sbom.SBOM])
    assert {part["name"] for part in other["components"]} == set(entries)
    assert other["serialNumber"] != document["serialNumber"]
    assert json.loads(files["manifest.json"])["files"][sbom.SBOM] == hashlib.sha256(text.encode()).hexdigest()


def test_the_digest_can_be_signed_with_what_people_have(patched: Sandbox, tmp_path: Path) -> None:
    """As docs/bundle.md says, by ssh-keygen, which most machines have."""
    key, manifest = tmp_path / "key", patched.bundle / "manifest.json"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "release", "-f", str(key)], check=True)
    (tmp_path / "signers").write_text(f"release {(tmp_path / 'key.pub').read_text()}")
    content = manifest.read_bytes()
    sign = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", "vllm-livepatch"]
    signature = subprocess.run(sign, input=content, capture_output=True, check=True).stdout
    (tmp_path / "signature").write_bytes(signature)
    check = [
        "ssh-keygen",
        "-q",
        "-Y",
        "verify",
        "-f",
        str(tmp_path / "signers"),
        "-I",
        "release",
        "-n",
        "vllm-livepatch",
    ]
    check += ["-s", str(tmp_path / "signature")]
    assert subprocess.run(check, input=content, capture_output=True, check=False).returncode == 0
    assert subprocess.run(check, input=content + b" ", capture_output=True, check=False).returncode != 0

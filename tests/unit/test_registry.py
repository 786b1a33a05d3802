"""The registry's answers, and the pins."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename
from packaging.version import Version
from vllm_livepatch.tools.releases import registry
from vllm_livepatch.tools.releases.registry import Pin, RegistryError

from tests.unit.local_index import LocalIndex, serving

WHEEL = "vllm-1.0-cp38-abi3-manylinux_2_28_x86_64.whl"
REBUILT = "vllm-1.0-2-cp38-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalIndex]:
    """A local index that offers vllm 1.0, no release of which is pinned."""
    with serving(LocalIndex()) as index:
        index.add("vllm", WHEEL, b"wheel")
        index.add("vllm", WHEEL.replace("x86_64", "aarch64"), b"other")
        index.add("vllm", "vllm-1.0.tar.gz", b"source")
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        monkeypatch.setattr(registry, "all_pins", lambda package: ())
        yield index


def refusal(package: str = "vllm", version: str = "1.0") -> str:
    """Return the message with which a look-up fails: one line, without the index's password."""
    with pytest.raises(RegistryError) as caught:
        registry.find_wheel(package, version)
    message = str(caught.value)
    assert "\n" not in message
    assert "secret" not in message
    return message


def pin_as(monkeypatch: pytest.MonkeyPatch, sha256: str, wheel: str = WHEEL) -> None:
    """Pin vllm 1.0."""
    pins = (Pin("vllm", "1.0", wheel, sha256, ""),)
    monkeypatch.setattr(registry, "all_pins", lambda package: pins)


def test_wheel_for_x86_64_is_found(index: LocalIndex) -> None:
    wheel = registry.find_wheel("vllm", "1.0")
    assert (wheel.package, wheel.version, wheel.name, wheel.yanked) == ("vllm", "1.0", WHEEL, False)
    assert wheel.url.endswith(f"/files/vllm/{WHEEL}")
    assert re.fullmatch("[0-9a-f]{64}", wheel.sha256)


def test_version_is_compared_as_a_version(index: LocalIndex) -> None:
    assert registry.find_wheel("vllm", "1.0.0").name == WHEEL


def test_latest_build_wins_unless_yanked(index: LocalIndex) -> None:
    index.add("vllm", REBUILT, b"rebuilt")
    assert registry.find_wheel("vllm", "1.0").name == REBUILT
    index.yanked.add(REBUILT)
    assert registry.find_wheel("vllm", "1.0").name == WHEEL


def test_yanked_is_named(index: LocalIndex) -> None:
    index.yanked.add(WHEEL)
    assert registry.find_wheel("vllm", "1.0").yanked


def test_pinned_wheel_wins_over_a_later_build(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_as(monkeypatch, index.add("vllm", WHEEL, b"wheel"))
    index.add("vllm", REBUILT, b"rebuilt")
    assert registry.find_wheel("vllm", "1.0").name == WHEEL


def test_pinned_wheel_that_changed_is_refused(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_as(monkeypatch, "0" * 64)
    assert "is not the pinned 000" in refusal()


def test_pinned_wheel_that_is_gone_is_named(index: LocalIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    pin_as(monkeypatch, "0" * 64, REBUILT)
    assert f"the pinned wheel {REBUILT} is not in the registry" in refusal()


def test_unknown_package(index: LocalIndex) -> None:
    assert refusal("vlm") == "the registry has no package named vlm"


def test_unknown_version_names_the_newest(index: LocalIndex) -> None:
    index.add("vllm", "vllm-2.0rc1-py3-none-any.whl", b"candidate")
    assert refusal(version="9.9") == "vllm 9.9 is not in the registry; the newest there is 1.0"


def test_release_without_wheel(index: LocalIndex) -> None:
    index.add("vllm", "vllm-1.1.tar.gz", b"source")
    assert refusal(version="1.1") == "vllm 1.1 has no wheel for x86_64 in the registry, only vllm-1.1.tar.gz"


def test_registry_that_refuses(index: LocalIndex) -> None:
    index.status = 403
    assert refusal() == "the registry at 127.0.0.1 answered 403"


def test_registry_that_stays_busy(index: LocalIndex) -> None:
    index.status = 503
    assert refusal().startswith("the registry ")
    assert index.requests > 1


def test_something_else_in_the_registrys_place(index: LocalIndex) -> None:
    index.content_type = "image/png"
    assert refusal() == "the registry at 127.0.0.1 answered with something that is no package index"


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(LocalIndex()) as index:
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
    assert refusal() == "the registry at 127.0.0.1 cannot be reached; is there a network?"


@pytest.mark.parametrize("package", ["vllm", "lmcache"])
def test_pins_are_sound(package: str) -> None:
    pins = registry.pins(package)
    versions = [Version(pin.version) for pin in pins]
    assert versions == sorted(set(versions))
    for pin in pins:
        name, version, _, _ = parse_wheel_filename(pin.wheel)
        assert (name, version) == (package, Version(pin.version))
        assert re.fullmatch("[0-9a-f]{64}", pin.sha256)
        assert re.fullmatch("[0-9a-f]{64}", pin.sources_sha256)
        assert registry.pin(package, pin.version) == pin


def test_release_that_nobody_pinned() -> None:
    assert registry.pin("vllm", "0.0.1") is None


def test_of_pips_files_the_last_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pip has it: the machine's, the user's, the environment's, the file that is named."""
    files = {
        "user": tmp_path / "home/.pip/pip.conf",
        "config": tmp_path / "config/pip/pip.conf",
        "environment": tmp_path / "prefix/pip.conf",
        "named": tmp_path / "named.conf",
    }
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(files["named"]))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    for name, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"[global]\nindex-url = http://{name}.example/simple\n")
        assert registry.endpoints() == (f"http://{name}.example/simple",)
    files["user"].write_text("[install]\nindex-url = http://install.example/simple\n")
    assert registry.endpoints() == ("http://install.example/simple",), "pip's own section beats [global] of any file"

"""Blocks between the paged cache and LMCache's chunks: the operation on random layouts, and in each release's server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import executed
import interpreter
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from vllm_livepatch.tools.releases import registry

PATCH = "mp-block-transfer"
TRANSFER = Path(__file__).parents[2] / "patches" / "mp_block_transfer" / "transfer.py"
NEEDED = ["0.4.3", "0.4.4", "0.4.5", "0.4.6"]
OLDER = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) < Version("0.4.3")]
NEWER = [pin.version for pin in registry.pins("lmcache") if Version(pin.version) > Version("0.4.6")]
FORMS = ["mla", "nhd", "hnd", "infer", "infer hnd"]
LACKING = {
    "0.4.3": "module 'lmcache.c_ops' has no attribute 'PageBufferShapeDesc'",
    "0.4.4": "module 'lmcache.non_cuda_equivalents' has no attribute 'PageBufferShapeDesc'",
    "0.4.6": "module 'lmcache.python_ops_fallback' has no attribute 'record_completion_on_stream'",
}
FORMATS = {  # whether there may be room between blocks, and whether there are heads
    "NB_NL_TWO_BS_NH_HS": (True, True),
    "NB_NL_TWO_NH_BS_HS": (True, True),
    "NL_X_TWO_NB_BS_NH_HS": (False, True),
    "NL_X_TWO_NB_NH_BS_HS": (False, True),
    "NL_X_NB_TWO_BS_NH_HS": (True, True),
    "NL_X_NB_TWO_NH_BS_HS": (True, True),
    "NL_X_NB_BS_HS": (True, False),
    "NL_X_NBBS_ONE_HS": (False, False),
    "TWO_X_NL_X_NBBS_NH_HS": (False, True),
    "TWO_X_NL_X_NB_BS_NH_HS": (True, True),
}


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A cache, where it and the chunks lie in memory, and which blocks are moved."""
    kv_format = draw(st.sampled_from(sorted(FORMATS)))
    padded, heads = FORMATS[kv_format]
    blocks = draw(st.integers(1, 9))
    per = draw(st.integers(1, min(3, blocks)))
    ids = draw(st.permutations(range(blocks)))[: per * draw(st.integers(1, blocks // per))]
    element = draw(st.sampled_from([1, 2, 4]))
    return {
        "format": kv_format,
        "nl": draw(st.integers(1, 4)),
        "nb": blocks,
        "bs": draw(st.integers(1, 4)),
        "nh": draw(st.integers(1, 4)) if heads else 1,
        "hs": draw(st.integers(1, 20) | st.sampled_from([16, 32])),
        "element": element,
        "padding": draw(st.sampled_from([0, 1, 3])) if padded else 0,
        "ids": ids,
        "per": per,
        "skip": draw(st.integers(0, len(ids))),
        "gap": draw(st.sampled_from([0, element, 16])),
        "shuffled": draw(st.booleans()),
        "offset": draw(st.sampled_from([0, element])),
        "seed": draw(st.integers(0, 9999)),
    }


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(cases(), min_size=40, max_size=40))
def test_random_layouts(
    warm: interpreter.Interpreter, tmp_path_factory: pytest.TempPathFactory, drawn: list[dict[str, Any]]
) -> None:
    """Every byte of memory is what a plain loop makes it: both directions, and there and back."""
    work = tmp_path_factory.mktemp("layouts")
    file = work / "cases.json"
    file.write_text(json.dumps(drawn), encoding="utf-8")
    result = warm.run("block_transfer", {}, work, arguments=[str(TRANSFER), str(file)])
    assert result["wrong"] == [[]] * len(drawn)


@pytest.mark.parametrize("kv_format", ["NL_X_NB_BS_HS", "NL_X_TWO_NB_NH_BS_HS", "NB_NL_TWO_BS_NH_HS"])
def test_what_cannot_be_done(kv_format: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """It is an error that says what is wrong, and no byte is written."""
    case = {"format": kv_format, "nl": 2, "nb": 5, "bs": 2, "nh": 1, "hs": 8, "element": 2, "padding": 0}
    case |= {"ids": [3, 1, 4, 0], "per": 2, "skip": 1, "gap": 16, "shuffled": False, "offset": 0, "seed": 1}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([case]), encoding="utf-8")
    errors = warm.run("block_transfer", {}, tmp_path, arguments=[str(TRANSFER), str(file)])["refused"]
    assert len(errors) == 15
    for name, message in errors.items():
        assert re.fullmatch(r"multi_layer_block_kv_transfer: .+; nothing was written", message), f"{name}: {message}"
    assert "block 5 is none of the cache's 5" in errors["block too high"]
    assert "block -1 is none of the cache's 5" in errors["block below 0"]
    assert "3 block ids for 2 chunks of 2 blocks" in errors["too few blocks"]
    assert "NL_X_NB_NH_BS_TWO_HS is not known" in errors["format"]


@pytest.mark.parametrize("release", executed.first(NEEDED))
def test_stock(release: str, warm: interpreter.Interpreter, tmp_path: Path) -> None:
    """No chunk comes back in any layout. On 0.4.5 a store says that it went well, and nothing was copied."""
    result = warm.run("block_transfer_server", {"lmcache": release}, tmp_path)
    for form in FORMS:
        found = result["forms"][form]
        if release == "0.4.5":
            assert found["stored"], "said to be stored"
            assert (found["loaded"], found["same"]) == (False, False)
            assert found["finished"] == ["6 written"]
            assert "has no attribute 'multi_layer_block_kv_transfer'" in (tmp_path / "stderr").read_text("utf-8")
        else:
            assert found == f"AttributeError: {LACKING[release]}"


@pytest.mark.parametrize("release", executed.first(NEEDED))
def test_patched(release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path) -> None:
    """What was stored comes back into other blocks, all but the skipped one, and no other block is touched."""
    result = warm.run("block_transfer_server", {"lmcache": release}, tmp_path, bundle=bundle)
    for form in FORMS:
        assert result["forms"][form] == {
            "stored": True,
            "loaded": True,
            "objects": 6,
            "same": True,
            "untouched": True,
            "finished": ["6 written", "6 read"],
        }, form
    assert result["wrong_block"]["cache_untouched"]
    assert [message.partition("; ")[0] for message in result["wrong_block"]["errors"]] == [
        "ValueError: multi_layer_block_kv_transfer: block 64 is none of the cache's 64",
        "ValueError: multi_layer_block_kv_transfer: block 71 is none of the cache's 64",
    ]
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"]) == ("applied", "needed"), patch
    # 6 chunks are stored one by one and loaded in batches of 4, in each form; then one chunk, with a block that is none.
    assert patch["counters"] == {"contexts": 6, "to_chunks": 31, "to_cache": 10}


@pytest.mark.parametrize("release", executed.chosen(OLDER[-1:], OLDER))
def test_older_releases_move_no_blocks(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """They move slots, by another operation, and the patch leaves them alone."""
    result = warm.run("block_transfer_server", {"lmcache": release}, tmp_path, bundle=bundle)
    assert result["asked"] == ["multi_layer_kv_transfer"]
    assert [result["forms"][form]["finished"] for form in FORMS] == [["6 written", "6 read"]] * 5
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["counters"]) == ("skipped", "not-present", {}), patch


@pytest.mark.parametrize("release", executed.ends(NEWER))
def test_newer_releases_take_chunks_to_be_in_cpu_memory(
    release: str, warm: interpreter.Interpreter, bundle: Path, tmp_path: Path
) -> None:
    """Their own operation reads the cache's addresses on the device that it is given, and the chunks' on the CPU.

    Their MP server gives it a staging buffer on the device for chunks. What comes of that, only a device shows.
    """
    result = warm.run("block_transfer_addresses", {"lmcache": release}, tmp_path, bundle=bundle)
    assert result["asked"] == [["cache", "cuda:0"], ["chunk", "cpu"]] * 2
    patch = interpreter.reported(tmp_path, PATCH)
    assert (patch["state"], patch["verdict"], patch["counters"]) == ("skipped", "fixed-upstream", {}), patch

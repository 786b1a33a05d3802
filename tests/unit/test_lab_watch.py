"""What is said of an engine's held blocks, from samples; a topology's settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_livepatch.tools.errors import UserError
from vllm_livepatch.tools.lab import topology
from vllm_livepatch.tools.lab.tally import Tally
from vllm_livepatch.tools.lab.watch import Sample, Watch, held


def test_blocks_are_held_only_while_nobody_is_served() -> None:
    served = [Sample(0.0, 0.5, 3, 0.9), Sample(1.0, 0.5, 1, 0.9)]
    alone = [Sample(2.0, 0.25, 0, 1.0), Sample(4.0, 0.25, 0, 0.8), Sample(5.0, 0.125, 0, 0.5)]
    empty = [Sample(6.0, 0.0, 0, 0.1), Sample(8.0, 0.0, 0, 0.02)]
    found = held(served + alone + empty)
    assert found["seconds"] == 3.0, "from 2 to 5: what lies between two kinds of sample is neither"
    assert (found["share"], found["last"]) == (0.25, 5.0)
    assert found["cores_then"] == pytest.approx((0.8 * 2 + 0.5 * 1) / 3, abs=1e-3)
    assert found["cores_else"] == 0.02


def test_an_engine_that_holds_nothing_says_so() -> None:
    assert held([Sample(0.0, 0.5, 1, 0.9), Sample(1.0, 0.5, 1, 0.9)]) == {
        "seconds": 0,
        "share": 0.0,
        "last": None,
        "cores_then": None,
        "cores_else": None,
    }


def test_what_is_loaded_again_was_asked_for_after_the_return() -> None:
    watch = Watch({"engine": "", "other": ""}, list, Tally())
    assert watch.loaded_again(0.0) is None
    watch.samples["engine"] = [
        Sample(float(at), 0.0, 0, 0.0, loaded) for at, loaded in enumerate((0, 64, 64, 128, 128, 192))
    ]
    watch.samples["other"] = [Sample(float(at), 0.0, 0, 0.0) for at in range(6)]
    assert watch.loaded_again(0.5) == 2.5, "what comes within the sample of the return may have been asked for before"
    assert watch.loaded_again(3.0) == 2.0
    assert watch.loaded_again(4.5) is None


def test_a_setting_reaches_every_engine_as_a_number(tmp_path: Path) -> None:
    described = topology.set_up(topology.load("pd-nixl"), ["lease=6", "others_seats=1"])
    deployed = topology.local(described, tmp_path / "bin/python", tmp_path / "model", {})
    engines = {part.name: list(part.command) for part in deployed.parts if part.name != "router"}
    assert set(engines) == {"prefill", "decode", "other"}
    for command in engines.values():
        config = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert config["kv_connector_extra_config"] == {"kv_lease_duration": 6}
    assert engines["other"][engines["other"].index("--max-num-seqs") + 1] == "1"


@pytest.mark.parametrize("text", ["lease", "lease=", "lease=x", "lease=-1", "seats=1", ""])
def test_another_setting_is_an_error_that_names_those_there_are(text: str) -> None:
    with pytest.raises(UserError, match="settings of pd-nixl are: lease=30, prefill_blocks=16384, others_seats=128"):
        topology.set_up(topology.load("pd-nixl"), [text])

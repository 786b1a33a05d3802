"""Faults that somebody might build into our patches: each is a text of a bundle and what stands there instead.

A set of worlds that lets one of them pass looks at too little.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

STALE = "_vllm_livepatch/patches/stale_finished_recving/wrappers.py"
LOADS = "_vllm_livepatch/patches/failed_loads/wrappers.py"
LOSSES = "_vllm_livepatch/patches/failed_loads/losses.py"
LIVELOCK = "_vllm_livepatch/patches/preemption_livelock/wrappers.py"


@dataclass(frozen=True)
class Mutant:
    """One substitution in one file of a bundle."""

    name: str
    old: str
    new: str
    file: str = STALE
    release: str = "0.33.0"
    """One that shows it."""

    @property
    def losses(self) -> bool:
        """Whether the worlds of losses.py are to find it, and not those of plan.py."""
        return self.file != STALE

    def make(self, bundle: Path, directory: Path) -> Path:
        """A copy of the bundle with the fault in it."""
        made = directory / self.name
        shutil.copytree(bundle, made, ignore=shutil.ignore_patterns("__pycache__"))
        (file,) = made.glob(f"*/{self.file}")
        text = file.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.name}: the text to be replaced is there {text.count(self.old)} times"
        file.write_text(text.replace(self.old, self.new), encoding="utf-8")
        return made


MUTANTS = (
    Mutant("frees-at-send", "if not one.receive and (one.empty_send or not one.send)}", "if not one.send}"),
    Mutant("frees-at-either", "if not one.receive and (one.empty_send or not one.send)}", "}"),
    Mutant("never-hears-receives", "one.receive = False", "pass"),
    Mutant("never-hears-sends", "one.send = False", "pass"),
    Mutant("frees-at-receive", "if not one.receive and (one.empty_send or not one.send)}", "if not one.receive}"),
    Mutant(
        "every-send-empty",
        "Held(request, receives, bool(announced), empty)",
        "Held(request, receives, bool(announced), True)",
    ),
    Mutant("no-receive-noted", "ledger.receiving.add(request_id)", "pass"),
    Mutant("no-send-noted", "Held(request, receives, bool(announced), empty)", "Held(request, receives, False, empty)"),
    Mutant("drops-ready", "found.ready.add(request_id)\n            elif held", "pass\n            elif held"),
    Mutant(
        "no-parking",
        "ledger.parked.setdefault(request.request_id, []).append(request)",
        "return original(request, *rest, **named)",
    ),
    Mutant(
        "parked-not-aborted",
        "gone += [ledger.parked.pop(request_id) for request_id in ids if request_id in ledger.parked]",
        "gone += []",
    ),
    Mutant(
        "release-decides",
        "True, params\n        return announced",
        "announced, params\n        return announced",
        release="0.15.1",
    ),
    Mutant("never-forgets", "del ledger.held[request.request_id]", "pass"),
    # In what comes before the wrappers.
    Mutant("no-send-noted-there", "Held(request, False, True, False)", "Held(request, False, False, False)"),
    Mutant("never-hears-sends-there", "held[request_id].send = False", "pass"),
    Mutant("frees-at-send-there", "if one is None or one.receive or not one.send", "if one is None or not one.send"),
    Mutant("any-receive-there", "if request.status != type(request.status).WAITING_FOR_REMOTE_KVS:", "if False:"),
    Mutant("used-ids-let-in-there", "not (ledger.parked or request.request_id in ledger.held)", "True"),
    Mutant("never-forgets-there", "ledger.held.pop(request_id, None)", "pass"),
    Mutant("receives-not-noted-there", "                or ledger.receiving\n", ""),
    # In what becomes of failed loads, and of a pool that is full.
    Mutant("lost-blocks-stay-cached", "scheduler.kv_cache_manager.evict_blocks(found)", "pass", LOADS),
    Mutant("nothing-withheld", "loads.withhold(request.request_id, loads.steps)", "pass", LOADS),
    Mutant(
        "who-has-gone-not-looked-at",
        "self.under_way = [loads.answering, *loads.steps]",
        "self.under_way = [None]",
        LOADS,
    ),
    Mutant(
        "who-began-in-the-step-ahead-not-looked-at",
        "self.under_way = [loads.answering, *loads.steps]",
        "self.under_way = [loads.answering]",
        LOADS,
    ),
    Mutant("asked-again", "setattr(request, LOST, 0)", "pass", LOADS),
    Mutant(
        "only-what-was-reported", "lost.update(block for block in blocks[first // size :] if block)", "pass", LOSSES
    ),
    Mutant("one-group-only", "several = len(lost.sizes) > 1", "several = False", LOADS, "0.29.0"),
    Mutant("still-counted-as-under-way", "request.num_output_placeholders = 0", "pass", LOADS, "0.21.0"),
    Mutant("not-set-back", "for request in reversed(lost.running):", "for request in ():", LOADS),
    Mutant(
        "spares-nobody", "if victim.last_sched_seq > scheduler.processed_step_seq:", "if False:", LIVELOCK, "0.29.0"
    ),
    Mutant(
        "spared-for-ever",
        "scheduler.running, spared.running, spared.request = spared.running, [], None",
        "pass",
        LIVELOCK,
        "0.29.0",
    ),
)

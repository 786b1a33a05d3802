"""Which loads are played, of which size: the short form of CI's, and the long one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Job = dict[str, Any]

LIFE = 1_000_000
"""Requests of a long life."""
FEW = 300
"""Up to so many requests clients hang up beside LMCache, too. In long lives stock ends by it: seen with 2,500, on 0.33.0."""
DEFAULT = {"LIVEPATCH_MOONCAKE_FAILED_LOADS": "auto", "LIVEPATCH_NIXL_PUSH_FAILURES": "auto"}
"""The release tests' interpreters turn these on; a default bundle has them as it has them."""
IDS_KEPT = {**DEFAULT, "LIVEPATCH_STABLE_REQUEST_IDS": "on"}
"""Never on by itself, and asked for by many: requests are named by their clients then, and names come again."""
PUSH = {**DEFAULT, "LIVEPATCH_NIXL_PUSH_FAILURES": "on"}
MOONCAKE = {**DEFAULT, "LIVEPATCH_MOONCAKE_FAILED_LOADS": "on", "LIVEPATCH_MOONCAKE_LAYERWISE": "on"}


@dataclass
class Group:
    """Loads of one process, and what is set for it."""

    environ: Mapping[str, str] = field(default_factory=dict)
    jobs: Sequence[Job] = ()


def job(name: str, load: str, **sizes: Any) -> Job:
    """One load: its name in the report, the function, and its arguments."""
    return {"name": name, "load": load, **sizes}


def lives(requests: int) -> list[Job]:
    """Lives of so many requests each."""
    given: list[tuple[str, dict[str, Any]]] = [
        ("life", {"lmcache": False}),
        ("life, sessions", {"lmcache": False, "sessions": True}),
        ("life, LMCache", {"lmcache": True}),
        ("life, LMCache, V2 runner", {"lmcache": True, "v2": True}),
        ("life, LMCache, KV groups", {"lmcache": True, "windows": [64]}),
        ("life, LMCache, adapters", {"lmcache": True, "adapters": 4}),
        ("life, LMCache, drafts", {"lmcache": True, "drafts": 2}),
        ("life, LMCache, stages", {"lmcache": True, "stages": 4}),
        ("life, V2 runner, stages", {"lmcache": False, "v2": True, "stages": 4}),
        ("life, LMCache, a month", {"lmcache": True, "month": True, "hang_ups": False}),
        ("life, LMCache, nothing left", {"lmcache": True, "nothing_left": True}),
    ]
    short = requests <= FEW
    return [
        job(name, "life.life", requests=requests, seed=seed, **{"hang_ups": short or not more["lmcache"], **more})
        for seed, (name, more) in enumerate(given)
    ]


def _groups(requests: int, crowds: Sequence[int], **sizes: int) -> list[Group]:
    return [
        Group(
            DEFAULT,
            [
                *lives(requests),
                job("long prompt", "loads.long_prompt", tokens=sizes["tokens"], step=sizes["step"]),
                *(job(f"crowd of {crowd} hits", "loads.crowd", requests=crowd) for crowd in crowds),
                *(
                    job(f"crowd of {crowd}", "loads.crowd", requests=crowd, lmcache=False, hits=False)
                    for crowd in crowds
                ),
                job("ends", "loads.ended", requests=sizes["ended"]),
            ],
        ),
        Group(IDS_KEPT, [job("life, ids kept", "life.life", requests=requests, lmcache=False)]),
        Group(
            PUSH,
            [job("push", "push.push", pending=sizes["pending"], hosts=sizes["hosts"], pairs=sizes["pairs"])],
        ),
    ]


SHORT = _groups(300, [128], tokens=13_000, step=64, ended=160_000, pending=250, hosts=40, pairs=2)


def long(requests: int) -> list[Group]:
    """The long form: lives of so many requests, a prompt of a million tokens, a thousand requests at once."""
    crowds = [1, 8, 64, 256, 512]  # each also twice as large
    return _groups(requests, crowds, tokens=500_000, step=256, ended=1_000_000, pending=4_000, hosts=10_000, pairs=20)

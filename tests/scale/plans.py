"""Which loads are played, of which size: the short form of CI's, and the long one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Job = dict[str, Any]

LIFE = 1_000_000
"""Requests of a long life."""
IDS_KEPT = {"LIVEPATCH_STABLE_REQUEST_IDS": "on"}
"""Never on by itself, and asked for by many: requests are named by their clients then, and names come again."""


@dataclass
class Group:
    """Loads of one process, and what is set for it."""

    environ: Mapping[str, str] = field(default_factory=dict)
    jobs: Sequence[Job] = ()


def job(name: str, load: str, **sizes: Any) -> Job:
    """One load: its name in the report, the function, and its arguments."""
    return {"name": name, "load": load, **sizes}


def _groups(requests: int, **sizes: int) -> list[Group]:
    return [
        Group(
            {},
            [
                job("life", "loads.life", requests=requests, lmcache=False),
                job("life, LMCache", "loads.life", requests=requests, lmcache=True),
                job("life, LMCache, V2 runner", "loads.life", requests=requests, lmcache=True, v2=True, seed=1),
                job("life, LMCache, KV groups", "loads.life", requests=requests, lmcache=True, windows=[64], seed=2),
                job("long prompt", "loads.long_prompt", tokens=sizes["tokens"], step=sizes["step"]),
                job("crowd of hits", "loads.crowd", requests=sizes["crowd"]),
                job("crowd", "loads.crowd", requests=sizes["crowd"], lmcache=False, hits=False),
                job("ends", "loads.ended", requests=sizes["ended"]),
                job("push", "push.push", pending=sizes["pending"], hosts=sizes["hosts"], pairs=sizes["pairs"]),
            ],
        ),
        Group(IDS_KEPT, [job("life, ids kept", "loads.life", requests=requests, lmcache=False)]),
    ]


SHORT = _groups(600, tokens=13_000, step=64, crowd=128, ended=160_000, pending=250, hosts=40, pairs=2)


def long(requests: int) -> list[Group]:
    """The long form: lives of so many requests, a prompt of a million tokens, a thousand requests at once."""
    return _groups(
        requests, tokens=500_000, step=256, crowd=512, ended=1_000_000, pending=4_000, hosts=10_000, pairs=20
    )

"""The name of a release, and what orders releases: PEP 440's, of which no library is here."""

from __future__ import annotations

import re
from typing import Any

_RELEASE = re.compile(
    r"(?P<numbers>\d{1,9}(?:\.\d{1,9}){0,9})(?:(?P<stage>a|b|rc)(?P<count>\d{1,9}))?"
    r"(?:\.post(?P<post>\d{1,9}))?(?:\.dev(?P<dev>\d{1,9}))?"
)


def public_release(release: str) -> str:
    """A release without its local part: 0.21.0+rocm700 is the code of 0.21.0, if the fingerprint says so too."""
    return release.partition("+")[0].lower()


def age_of(release: str | None) -> tuple[Any, ...] | None:
    """What orders releases as PEP 440 does, None for what is not one: 0.34.0.dev5 is after 0.33.0 and before 0.34.0."""
    found = _RELEASE.fullmatch(public_release(release or ""))
    if found is None:
        return None
    numbers = [int(number) for number in found["numbers"].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    stage = ("a", "b", "rc").index(found["stage"]) if found["stage"] else 3
    if found["dev"] and not found["stage"] and not found["post"]:
        stage = -1
    return (
        numbers,
        (stage, int(found["count"] or 0)),
        int(found["post"] or -1),
        float(found["dev"] or "inf"),
    )

"""What a part's log says of errors."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from vllm_livepatch.tools.lab.supervisor import tail

_PREFIX = re.compile(r"^\([^)]*\) (?:ERROR|INFO|WARNING) \S+ \S+ \[[^\]]*\] ?")
_SITE = re.compile(r'File ".*/site-packages/')
_ERROR = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback")
_ASSERTION_LINES = 5


def errors(directory: Path, parts: Iterable[str]) -> dict[str, int]:
    """How many lines of each part's log tell of an error."""
    return {part: sum(1 for line in _lines(directory, part) if _ERROR.search(line)) for part in parts}


def assertion(directory: Path, parts: Iterable[str]) -> list[str]:
    """The end of the first traceback in the parts' logs that ends in a failed assertion; none: an empty list."""
    return next(filter(None, (assertion_in(_lines(directory, part)) for part in parts)), [])


def assertion_in(log: list[str]) -> list[str]:
    """The same of one log's lines, without the logger's prefixes and the place of site-packages."""
    plain = [_SITE.sub('File "', _PREFIX.sub("", line)).rstrip() for line in log]
    ends = [number for number, line in enumerate(plain) if line.startswith("AssertionError")]
    return plain[max(0, ends[0] - _ASSERTION_LINES) : ends[0] + 1] if ends else []


def _lines(directory: Path, part: str) -> list[str]:
    return tail(directory / f"{part}.log", lines=sys.maxsize)

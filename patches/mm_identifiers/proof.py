"""The names that two engines' API processes give images, by a release's own `_process_multimodal`."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import mm_identifiers as driver


def cases() -> dict[str, str | None]:
    """Whether images of two engines are told apart where nothing is hashed, and all else is as the release has it."""
    given = {"image": ["a user's"]}
    one, two = driver.Api(), driver.Api()
    first, second = one.names("a cat"), two.names("a dog")
    hashing = driver.Api(hashed=True)
    alike: dict[str, dict[str, Any]] = {
        "an engine that encodes and one that reads": {"encoding": True},
        "a prefill and a decode engine": {"role": "kv_consumer"},
        "engines without a connector": {"role": None},
    }
    findings = {
        "two engines' first images": None if first != second else f"both are {first[0]}",
        "one engine's two images": None if first != one.names("a dog") else "they have one name",
        "two images of one request": None if len(set(one.names("a cat", "a dog"))) == 2 else "they have one name",
        "nothing is named where images are hashed": None if hashing.names("a cat") == [None] else "an image has a name",
        "a user's name is kept where images are hashed": None
        if hashing.names("a cat", given=given) == given["image"]
        else "it is another",
    }
    for who, how in alike.items():
        same = driver.Api(**how).names("a cat") == driver.Api(**how).names("a cat")
        findings[f"{who} count alike"] = None if same else "they have other names for one image"
    return findings

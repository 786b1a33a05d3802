"""The names that two engines' API processes give images, by a release's own `_process_multimodal`."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import mm_identifiers as driver


def cases() -> dict[str, str | None]:
    """Whether images are hashed where KV leaves the engine, and all else is as the release has it."""
    given = {"image": ["a user's"]}
    cached, alone = driver.Api(cached=True), driver.Api(connector="")
    findings = {
        f"an image of an engine with {connector}": None if names == [None] else f"it is {names[0]}, in each such engine"
        for connector in ("kv_transfer_config", "ec_transfer_config")
        for names in [driver.Api(connector=connector).names("a cat")]
    }
    first, second = alone.names("a cat"), alone.names("a dog")
    return {
        **findings,
        "an engine without a connector counts": None if None not in first and first != second else "it does not",
        "with a cache an image is hashed": None if cached.names("a cat") == [None] else "it has a name",
        "with a cache a user's name is taken": None if cached.names("a cat", given=given) == given["image"] else "no",
    }

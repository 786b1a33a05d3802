"""Sessions of a release's schedulers, and what a request with their tokens finds in the prefix cache; contents."""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import session_block_hashes as driver


def cases() -> dict[str, str | None]:
    """Whether what is found is the KV of the tokens that were asked for."""
    text = {"resumed": driver.RESUMED, "same": driver.SAME}
    images = {f"{case}, with images": driver.before(answer) for case, answer in driver.CASES.items()}
    findings = {}
    for mode, cases in driver.played().items():
        for case, found in cases.items():
            expected = images.get(case, text)
            for name, (hits, wrong) in found.items():
                finding = f"{wrong} of {hits} tokens from the prefix cache are other tokens' KV" if wrong else None
                if hits != expected[name] and not wrong:
                    finding = f"{hits} tokens come from the prefix cache, and not {expected[name]}"
                findings[f"{name}, {case}, {mode}"] = finding
    return findings

"""What a patch's proof says of the code that is installed: played on that code as it is, and patched.

Where the code has drifted, each set of facts that the patch knows is tried: exactly one must pass. Of several that do,
the code's names that did not drift may single out one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from vllm_livepatch.sitecustomize import redaction
from vllm_livepatch.sitecustomize.decision import UNKNOWN, Patch, Variant, module_of, moved_companion
from vllm_livepatch.sitecustomize.facts import to_patch
from vllm_livepatch.tools.bundles import bundle, placing
from vllm_livepatch.tools.bundles.catalogue import Entry
from vllm_livepatch.tools.bundles.patch_files import PROOF
from vllm_livepatch.tools.in_bundle.verdicts import Judged
from vllm_livepatch.tools.proving import playing

LONGEST = 500
"""Of a sentence, in letters."""
OutcomeName = Literal["proven", "no-fault", "failed", "not-run"]


@dataclass(frozen=True)
class Outcome:
    """What came of one patch: `detail` says why, a sentence; `cases` by sentence what went wrong, stock and patched."""

    name: str
    outcome: OutcomeName
    reason: str
    detail: str
    verdict: str
    version: int | None = None
    digest: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    cases: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)

    @property
    def stands(self) -> bool:
        """Whether who asks for the patch has what the patch is for."""
        return self.outcome in ("proven", "no-fault") or (self.outcome == "not-run" and self.verdict == "needed")

    def described(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "name"}


def prove(entry: Entry, judged: Judged, play: playing.Play, diffs: Mapping[str, Entry] | None = None) -> Outcome:
    """Play a patch's proof on what `judged` is about. What is said of it is a line, for people, without secrets.

    `diffs` are those that change that code, by name: it is played as they make it, also where it is not patched.
    """
    outcome = _prove(entry, judged, play, diffs or {})
    beneath = f"; as changed by {', '.join(diffs)}" if diffs and outcome.cases else ""
    return replace(outcome, detail=_line(outcome.detail) + beneath)


def _line(text: str) -> str:
    """A text of the engine's or a proof's as a screen, a log and a report may have it."""
    said = redaction.sentence(" ".join(text[:20_000].split()))[:LONGEST]
    return "".join(letter if letter.isprintable() else "?" for letter in said)


def _prove(entry: Entry, judged: Judged, play: playing.Play, diffs: Mapping[str, Entry]) -> Outcome:
    patch, decision = entry.patch, judged.decision
    code = {name: digest for name, digest in judged.installed.code.items() if digest is not None}
    outcome = Outcome(
        patch.name,
        "not-run",
        "",
        "",
        decision.verdict,
        patch.version,
        bundle.digest_of(entry.folder),
        code,
    )

    def not_run(reason: str, detail: str) -> Outcome:
        return replace(outcome, reason=reason, detail=detail)

    if decision.verdict == "not-present" or not any(target in code for target in patch.targets):
        return not_run("gone" if decision.verdict == "drifted" else "not-present", decision.detail)
    if UNKNOWN in code.values():
        return not_run("unknown", decision.detail)
    moved = moved_companion(patch, judged.installed)
    if moved is not None:
        return not_run("gone", moved)
    if patch.diff:
        return not_run("diff", "a diff is not proven: it applies exactly, or not at all")
    proof = entry.folder / PROOF
    if not proof.is_file():
        return not_run("no-proof", f"{entry.folder} has no {PROOF}")
    with _bundled(diffs) as beneath:
        stock = play(proof, patch.name, beneath)
    if stock.trouble is not None:
        return not_run("not-built", stock.trouble)
    outcome = replace(outcome, cases=_beside(stock.cases, {}))
    if not stock.wrong:
        return replace(outcome, outcome="no-fault", reason="no-fault", detail="stock is right in all cases")
    return _of_trials(outcome, stock, _trials(entry, judged, code, stock, play, diffs))


@contextmanager
def _bundled(entries: Mapping[str, Entry]) -> Iterator[Path | None]:
    """A bundle of these patches; None where there are none."""
    with tempfile.TemporaryDirectory(prefix="livepatch-bundle-") as temporary:
        place = Path(temporary, "bundle")
        if entries:
            placing.write_directory(bundle.contents(entries), place)
        yield place if entries else None


@dataclass(frozen=True)
class Trial:
    """The proof, played patched with one set of facts."""

    facts: Mapping[str, Any]
    played: playing.Played
    fits: bool  # a release with these facts has the code, but for what no release has

    @property
    def acted(self) -> bool:
        return self.played.patch is not None and self.played.patch["state"] == "applied"

    @property
    def passed(self) -> bool:
        return self.acted and self.played.trouble is None and not self.played.wrong


def _trials(
    entry: Entry,
    judged: Judged,
    code: Mapping[str, str],
    stock: playing.Played,
    play: playing.Play,
    diffs: Mapping[str, Entry],
) -> Iterator[Trial]:
    """The proof patched, with each set of facts that may be that of the code: of known code one."""
    form = judged.decision.variant
    known = judged.decision.verdict != "drifted" and form is not None
    forms = [form] if known and form is not None else [one for one in entry.patch.variants if one.applies and one.code]
    sets = {json.dumps(one.facts, sort_keys=True): one.facts for one in forms}
    for facts in sets.values():
        tried = {**entry.facts, "proof": [{"code": dict(code), "outcome": "proven", "facts": dict(facts)}]}
        made = replace(entry, facts=tried, patch=to_patch(entry.patch.name, tried))
        with _bundled({**diffs, entry.patch.name: made}) as place:
            fits = any(one.facts == facts and _fits(entry.patch, one, code) for one in forms)
            played = _beside_stock(stock, play(entry.folder / PROOF, entry.patch.name, place))
            yield Trial(facts, _with_all_seen(entry.patch, code, played), fits)


def _beside_stock(stock: playing.Played, played: playing.Played) -> playing.Played:
    """The same; with a trouble where a case of stock's was not played, which may be the one that the fault shows in."""
    left_out = [sentence for sentence in stock.cases if sentence not in played.cases]
    if played.trouble is not None or played.wrong or not left_out:
        return played
    return replace(played, trouble=f"a case of stock's was not played: {left_out[0]}")


def _with_all_seen(patch: Patch, code: Mapping[str, str], played: playing.Played) -> playing.Played:
    """The same; with a trouble where code that no release has is in a module that the proof did not import."""
    forms = [form for package in patch.packages for form in patch.forms(package)]
    strange = [name for name, digest in code.items() if all(form.code.get(name) != digest for form in forms)]
    unseen = [name for name in strange if module_of(name) not in played.modules]
    if played.trouble is not None or played.wrong or not unseen:
        return played
    return replace(played, trouble=f"no release has this code of {unseen[0]}, and the proof does not import it")


def _fits(patch: Patch, form: Variant, code: Mapping[str, str]) -> bool:
    """Whether a form has the code that is installed, of the names whose code some form has."""
    names = patch.names_of(patch.package)
    known = {name: {one.code.get(name) for one in patch.variants} for name in names}
    return all(code.get(name) == form.code.get(name) for name in names if code.get(name) in known[name])


def _of_trials(outcome: Outcome, stock: playing.Played, trials: Iterator[Trial]) -> Outcome:
    tried = sorted(trials, key=lambda trial: not trial.fits)  # of what failed, the likeliest facts are told of
    passed = [trial for trial in tried if trial.passed]
    if len(passed) > 1:
        passed = [trial for trial in passed if trial.fits] or passed
    if len(passed) > 1:
        detail = f"{len(passed)} sets of facts pass, and only one can be right: {[dict(one.facts) for one in passed]}"
        return replace(outcome, reason="ambiguous", detail=detail)
    if passed:
        (one,) = passed
        cases = _beside(stock.cases, one.played.cases)
        right = "right in its one case" if len(cases) == 1 else f"right in all {len(cases)} cases"
        detail = f"stock shows {_count(stock.wrong)}, patched is {right}{_part(one.played.patch)}"
        return replace(outcome, outcome="proven", reason="proven", detail=detail, facts=dict(one.facts), cases=cases)
    wrong = next((trial for trial in tried if trial.acted and trial.played.wrong), None)
    unseen = any(trial.fits and trial.acted and trial.played.trouble is not None for trial in tried)
    if wrong is not None and (wrong.fits or not unseen):  # less likely facts do not speak for those that were not seen
        sentence, what = next(iter(wrong.played.wrong.items()))
        also = " (stock too)" if stock.cases.get(sentence) == what else ""
        cases = _beside(stock.cases, wrong.played.cases)
        return replace(outcome, outcome="failed", reason="failed", detail=f"{sentence}: {what}{also}", cases=cases)
    return _not_applied(outcome, tried)


def _not_applied(outcome: Outcome, tried: Sequence[Trial]) -> Outcome:
    """What is said where the patch was not applied in any trial, or the patched cases could not be played."""
    for trial in tried:
        if trial.played.trouble is not None:
            return replace(outcome, reason="not-built", detail=f"patched: {trial.played.trouble}")
        state = trial.played.patch
        if state is None:
            return replace(outcome, reason="not-imported", detail="its proof imports none of its targets")
        if state["state"] == "armed":
            return replace(outcome, reason="not-imported", detail="its proof does not import all of its targets")
        if state["state"] == "failed":
            detail = f"{state['reason']}: {state['detail']}"
            return replace(outcome, outcome="failed", reason="failed", detail=detail)
        return replace(outcome, reason=state["reason"] or state["state"], detail=state["detail"] or "")
    return replace(outcome, reason="no-facts", detail="no form of its code that is known can be patched")


def _part(state: Mapping[str, Any] | None) -> str:
    """What is added where the proof has not imported all targets: nothing was seen of the others."""
    return f"; of {state['detail']}" if state is not None and state["reason"] == "partly" else ""


def _count(wrong: Mapping[str, str]) -> str:
    return "the fault" if len(wrong) == 1 else f"the fault in {len(wrong)} cases"


def _beside(stock: Mapping[str, str | None], patched: Mapping[str, str | None]) -> dict[str, dict[str, str | None]]:
    found: dict[str, dict[str, str | None]] = {}
    for mode, cases in (("stock", stock), ("patched", patched)):
        for sentence, what in cases.items():
            found.setdefault(sentence, {})[mode] = None if what is None else redaction.sentence(what[:20_000])
    return found

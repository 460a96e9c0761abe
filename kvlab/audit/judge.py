"""What an answer says: equal, a near-tie, contaminated, a leak, or a failure; and the verdict."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from kvlab.audit.engine import Answer
from kvlab.audit.prompts import Tenant

Kind = Literal["equal", "near-tie", "contaminated", "leak", "failed"]
NEAR_TIE = 0.05
"""Log-probabilities closer than this count as a near-tie: rounding may flip them in half
precision too. Where the engine's own drift asks for more, it is ten times that drift."""


@dataclass(frozen=True)
class Finding:
    """Something that should not be.

    Attributes:
        kind: What it is.
        arm: In which arm it was seen.
        tenant: Whose answer.
        detail: One sentence with what was expected and what came.
        margin: Distance of the two best log-probabilities where the answers part; `None`: not told.
    """

    kind: Kind
    arm: str
    tenant: str
    detail: str
    margin: float | None = None


def judge(
    arm: str,
    tenant: Tenant,
    answer: Answer,
    reference: Answer,
    others: Collection[str],
    tolerance: float = NEAR_TIE,
    stop: Collection[int | str] = (),
) -> Finding:
    """Compare an answer with its reference.

    Args:
        others: Passphrases of the other tenants. One of them in the answer, and not in the
            reference, proves that something came across.
        tolerance: Margin up to which a difference is a near-tie.
        stop: Tokens that end an answer; some engines tell them, some do not.
    """
    if answer.error or reference.error:
        return Finding("failed", arm, tenant.name, answer.error or f"reference: {reference.error}")
    foreign = next((p for p in others if p in answer.text and p not in reference.text), None)
    if foreign is not None and foreign != tenant.passphrase:
        detail = f"the answer {answer.text!r} holds the passphrase of another tenant"
        return Finding("leak", arm, tenant.name, detail)
    said, wanted = comparable(answer, reference)
    said, wanted = without_end(said, stop), without_end(wanted, stop)
    at = first_difference(said, wanted)
    if at is None:
        return Finding("equal", arm, tenant.name, "")
    margins = reference.margins or answer.margins
    margin = margins[at] if margins is not None and at < len(margins) else None
    where = f"at generated token {at + 1}" if len(wanted) > 1 else "as a text"
    detail = (
        f"differs {where}: {answer.text or answer.pieces!r} instead of "
        f"{reference.text or reference.pieces!r}"
    )
    kind: Kind = "near-tie" if margin is not None and margin <= tolerance else "contaminated"
    return Finding(kind, arm, tenant.name, detail, margin)


def comparable(
    answer: Answer, reference: Answer
) -> tuple[Sequence[int | str], Sequence[int | str]]:
    """The tokens of both, or both texts where only one of them tells ids."""
    kinds = {type(p) for p in (*answer.pieces, *reference.pieces)}
    if len(kinds) > 1:
        return (answer.text,), (reference.text,)
    return answer.pieces, reference.pieces


def without_end(pieces: Sequence[int | str], stop: Collection[int | str]) -> Sequence[int | str]:
    """The tokens without the one that ended the answer."""
    return pieces[:-1] if pieces and pieces[-1] in stop else pieces


def first_difference(a: Sequence[int | str], b: Sequence[int | str]) -> int | None:
    """Where two answers part, or `None` where they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def drift(answers: Sequence[Answer]) -> float:
    """Largest difference of a log-probability between equal answers; 0 where none is told."""
    told = [a.logprobs for a in answers if a.logprobs]
    if not told:
        return 0.0
    columns = zip(*told, strict=False)
    return max((max(c) - min(c) for c in columns), default=0.0)


VERDICTS = {
    "isolated": 0,
    "leak": 1,
    "contaminated": 1,
    "cannot tell": 3,
}
"""Each verdict with the exit code of the command line; 2 is for engines that could not be run."""


def verdict(findings: Sequence[Finding], noisy: str, missing: str) -> tuple[str, str]:
    """The verdict, and the sentence that explains it.

    Args:
        noisy: Why a difference proves nothing on this engine; empty where it does.
        missing: What of the audit was not done; empty where all of it was.
    """
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    if leaks := by_kind.get("leak"):
        return "leak", f"{len(leaks)} answers hold another tenant's passphrase. {leaks[0].detail}"
    wrong, failed = by_kind.get("contaminated", []), by_kind.get("failed", [])
    if noisy:
        return "cannot tell", noisy
    if wrong:
        first = f"First in arm {wrong[0].arm!r}: {wrong[0].detail}"
        unknown = all(f.margin is None for f in wrong)
        if unknown and len({f.tenant for f in wrong}) == 1:
            return "cannot tell", (
                "one prompt's answer differs, and the engine tells no log-probabilities: it may be "
                f"a near-tie. {first}"
            )
        return "contaminated", f"{len(wrong)} answers differ beyond near-ties. {first}"
    if failed:
        return "cannot tell", (
            f"{len(failed)} requests failed; what they would have said is not known. "
            f"First in arm {failed[0].arm!r}: {failed[0].detail}"
        )
    if missing:
        return "cannot tell", f"nothing was found, but {missing}"
    return "isolated", "every answer is the one that the request gets alone"

"""One scene of the lab: two requests in one state of the switch, and what happened, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvlab.decode import recompute
from kvlab.forward import ForwardPass, Observer
from kvlab.models import LoadedModel
from kvlab.observe import AttentionProbe, first_foreign_read
from kvlab.passphrase import Arm, build_requests
from kvlab.pools import SimpleCachePool
from kvlab.prompts import LANGUAGES
from kvlab.request import Request, Run
from kvlab.schedule import run
from kvlab.verdict import first_divergence, foreign_spans

STATES: Mapping[str, Arm] = {
    "isolated": "shared",
    "same slot, overwritten": "overwrite",
    "same slot, appended": "append",
}
"""The switch, and the arm of the passphrase experiment that each state is."""

PRESETS = {
    "A and B: two sums": ("zh", "A", "B"),
    "A and C: two system prompts": ("zh", "A", "C"),
    "D and E: two passphrases": ("zh", "D", "E"),
    "D and E in English": ("en", "D", "E"),
}
"""Language and the two requests of the passphrase experiment."""

SLOT_ROWS = 160


@dataclass(frozen=True)
class Write:
    """Rows `start` to `start + count - 1` of a slot, written by `request` in turn `tick`."""

    tick: int
    request: str
    slot: int
    start: int
    count: int


class _Writes(Observer):
    def __init__(self) -> None:
        self.log: list[Write] = []

    def after(self, forward: ForwardPass) -> None:
        for b, ran in enumerate(forward.runs):
            slot = forward.leases[b].slot.id  # type: ignore[attr-defined]
            place = (slot, forward.starts[b], forward.counts[b])
            self.log.append(Write(forward.tick, ran.request.id, *place))


@dataclass(frozen=True)
class Scene:
    """What came of two requests in one state of the switch.

    Attributes:
        references: The cold recompute of both.
        probe: Attention of both, all layers kept.
        writes: Who wrote which rows of which slot, in order.
    """

    loaded: LoadedModel
    state: str
    references: Mapping[str, Run]
    runs: Mapping[str, Run]
    probe: AttentionProbe
    writes: list[Write]

    @property
    def names(self) -> tuple[str, str]:
        """The request that came first, and the newcomer."""
        first, second = self.runs
        return first, second

    def partner(self, name: str) -> str:
        first, second = self.names
        return second if name == first else first

    def divergence(self, name: str) -> int | None:
        """The first generated token that is not that of the cold recompute, counted from 1."""
        return first_divergence(self.runs[name].tokens, self.references[name].tokens)

    def exposure(self, name: str) -> int | None:
        """The first generated token whose attention falls on foreign rows, counted from 1."""
        return first_foreign_read(self.probe.steps[name])

    @property
    def victim(self) -> str | None:
        """The request whose answer changed; of two, the one that changed first."""
        changed = {n: d for n in self.names if (d := self.divergence(n)) is not None}
        return min(changed, key=changed.__getitem__) if changed else None

    def foreign_words(self, name: str) -> list[str]:
        """Words of the answer that only the partner's text holds."""
        own = [*self.runs[name].request.tokens, *self.references[name].tokens]
        other = self.partner(name)
        theirs = [*self.runs[other].request.tokens, *self.references[other].tokens]
        tokens = self.runs[name].tokens
        words = [
            self.loaded.text(tokens[a:b]).strip() for a, b in foreign_spans(tokens, own, theirs)
        ]
        return list(dict.fromkeys(w for w in words if w))

    def sentence(self, name: str) -> str:
        """What happened to one request, in one plain sentence."""
        where, since, other = self.divergence(name), self.exposure(name), self.partner(name)
        if since is None and where is None:
            return f"{name} answers as if it were alone, and reads only its own rows."
        if since is None:
            margin = self.references[name].margins[where - 1]  # type: ignore[operator]
            return (
                f"{name} differs from token {where} on without a foreign read: the two best words "
                f"were only {margin:.2g} apart, which rounding may turn round."
            )
        mass = self.probe.steps[name][since - 1].foreign_mass
        assert mass is not None
        read = (
            f"from token {since} on it reads rows of {other} "
            f"({mass.mean():.0%} of its attention, {mass.max():.0%} in one head)"
        )
        if where is None:
            return f"{name} still answers as if it were alone, but {read}: exposure without damage."
        run_, reference = self.runs[name], self.references[other]
        words = self.foreign_words(name)
        if run_.tokens == reference.tokens:
            what = f"{name} answers the question of {other}, word for word"
        elif run_.tokens[where - 1 :] == reference.tokens[where - 1 :]:
            what = f"{name} goes on as the right answer to {other} does"
        elif words:
            what = f"{name} says what only {other} knows ({', '.join(words)})"
        else:
            what = f"{name} says something else, without a word of {other}"
        return f"From token {where} on, {what}; {read}."


def preset(loaded: LoadedModel, name: str) -> tuple[Request, Request]:
    """The two requests of a preset."""
    language, first, second = PRESETS[name]
    requests = build_requests(loaded, LANGUAGES[language], "short")
    return requests[first], requests[second]


def play(
    loaded: LoadedModel,
    first: Request,
    second: Request,
    state: str,
    references: Mapping[str, Run] | None = None,
) -> Scene:
    """Run two requests in turns on one pool, in a state of the switch.

    Args:
        references: The cold recomputes, if they are known already.

    Raises:
        ValueError: Unknown state, or the two do not fit into a slot one behind the other.
    """
    if state not in STATES:
        raise ValueError(f"unknown state {state!r}; use one of {', '.join(STATES)}")
    needed = first.rows_needed + second.rows_needed
    if needed > SLOT_ROWS:
        raise ValueError(
            f"the two texts need {needed} rows one behind the other, a slot has {SLOT_ROWS}; "
            f"take away {needed - SLOT_ROWS} tokens"
        )
    references = references or {r.id: recompute(loaded.model, r) for r in (first, second)}
    pool = SimpleCachePool.for_model(
        loaded.model.config, 2, SLOT_ROWS, loaded.model.dtype, loaded.model.device
    )
    arm = STATES[state]
    if arm in ("overwrite", "append"):
        pool.collide(second.id, first.id, arm)
    probe, writes = AttentionProbe(keep="all"), _Writes()
    runs = run(loaded.model, (first, second), pool, "round_robin", observers=[probe, writes])
    return Scene(loaded, state, references, runs, probe, writes.log)

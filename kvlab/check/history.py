"""A history: moves over the pool contract, played on a fresh pool with dyed rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvlab.check.dye import Dye, Label, What, chain_of
from kvlab.interleave import Move, moves
from kvlab.pools import BatchView
from kvlab.pools.contract import (
    AnnouncedLease,
    Batches,
    CachePool,
    Forks,
    Lease,
    Parks,
    PoolFull,
    Settles,
    Truncates,
)
from kvlab.request import Request, known

Rule = Literal["read", "hit", "refusal", "conservation", "error"]
Outcome = Literal["done", "full", "nothing"]


@dataclass(frozen=True)
class History:
    """Requests, and the order of their moves; whoever has it can play it again.

    Attributes:
        requests: By label. Labels are unique, names (`Request.id`) may return.
        moves: See `kvlab.interleave.moves`; a fork continues the rows of its source with the tokens
            of the request that it is for.
        chunk: Prompt tokens of one prefill step; all if `None`.
        shared: Whether a pool may hand a common prefix over apart from the rest.
    """

    requests: dict[str, Request]
    moves: tuple[Move, ...]
    chunk: int | None = None
    shared: bool = True

    def __str__(self) -> str:
        return " ".join(map(str, self.moves))

    def to_json(self) -> str:
        requests = {
            label: {
                "id": r.id,
                "tokens": list(r.tokens),
                "max_new_tokens": r.max_new_tokens,
                "context": r.context,
            }
            for label, r in self.requests.items()
        }
        rest = {"moves": str(self), "chunk": self.chunk, "shared": self.shared}
        return json.dumps({"requests": requests, **rest}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> History:
        """Raises ValueError where the text is no history."""
        try:
            read = json.loads(text)
            requests = {
                label: Request(
                    r["id"],
                    tuple(r["tokens"]),
                    r["max_new_tokens"],
                    context=None
                    if r["context"] is None
                    else tuple((tag, value) for tag, value in r["context"]),
                )
                for label, r in read["requests"].items()
            }
            return cls(requests, tuple(moves(read["moves"])), read["chunk"], read["shared"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is no history that was saved by a check: {error!r}") from error


@dataclass(frozen=True)
class Anomaly:
    """Something that no right pool does.

    Attributes:
        rule: Which of the rules it breaks.
        label: Of the request that saw it; empty where the pool as a whole is meant.
        at: Index of the move.
        what: Of a wrong row, what it is; else "number" or "mask"; of a hit "longer", "not
            written" or "unknown context"; "lost", "given twice", "changed", or an exception's name.
        cached: The row belongs to the prefix that the pool said was there.
        changed: It was right when this request read it before.
        twin: It is the row of equal tokens in another context.
        same_place: It is a row of another prompt, from the same place there.
        lone: Nobody else was there who was not parked.
    """

    rule: Rule
    label: str
    at: int
    what: What | str
    text: str
    cached: bool = False
    changed: bool = False
    twin: bool = False
    same_place: bool = False
    lone: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass
class Life:
    """What is known of one request from its admission on."""

    label: str
    request: Request
    lease: Lease
    start: object  # what its chain begins with: context, or itself where that is not known
    sequence: list[int]
    chains: list[int]
    done: int = 0  # rows that are there
    turn: int = 0  # how often rows were taken back: it goes on with other tokens then
    parked: bool = False
    right: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.announced = isinstance(self.lease, AnnouncedLease)

    @property
    def over(self) -> bool:
        return self.done >= self.request.rows_needed

    @property
    def prefilled(self) -> bool:
        return self.done >= len(self.request.tokens)


class Player:
    """Plays moves on one pool, and looks at everything that it hands back.

    A move of a request that cannot make it (it is over, or its pool lacks the extra) is nothing.

    Attributes:
        anomalies: What was wrong, at most one a request and move.
        exercised: How often each situation came up.
        outcomes: What became of each move.
    """

    def __init__(
        self,
        pool: CachePool,
        requests: dict[str, Request],
        dye: Dye,
        chunk: int | None = None,
        shared: bool = True,
        settle_always: bool = False,
        journal: Callable[[str], None] | None = None,
        limit: int = 0,
    ) -> None:
        self.pool, self.requests, self.dye = pool, requests, dye
        self.chunk, self.shared = chunk, shared
        self.limit = limit  # rows of the longest request that a fresh pool admits
        self.settle_always, self.journal = settle_always, journal
        self.batches, self.settles = isinstance(pool, Batches), isinstance(pool, Settles)
        self.lives: dict[str, Life] = {}
        self.over: set[str] = set()  # labels that do not come any more
        self.anomalies: list[Anomaly] = []
        self.exercised: Counter[str] = Counter()
        self.outcomes: list[Outcome] = []
        self.moves: list[Move] = []
        self.names: set[str] = set()
        self.starts: set[object] = set()
        self.complete: set[int] = set()  # chains whose rows were written in every layer
        self.expected: set[int] = set()  # chains of prompts, written or not
        self.written: dict[int, int] = {}  # every chain, and the first one of its request
        self.writers: dict[int, set[str]] = {}
        self.place: dict[int, int] = {}  # which row of its request it is

    # Moves

    def play(self, move: Move) -> Outcome:
        """Make one move; an exception that the contract does not know is an anomaly."""
        self.moves.append(move)
        if self.journal is not None:
            self.journal(str(move))
        outcome: Outcome = "nothing"
        try:
            outcome = self._play(move)
            if self.settle_always:
                self.settle()
        except (Exception, SystemExit) as error:
            self._error(move, error)
        self.outcomes.append(outcome)
        return outcome

    def _error(self, move: Move, error: BaseException) -> None:
        name = type(error).__name__
        text = f"{move}: raised {name}: {str(error)[:200]}"
        self._note("error", move.requests[0] if move.requests else "", name, text)

    def _play(self, move: Move) -> Outcome:
        if move.kind == "settle":
            return self.settle()
        if move.kind == "fork":
            return self._fork(*move.requests)
        here = [self.lives[n] for n in move.requests if n in self.lives]
        if move.kind in ("step", "whole"):
            return self._step(move.requests, None if move.kind == "whole" else self.chunk)
        if not here:
            return "nothing"
        life = here[0]
        if move.kind == "abort":
            if 0 < life.done < len(life.request.tokens):
                self.exercised["abort within a prefill"] += 1
            return self._release(life)
        if life.parked:
            return "nothing"
        if move.kind == "park" and isinstance(self.pool, Parks):
            self.pool.park(life.lease)
            life.parked = True
            self.exercised["parked"] += 1
            return "done"
        if move.kind == "truncate" and isinstance(self.pool, Truncates):
            return self._truncate(life, max(0, life.done - move.count))
        return "nothing"

    def settle(self) -> Outcome:
        """Have the pool finish what it left for later."""
        if not self.settles:
            return "nothing"
        self.pool.settle()  # type: ignore[attr-defined]
        return "done"

    def _step(self, labels: Sequence[str], chunk: int | None) -> Outcome:
        outcome: Outcome = "nothing"
        decoding = []
        for label in labels:
            life = self.lives.get(label)
            if life is None:
                if label not in self.over:
                    outcome = self._admit(label, self.requests[label])
            elif life.parked:
                outcome = self._resume(life)
            elif life.over:
                outcome = self._release(life)
                self.over.add(label)
            elif life.prefilled:
                decoding.append(life)
            else:
                end = len(life.request.tokens)
                if chunk is not None:
                    end = min(end, life.done + chunk)
                outcome = self._forward([life], [end - life.done])
        if decoding:
            outcome = self._forward(decoding, [1] * len(decoding))
        return outcome

    def _admit(self, label: str, request: Request) -> Outcome:
        if any(life.request.id == request.id for life in self.lives.values()):
            return "nothing"  # a name is unique while it is admitted
        try:
            lease = self.pool.admit(request)
        except PoolFull:
            self.exercised["full"] += 1
            return "full"
        except ValueError:
            if request.rows_needed <= self.limit:
                raise
            self.exercised["too long"] += 1
            return "full"
        if request.id in self.names:
            self.exercised["a name came back"] += 1
        self.names.add(request.id)
        key = known(request.context)
        life = self._take_in(label, request, lease, f"{label}?" if key is None else key)
        hit, rows = lease.num_cached_tokens, len(life.chains)
        equal = next((i for i, c in enumerate(life.chains) if c not in self.complete), rows)
        if hit > equal:
            unknown = key is None
            early = life.chains[hit - 1] in self.expected
            self._note(
                "hit",
                label,
                "unknown context" if unknown else "not written" if early else "longer",
                f"{label} is granted {hit} tokens, at most {equal} are written and equal "
                f"{'(its context is not known)' if unknown else 'in its context'}",
            )
        self.expected.update(life.chains)
        if hit:
            self.exercised["hit"] += 1
            self.exercised["partial hit" if hit < rows - 1 else "full hit"] += 1
        return "done"

    def _take_in(self, label: str, request: Request, lease: Lease, start: object) -> Life:
        tokens = list(request.tokens)
        life = Life(label, request, lease, start, tokens, chain_of(start, tokens))
        hit = lease.num_cached_tokens
        if not isinstance(hit, int) or not 0 <= hit < len(tokens):
            self._note(
                "hit", label, "longer", f"{label}: {hit} of {len(tokens)} prompt tokens are cached"
            )
        life.done = min(max(int(hit), 0), len(tokens) - 1)
        self.lives[label] = life
        self.starts.add(start)
        self.exercised["at once"] = max(self.exercised["at once"], len(self.lives))
        return life

    def _fork(self, source: str, label: str) -> Outcome:
        life = self.lives.get(source)
        if (
            life is None
            or life.parked
            or not isinstance(self.pool, Forks)
            or label in self.lives
            or label in self.over
            or any(x.request.id == self.requests[label].id for x in self.lives.values())
        ):
            return "nothing"
        wanted = self.requests[label]
        tokens = (*life.sequence[: life.done], *wanted.tokens)
        request = replace(wanted, tokens=tokens, context=life.request.context)
        try:
            lease = self.pool.fork(life.lease, request)
        except PoolFull:
            self.exercised["full"] += 1
            return "full"
        self.names.add(request.id)
        self._take_in(label, request, lease, life.start)
        self.exercised["fork"] += 1
        if lease.num_cached_tokens > life.done:
            text = f"{label} takes over {lease.num_cached_tokens} of {life.done} rows"
            self._note("hit", label, "longer", text)
        return "done"

    def _truncate(self, life: Life, length: int) -> Outcome:
        assert isinstance(self.pool, Truncates)
        self.pool.truncate(life.lease, length)
        life.done = length
        # Other tokens may follow, also within the prompt where the pool is told which.
        kept = length if life.announced else max(length, len(life.request.tokens))
        del life.sequence[kept:], life.chains[kept:]
        life.turn += 1
        life.right &= set(range(length))
        self.exercised["truncate"] += 1
        return "done"

    def _resume(self, life: Life) -> Outcome:
        assert isinstance(self.pool, Parks)
        try:
            self.pool.resume(life.lease)
        except PoolFull:
            self.exercised["full"] += 1
            return "full"
        life.parked = False
        return "done"

    def _release(self, life: Life) -> Outcome:
        del self.lives[life.label]
        self.pool.release(life.lease)
        return "done"

    def release_all(self) -> None:
        """All leave, and the pool finishes what it left for later."""
        for label in list(self.lives):
            self.play(Move((label,), "abort"))
        self.play(Move((), "settle"))

    # Forward passes

    def _forward(self, lives: Sequence[Life], counts: Sequence[int]) -> Outcome:
        for life, count in zip(lives, counts, strict=True):
            self._extend(life, life.done + count)
        leases = [life.lease for life in lives]
        for life, count in zip(lives, counts, strict=True):
            if life.announced:
                life.lease.announce(  # type: ignore[attr-defined]
                    life.sequence[life.done : life.done + count]
                )
        try:
            noted = self._write_and_read(lives, leases, list(counts))
        except PoolFull:
            if any(life.turn for life in lives):  # a copy behind a truncation found no block
                self.exercised["full"] += 1
                return "full"
            raise
        for life, count in zip(lives, counts, strict=True):
            new = life.chains[life.done : life.done + count]
            self.complete.update(new)
            life.done += count
            if life.label not in noted:
                life.right.update(range(life.done))
        self.exercised["batch"] += len(lives) > 1
        return "done"

    def _extend(self, life: Life, rows: int) -> None:
        while len(life.sequence) < rows:
            last = life.chains[-1] if life.chains else life.request.tokens[0]
            token = 3 + (last + life.turn) % (self.dye.vocab - 3)
            life.sequence.append(token)
            life.chains = chain_of(life.start, life.sequence)

    def _rows(self, life: Life, start: int, end: int) -> Float[Tensor, "L 2 G T D"]:
        rows = [self.dye.row(c, life.chains[0]) for c in life.chains[start:end]]
        return torch.stack(rows, 3)

    def _write_and_read(
        self, lives: Sequence[Life], leases: Sequence[Lease], counts: list[int]
    ) -> set[str]:
        """One forward pass: write dyed rows, look at what comes back; who saw something wrong."""
        noted: set[str] = set()
        view: Any = None
        if self.batches:
            view = self.pool.batch(leases, counts, shared=self.shared)  # type: ignore[attr-defined]
        elif len(leases) > 1:
            view = BatchView(leases, counts)
        self._check_numbers(lives, leases, counts, view, noted)
        cache = leases[0].cache if view is None else view
        ends = [life.done + count for life, count in zip(lives, counts, strict=True)]
        for life, end in zip(lives, ends, strict=True):
            for row in range(life.done, end):
                chain = life.chains[row]
                self.written[chain], self.place[chain] = life.chains[0], row
                self.writers.setdefault(chain, set()).add(life.label)
        wanted = [self._rows(life, 0, end) for life, end in zip(lives, ends, strict=True)]
        longest = max(counts)
        new = torch.zeros(
            self.dye.layers, 2, len(lives), self.dye.heads, longest, self.dye.dim,
            dtype=self.dye.dtype,
        )  # fmt: skip
        for b, (life, count) in enumerate(zip(lives, counts, strict=True)):
            new[:, :, b, :, :count] = wanted[b][:, :, :, life.done :]
        for layer in range(self.dye.layers):
            read = cache.update(new[layer, 0], new[layer, 1], layer)
            for b, life in enumerate(lives):
                rows = [_whole(cache, part, b, i) for i, part in enumerate(read)]
                self._check_rows(life, ends[b], layer, rows, wanted[b][layer].float(), noted)
        return noted

    def _check_numbers(
        self,
        lives: Sequence[Life],
        leases: Sequence[Lease],
        counts: Sequence[int],
        view: Any,
        noted: set[str],
    ) -> None:
        """Lengths, position numbers and masks must be those of the rows that are there."""
        longest = max(counts)
        positions: Any = None if view is None else view.positions(longest)
        mask: Any = None if view is None else view.mask(longest)
        for b, (life, count) in enumerate(zip(lives, counts, strict=True)):
            said = int(leases[b].cache.get_seq_length()) if view is None else int(positions[b, 0])
            wrong = ""
            if said != life.done:
                wrong = f"number: {life.label} holds {life.done} rows, the pool says {said}"
            elif view is None:
                rows, offset = leases[b].cache.get_mask_sizes(count, 0)
                if rows < life.done + count or offset:
                    wrong = f"mask: {life.label} may read {rows} rows from {offset} on"
            elif positions[b, :count].tolist() != list(range(life.done, life.done + count)):
                wrong = f"number: {life.label} writes at {positions[b, :count].tolist()}"
            else:
                base = view.base[b] if hasattr(view, "base") else 0
                got = mask[b, 0, :count].cpu()
                last = life.done + 1 - base + torch.arange(count)[:, None]
                if not torch.equal(got, torch.arange(got.shape[1])[None] < last):
                    wrong = f"mask: {life.label} may read other rows than its own"
            if wrong:
                noted.add(life.label)
                what, text = wrong.split(": ", 1)
                cached = bool(life.lease.num_cached_tokens)
                self._note("read", life.label, what, text, cached=cached)

    def _check_rows(
        self,
        life: Life,
        end: int,
        layer: int,
        rows: Sequence[Float[Tensor, "G T D"]],
        wanted: Float[Tensor, "2 G T D"],
        noted: set[str],
    ) -> None:
        if life.label in noted:
            return
        for part, got in enumerate(rows):
            if got.shape[1] < end:
                noted.add(life.label)
                text = f"{life.label} reads {got.shape[1]} of {end} rows in layer {layer}"
                self._note("read", life.label, "mask", text)
                return
            seen = got[:, :end].float().cpu()
            if torch.equal(seen, wanted[part]):
                continue
            right = self.dye.near(seen, wanted[part])
            if not right.all():
                noted.add(life.label)
                row = int((~right.all(0)).nonzero()[0])
                head = int((~right[:, row]).nonzero()[0])
                self._name(life, layer, part, head, row, seen[head, row])
                return

    def _name(self, life: Life, layer: int, part: int, head: int, row: int, got: Tensor) -> None:
        own = dict.fromkeys(life.chains, life.chains[0])
        label = Label(life.chains[row], layer, part, head)
        what, chain = self.dye.name(got, label, own, self.written | own)
        writers = sorted(self.writers.get(chain, ())) if chain is not None else []
        changed = row in life.right
        whose = " or ".join(writers) or life.label
        says = {
            "foreign": f"is a row of {whose}",
            "nobody": "was written by nobody",
            "position": f"is {life.label}'s own of another position",
            "layout": f"is one of {whose} of another head, kind or order",
            "scale": f"is {life.label}'s own times a factor",
            "unknown": "is nothing that was ever written",
        }[what]
        first = ", and was right before" if changed else ""
        self._note(
            "read",
            life.label,
            what,
            f"{life.label} reads {'a value' if part else 'a key'} in row {row}, layer {layer}, "
            f"head {head}, that {says}{first}",
            cached=row < life.lease.num_cached_tokens,
            changed=changed,
            twin=chain is not None and self._is_twin(life, row, chain),
            same_place=chain is not None and self.place[chain] == row,
        )

    def _is_twin(self, life: Life, row: int, chain: int) -> bool:
        """Whether a foreign row has the reader's tokens, in the context of one who was there."""
        return any(chain == chain_of(start, life.sequence[: row + 1])[-1] for start in self.starts)

    def _note(self, rule: Rule, label: str, what: str, text: str, **more: bool) -> None:
        lone = sum(not life.parked for life in self.lives.values()) == 1
        at = len(self.moves) - 1
        self.anomalies.append(Anomaly(rule, label, at, what, text, **more, lone=lone))


def _whole(cache: Any, rows: Float[Tensor, "B G T D"], b: int, part: int) -> Tensor:
    """All rows of one request, also where a batch hands a shared prefix over apart."""
    for group in getattr(cache, "groups", ()):
        if b in group.rows:
            return torch.cat([group.key if part == 0 else group.value, rows[b]], 1)
    return rows[b]

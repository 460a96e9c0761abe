"""Dyed rows: a stand-in for a model whose keys and values say what they are.

A real row of a cache depends on everything before it, and nobody can tell by looking whose it is.
The stand-in writes rows drawn from a hash of exactly that: context, all tokens up to the row,
layer, head, key or value. Whatever a pool hands back can then be told apart from what it should
have handed back, row by row, and named: another request's, another position's, another head's,
another scale, or nobody's. It needs nothing but the pool contract.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PretrainedConfig

from kvlab.forward import ForwardPass, Observer
from kvlab.pools.arena import kv_shape
from kvlab.pools.contract import CachePool, Lease
from kvlab.pools.events import EventLog
from kvlab.request import Request, known

What = Literal["foreign", "nobody", "position", "layout", "scale", "unknown", "number", "mask"]
"""foreign: another request's row. nobody: zeros or NaN. position: an own row of another place.
layout: an own row of another layer, head or kind, or its numbers in another order. scale: an own
row times a factor. number: the row count or a position number is wrong. mask: too many or too few
rows may be read."""


class Label(NamedTuple):
    """What a dyed row is."""

    chain: int  # hash of the context and of all tokens up to this row
    layer: int
    value: int  # 0 key, 1 value
    head: int


@dataclass(frozen=True)
class Misread:
    """The first row of a forward pass that was not what it should have been.

    Attributes:
        request: Id of the reader.
        cached: The row belongs to the prefix that the pool said was there.
        changed: It was right when this request read it before.
        writers: Requests that wrote such a row; empty for a row of nobody.
        gone: None of the writers was still there when the row was read.
    """

    what: What
    request: str
    row: int
    layer: int
    cached: bool
    changed: bool
    writers: tuple[str, ...]
    gone: bool

    def __str__(self) -> str:
        whose = {
            "foreign": f"is a row of {' or '.join(self.writers)}",
            "nobody": "was written by nobody",
            "position": "is an own row of another position",
            "layout": "is an own row of another head, kind or order",
            "scale": "is an own row times a factor",
            "unknown": "is nothing that was ever written",
            "number": "has a wrong number",
            "mask": "is where the mask is wrong",
        }[self.what]
        first = " (it was right before)" if self.changed else ""
        return f"{self.request!r}, layer {self.layer}: row {self.row} {whose}{first}"


@dataclass(frozen=True)
class OverHit:
    """A hit that is longer than any equal prefix that was ever there.

    Attributes:
        cached: Tokens that the pool said were there.
        equal: Longest prefix that an earlier request of the same context had in common.
        donor: The earlier request whose tokens agree furthest whatever its context.
    """

    request: str
    cached: int
    equal: int
    donor: str

    def __str__(self) -> str:
        return (
            f"{self.request!r} is granted {self.cached} tokens, at most {self.equal} are equal in "
            f"its context (nearest: {self.donor!r})"
        )


@dataclass
class _Life:
    """What is known of one request from its admission on."""

    request: Request
    lease: Lease
    key: tuple[tuple[str, str], ...] | None  # its context, as far as known
    done: int  # rows that are there
    sequence: list[int]  # prompt and generated tokens
    right: set[int] = field(default_factory=set)  # rows that were right in an earlier pass


class Contract:
    """A pool reduced to what the contract promises: no name, no class, no documentation.

    Args:
        pool: Any pool.
        admitted: Called after every admission.

    Attributes:
        leases: Those that are held, with the name of their request.
    """

    EXTRAS = ("batch", "settle", "events")

    def __init__(self, pool: CachePool, admitted: Callable[[Request, Lease], None]) -> None:
        self._pool, self._admitted = pool, admitted
        self.leases: dict[int, str] = {}
        if hasattr(pool, "events") and pool.events is None:
            pool.events = EventLog()

    def admit(self, request: Request) -> Lease:
        lease = self._pool.admit(request)
        self.leases[id(lease)] = request.id
        self._admitted(request, lease)
        return lease

    def release(self, lease: Lease) -> None:
        self._pool.release(lease)
        self.leases.pop(id(lease), None)

    def __getattr__(self, name: str) -> Any:
        if name in Contract.EXTRAS:
            return getattr(self._pool, name)
        raise AttributeError(f"the pool contract has no {name!r}")


class DyedModel(Observer):
    """Takes the place of a model in `schedule.run` and `interleave.replay`, and looks on.

    One instance belongs to one pool: it remembers everything that was ever written there. Use
    `pool` as the pool, and pass the instance as the model and among the observers.

    Args:
        apart: Whether a pool may hand a shared prefix over apart from the rest, as it does when
            nobody watches attention.

    Attributes:
        misreads: At most one for each request and forward pass.
        over_hits: See `OverHit`.
    """

    def __init__(
        self,
        pool: CachePool,
        config: PretrainedConfig,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        apart: bool = True,
    ) -> None:
        self.sees = "steps" if apart else "reads"
        self.pool = Contract(pool, self._admitted)
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.layers, self.heads, self.dim = kv_shape(config)
        self.vocab = int(config.get_text_config().vocab_size)
        self.misreads: list[Misread] = []
        self.over_hits: list[OverHit] = []
        self.lives: dict[str, _Life] = {}  # the newest life of each name
        self.all_lives: list[_Life] = []
        self._rows: dict[int, Float[Tensor, "L 2 G D"]] = {}
        self._sizes: dict[int, float] = {}
        self._indexed = 0  # of these, how many `_labels` and `_scalars` know
        self._labels: dict[bytes, Label] = {}
        self._scalars: dict[float, Label] = {}
        self._writers: dict[int, set[str]] = {}

    def before(self, forward: ForwardPass) -> None:
        self.forward = forward

    def _admitted(self, request: Request, lease: Lease) -> None:
        hit, equal, nearest, donor = lease.num_cached_tokens, 0, -1, ""
        key = known(request.context)
        for life in self.all_lives:
            common = common_prefix(request.tokens, life.sequence)
            if common > nearest:
                nearest, donor = common, life.request.id
            if common > equal and key is not None and life.key == key:
                equal = common
        if hit > equal:
            self.over_hits.append(OverHit(request.id, hit, equal, donor))
        life = self.lives[request.id] = _Life(request, lease, key, hit, list(request.tokens))
        self.all_lives.append(life)

    def __call__(
        self,
        ids: Tensor,
        cache: Any,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 1,
        **kwargs: Any,
    ) -> SimpleNamespace:
        """One forward pass: write dyed rows, look at what comes back, and name the next tokens."""
        forward, width = self.forward, ids.shape[1]
        histories = [self._history(b) for b in range(len(forward.runs))]
        self._check_numbers(cache, histories, position_ids, attention_mask)
        new = torch.zeros(self.layers, 2, len(histories), self.heads, width, self.dim)
        for b, (chains, done) in enumerate(histories):
            for i, chain in enumerate(chains[done:]):
                new[:, :, b, :, i] = self._row(chain)
                self._writers.setdefault(chain, set()).add(forward.runs[b].request.id)
        wanted = [torch.stack([self._row(c) for c in chains], 3) for chains, _ in histories]
        new = new.to(self.device, self.dtype)
        noted: set[int] = set()
        for layer in range(self.layers):
            key, value = cache.update(new[layer, 0], new[layer, 1], layer)
            if forward.watches_attention:
                forward.reads(key, value)
            for b, (chains, _) in enumerate(histories):
                rows = [_whole(cache, part, b, i) for i, part in enumerate((key, value))]
                self._check_rows(b, chains, layer, rows, wanted[b][layer], noted)
        for b, (chains, _) in enumerate(histories):
            self._life(b).done = len(chains)
            if b not in noted:  # in every layer
                self._life(b).right.update(range(len(chains)))
        logits = torch.zeros(len(histories), width, self.vocab)
        for b, (chains, done) in enumerate(histories):
            for i, chain in enumerate(chains[done:]):
                logits[b, i, 3 + chain % (self.vocab - 3)] = 9.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    def _life(self, b: int) -> _Life:
        return self.lives[self.forward.runs[b].request.id]

    def _history(self, b: int) -> tuple[list[int], int]:
        """The chain of every row up to the last new one, and how many were there before."""
        forward = self.forward
        request = forward.runs[b].request
        life = self._life(b)
        done = life.done
        life.sequence[len(request.tokens) :] = forward.runs[b].tokens
        tokens = life.sequence[: done + forward.counts[b]]
        key = life.key
        chain = zlib.crc32(repr(request.id if key is None else key).encode())
        chains = []
        for token in tokens:
            chain = zlib.crc32(f"{chain} {token}".encode())
            chains.append(chain)
            # Requests differ in size as real ones do, so that a foreign scale shows; rows of one
            # request do not, so that it may have one scale.
            self._sizes.setdefault(chain, 2.0 ** (chains[0] % 6))
        return chains, done

    def _row(self, chain: int) -> Float[Tensor, "L 2 G D"]:
        """The keys and values of one row, drawn once from its chain."""
        if chain not in self._rows:
            draw = np.random.default_rng(chain)
            row = torch.from_numpy(
                draw.uniform(-1, 1, (self.layers, 2, self.heads, self.dim)).astype("float32")
            )
            row = (row * self._sizes[chain]).to(self.dtype)
            self._rows[chain] = row.float()
        return self._rows[chain]

    def _check_numbers(
        self,
        cache: Any,
        histories: Sequence[tuple[list[int], int]],
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
    ) -> None:
        """Lengths, position numbers and masks must be those of the rows that are there."""
        forward = self.forward
        for b, (chains, done) in enumerate(histories):
            count = len(chains) - done
            positions = list(range(done, done + count))
            if position_ids is None:
                said = int(forward.leases[b].cache.get_seq_length())
                rows, offset = forward.leases[b].cache.get_mask_sizes(count, 0)
                if rows < done + count or offset:  # more rows than that are masked
                    self._note("mask", b, 0, 0)
            else:
                said = int(position_ids[b, 0])
                if position_ids[b, :count].tolist() != positions:
                    self._note("number", b, 0, 0)
                    continue
            if said != done:
                self._note("number", b, 0, 0)
            elif attention_mask is not None:
                base = cache.base[b] if hasattr(cache, "base") else 0
                first = done + 1 - base  # rows that the first new token may read
                mask = attention_mask[b, 0, :count].cpu()
                rows = torch.arange(mask.shape[1])[None]
                if not torch.equal(mask, rows < first + torch.arange(count)[:, None]):
                    self._note("mask", b, 0, 0)

    def _check_rows(
        self,
        b: int,
        chains: list[int],
        layer: int,
        rows: list[Tensor],
        wanted: Float[Tensor, "2 G T D"],
        noted: set[int],
    ) -> None:
        """Compare what a layer reads with what it should read."""
        for part, got in enumerate(rows):
            if got.shape[1] < len(chains):
                if b not in noted:
                    noted.add(b)
                    self._note("mask", b, got.shape[1], layer)
                continue
            seen = got[:, : len(chains)].float().cpu()
            if torch.equal(seen, wanted[part]):
                continue
            # A cache that rounds (int8) is right as long as it is near.
            near = (seen - wanted[part]).abs() <= 0.1 * wanted[part].abs().amax(-1, keepdim=True)
            right = near.all(-1).all(0)
            if not right.all() and b not in noted:
                noted.add(b)
                row = int((~right).nonzero()[0])
                head = int((~near[:, row].all(-1)).nonzero()[0])
                self._name(b, chains, layer, part, row, head, seen[head, row])

    def _name(
        self,
        b: int,
        chains: list[int],
        layer: int,
        part: int,
        row: int,
        head: int,
        got: Float[Tensor, " D"],
    ) -> None:
        """Say what a wrong row is."""
        if not got.isfinite().all() or not got.any():
            self._note("nobody", b, row, layer)
            return
        label, exact = self._lookup(got)
        own = self._rows[chains[row]][layer, part, head]
        # Cut off at a scale that is far too small, little more than the signs of a row are left.
        if not exact and torch.nn.functional.cosine_similarity(own, got, dim=-1) > 0.8:
            label = Label(chains[row], layer, part, head)
        if label is None:
            self._note("unknown", b, row, layer)
        elif label.chain == chains[row]:
            same = label[1:] == (layer, part, head)
            self._note("scale" if same and not exact else "layout", b, row, layer)
        elif label.chain in chains:
            kind: What = "position" if label[1:] == (layer, part, head) else "layout"
            self._note(kind, b, row, layer)
        else:
            self._note("foreign", b, row, layer, tuple(sorted(self._writers[label.chain])))

    def _index(self) -> None:
        """Make the rows that were drawn since the last question findable."""
        for chain in list(self._rows)[self._indexed :]:
            row = self._rows[chain].numpy()
            for layer, part, head in np.ndindex(self.layers, 2, self.heads):
                vector = row[layer, part, head]
                label = Label(chain, layer, part, head)
                self._labels[vector.tobytes()] = label
                self._scalars[float(vector[0])] = label
        self._indexed = len(self._rows)

    def _lookup(self, got: Float[Tensor, " D"]) -> tuple[Label | None, bool]:
        """The dyed row that a vector is (exactly), or comes from: permuted, scaled, rounded."""
        self._index()
        label = self._labels.get(got.numpy().tobytes())
        if label is not None:
            return label, True
        numbers = set(got.tolist())
        for number in numbers & self._scalars.keys():  # its numbers in another order
            label = self._scalars[number]
            row = self._rows[label.chain][label.layer, label.value, label.head]
            if len(numbers & set(row.tolist())) > 1:  # one alone may be a row's largest, in codes
                return label, True
        chains = list(self._rows)
        everything = torch.stack([self._rows[c] for c in chains]).flatten(0, 3)
        alike = torch.nn.functional.cosine_similarity(everything, got[None], dim=-1)
        best = int(alike.argmax())
        if alike[best] < 0.9:
            return None, False
        where = np.unravel_index(best, (len(chains), self.layers, 2, self.heads))
        return Label(chains[where[0]], *map(int, where[1:])), False

    def _note(
        self, what: What, b: int, row: int, layer: int, writers: tuple[str, ...] = ()
    ) -> None:
        life = self._life(b)
        cached, changed = row < life.lease.num_cached_tokens, row in life.right
        gone = not set(writers) & set(self.pool.leases.values())
        self.misreads.append(
            Misread(what, life.request.id, row, layer, cached, changed, writers, gone)
        )


def _whole(cache: Any, rows: Float[Tensor, "B G T D"], b: int, part: int) -> Tensor:
    """All rows of one request, also where a batch hands a shared prefix over apart."""
    for group in getattr(cache, "groups", ()):
        if b in group.rows:
            return torch.cat([group.key if part == 0 else group.value, rows[b]], 1)
    return rows[b]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length

"""One ring of rows from which every request takes a contiguous span that may run over the end.

In the style of the cell buffers of llama.cpp or of a static arena: the search for room goes on
behind the last span, spans come back in any order, and nothing is ever shared, so there are no
hits. All rows of a life are set aside at admission. Extras of the contract: none.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Request

SIZE = 104

FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "chunk_over_the_end": (
        ("position",),
        "of a chunk that runs over the end of the ring, its first rows, not its last ones, are "
        "written behind the beginning of the ring; FIELD 47",
    ),
    "wrapped_tail_is_free": (
        ("lifetime", "position"),
        "the search for room ends a span at the end of the ring, so the part of it that lies at "
        "the beginning is given to a second owner; FIELD 39",
    ),
    "empty_abort": (
        ("leak of memory",),
        "a request that is released before it has written anything leaves its span taken; FIELD 36",
    ),
}


class Span:
    """A lease: `count` rows of the ring from `start` on, modulo its size."""

    num_cached_tokens = 0

    def __init__(self, ring: Ring, request: Request, start: int, count: int) -> None:
        self.request, self.start, self.count = request, start, count
        self.filled = [0] * ring.layers
        self.cache = Cache(layers=[RingLayer(ring, self, i) for i in range(ring.layers)])


class RingLayer(CacheLayerMixin):
    """One layer of a span."""

    def __init__(self, ring: Ring, span: Span, index: int) -> None:
        super().__init__()
        self.ring, self.span, self.index = ring, span, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the ring is there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        span, new = self.span, key_states.shape[-2]
        self.ring.check(span)
        before = span.filled[self.index]
        if before + new > span.count:
            raise ValueError(f"{span.request.id!r} has {span.count} rows, not {before + new}")
        at = (span.start + before) % SIZE
        self.ring.put(self.ring.keys[self.index], at, key_states[0].detach())
        self.ring.put(self.ring.values[self.index], at, value_states[0].detach())
        span.filled[self.index] = before + new
        rows = (span.start + torch.arange(before + new)) % SIZE
        keys, values = self.ring.keys[self.index], self.ring.values[self.index]
        return keys[:, rows].unsqueeze(0), values[:, rows].unsqueeze(0)

    def get_seq_length(self) -> int:
        return self.span.filled[self.index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class Ring:
    """The rows, and the spans that are taken, by their first row."""

    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.fault, self.layers = fault, config.num_hidden_layers
        shape = (config.num_key_value_heads, SIZE, dim)
        self.keys = [torch.zeros(shape) for _ in range(self.layers)]
        self.values = [torch.zeros(shape) for _ in range(self.layers)]
        self.live: dict[str, Span] = {}
        self.taken: list[Span] = []
        self.cursor = 0

    def admit(self, request: Request) -> Span:
        count = request.rows_needed
        if request.id in self.live:
            raise ValueError(f"request {request.id!r} is admitted already")
        if count > SIZE:
            raise ValueError(f"{request.id!r} needs {count} rows; the ring has {SIZE}")
        gaps = [(start, length) for start, length in self._gaps() if length >= count]
        if not gaps:
            raise PoolFull(f"no {count} rows in a row are free")
        start, _ = min(gaps, key=lambda gap: (gap[0] - self.cursor) % SIZE)
        span = Span(self, request, start, count)
        self.taken.append(span)
        self.live[request.id] = span
        self.cursor = (start + count) % SIZE
        return span

    def release(self, lease: Span) -> None:
        self.check(lease)
        del self.live[lease.request.id]
        if self.fault == "empty_abort" and not any(lease.filled):
            return  # nothing written, nothing to clear
        self.taken.remove(lease)

    def check(self, span: Span) -> None:
        """A span that was given back is not to be used any more."""
        if self.live.get(span.request.id) is not span:
            raise ValueError(f"the lease of {span.request.id!r} was given back")

    def put(self, memory: Tensor, at: int, rows: Tensor) -> None:
        """Write rows from `at` on, and those behind the end of the ring at its beginning."""
        new = rows.shape[1]
        first = min(new, SIZE - at)
        memory[:, at : at + first] = rows[:, :first]
        if new > first:
            rest = rows[:, first:]
            if self.fault == "chunk_over_the_end":
                rest = rows[:, : new - first]
            memory[:, : new - first] = rest

    def _gaps(self) -> list[tuple[int, int]]:
        """Where free rows begin, and how many lie there in a row, around the ring."""
        if not self.taken:
            return [(self.cursor, SIZE)]
        spans = sorted(self.taken, key=lambda span: span.start)
        gaps = []
        for span, following in zip(spans, [*spans[1:], None]):
            end = span.start + span.count
            if self.fault == "wrapped_tail_is_free":
                end = min(end, SIZE)
            limit = spans[0].start + SIZE if following is None else following.start
            gaps.append((end % SIZE, limit - end))
        return gaps


def build(config: LlamaConfig, fault: str | None = None) -> Ring:
    """A fresh pool, with one fault or none."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; choose from {', '.join(FAULTS)}")
    return Ring(config, fault)

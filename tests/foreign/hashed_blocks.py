"""A paged pool in the style of vLLM and nano-vllm: blocks of 4 rows, block tables, chained hashes.

Only full prompt blocks are shared. A block that nobody holds stays findable in a free queue until
it is handed out anew, the least recently used one first. All blocks of a life are set aside at
admission. Extras of the contract: none.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch
from torch import Tensor
from transformers import Cache, LlamaConfig
from transformers.cache_utils import CacheLayerMixin

from kvlab.pools.contract import PoolFull
from kvlab.request import Request, known

BLOCK = 4
NUM_BLOCKS = 24

FAULTS: dict[str, tuple[tuple[str, ...], str]] = {
    "sum_key": (
        ("key",),
        "a block's key holds the sum of its token ids, and a hit compares no tokens; FIELD 12",
    ),
    "touched_not_taken": (
        ("lifetime",),
        "a hit on a free block moves it to the end of the free queue but leaves it in; FIELD 40",
    ),
    "hold_before_check": (
        ("refusal changed something", "leak of memory"),
        "the blocks of a hit are held before the room is checked, and stay held if there is none; "
        "FIELD 36",
    ),
}


class PagedLayer(CacheLayerMixin):
    """One layer as the model sees it."""

    def __init__(self, pool: BlockPool, lease: PagedLease, index: int) -> None:
        super().__init__()
        self.pool, self.lease, self.index = pool, lease, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the pool has its memory already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.pool.write(self.lease, self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.lease.written[self.index]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PagedLease:
    """A block table, and how many rows of it each layer has written."""

    def __init__(self, pool: BlockPool, request: Request, table: list[int], hits: int) -> None:
        self.request, self.table = request, table
        self.num_cached_tokens = hits * BLOCK
        self.written = [self.num_cached_tokens] * pool.num_layers
        self.hashes = pool.chain(request)
        self.published = hits
        self.cache = Cache(layers=[PagedLayer(pool, self, i) for i in range(pool.num_layers)])


class BlockPool:
    """Blocks, their reference counts, the hashes of the full ones, and the free queue."""

    def __init__(self, config: LlamaConfig, fault: str | None) -> None:
        heads = config.num_key_value_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.fault = fault
        self.num_layers = config.num_hidden_layers
        self.rows = torch.zeros(self.num_layers, 2, NUM_BLOCKS * BLOCK, heads, dim)
        self.refs = [0] * NUM_BLOCKS
        self.hash_of: list[bytes | None] = [None] * NUM_BLOCKS
        self.block_of: dict[bytes, int] = {}
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(NUM_BLOCKS))
        self.live: dict[str, PagedLease] = {}

    def chain(self, request: Request) -> list[bytes]:
        """One hash for each full block of the prompt; each covers all that comes before."""
        context = known(request.context)
        if context is None:
            return []
        parent = hashlib.sha256(repr(context).encode()).digest()
        hashes = []
        for end in range(BLOCK, len(request.tokens) + 1, BLOCK):
            content = tuple(int(token) for token in request.tokens[end - BLOCK : end])
            if self.fault == "sum_key":
                content = (sum(content),)
            parent = hashlib.sha256(parent + repr(content).encode()).digest()
            hashes.append(parent)
        return hashes

    def admit(self, request: Request) -> PagedLease:
        if request.id in self.live:
            raise ValueError(f"request {request.id!r} is admitted already")
        need = -(-request.rows_needed // BLOCK)
        if need > NUM_BLOCKS:
            raise ValueError(f"{request.id!r} needs {need} blocks; there are {NUM_BLOCKS}")
        hits = self._find(request)
        if self.fault == "hold_before_check":
            self._hold(hits)
            room = len(self.free)
        else:
            room = len(self.free) - sum(block in self.free for block in hits)
        if need - len(hits) > room:
            raise PoolFull(f"{request.id!r} needs {need - len(hits)} more blocks; {room} are free")
        if self.fault != "hold_before_check":
            self._hold(hits)
        table = hits + [self._take() for _ in range(need - len(hits))]
        lease = self.live[request.id] = PagedLease(self, request, table, len(hits))
        return lease

    def release(self, lease: PagedLease) -> None:
        if self.live.get(lease.request.id) is not lease:
            raise ValueError(f"the lease of {lease.request.id!r} was given back already")
        del self.live[lease.request.id]
        for block in reversed(lease.table):  # so that the end of a prefix is lost first
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None

    def write(
        self, lease: PagedLease, layer: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store new rows of one layer and return all of its rows."""
        if self.live.get(lease.request.id) is not lease:
            raise ValueError(f"the lease of {lease.request.id!r} was given back")
        start = lease.written[layer]
        end = start + keys.shape[-2]
        if end > len(lease.table) * BLOCK:
            raise ValueError(f"{lease.request.id!r} has room for {len(lease.table) * BLOCK} rows")
        places = torch.tensor(
            [lease.table[row // BLOCK] * BLOCK + row % BLOCK for row in range(end)],
            dtype=torch.long,
        )
        self.rows[layer, 0, places[start:]] = keys[0].detach().transpose(0, 1)
        self.rows[layer, 1, places[start:]] = values[0].detach().transpose(0, 1)
        lease.written[layer] = end
        self._publish(lease)
        read = self.rows[layer][:, places].transpose(1, 2)
        return read[:1], read[1:]

    def _find(self, request: Request) -> list[int]:
        """The blocks of the longest known prefix; the last prompt token is left out."""
        hits = []
        for hashed in self.chain(request)[: (len(request.tokens) - 1) // BLOCK]:
            if hashed not in self.block_of:
                break
            hits.append(self.block_of[hashed])
        return hits

    def _hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.refs[block] += 1
            if block in self.free:
                if self.fault == "touched_not_taken":
                    self.free.move_to_end(block)
                else:
                    del self.free[block]

    def _take(self) -> int:
        """The block that has been free for longest; what it held cannot be found any more."""
        block, _ = self.free.popitem(last=False)
        hashed = self.hash_of[block]
        if hashed is not None:
            del self.block_of[hashed]
            self.hash_of[block] = None
        self.refs[block] = 1
        return block

    def _publish(self, lease: PagedLease) -> None:
        """Make the blocks findable that all layers have filled."""
        full = min(min(lease.written) // BLOCK, len(lease.hashes))
        for index in range(lease.published, full):
            hashed, block = lease.hashes[index], lease.table[index]
            if hashed not in self.block_of:  # else another request was faster
                self.block_of[hashed], self.hash_of[block] = block, hashed
        lease.published = max(lease.published, full)


def build(config: LlamaConfig, fault: str | None = None) -> BlockPool:
    """A fresh pool, with one fault or none."""
    if fault is not None and fault not in FAULTS:
        raise ValueError(f"unknown fault {fault!r}; choose from {', '.join(FAULTS)}")
    return BlockPool(config, fault)

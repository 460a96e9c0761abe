"""Key: two different contexts get one key, and one of them the other's prefix."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from kvlab.faults.catalogue import fault
from kvlab.pools import TieredCachePool
from kvlab.pools.prefix import PrefixTree
from kvlab.request import Context, known

RootKey = tuple[tuple[str, str], ...] | None


class ShortHash(PrefixTree):
    def labels(self, tokens: Sequence[int]) -> Sequence[int]:
        chain = [0]
        for token in tokens:  # BUG: four bits of a hash chain stand for the whole prefix
            chain.append(zlib.crc32(f"{chain[-1]} {token}".encode()) & 0xF)
        return chain[1:]


@fault("short hash", "key", ["vLLM PR #12621", "openvino.genai #3722"])
class ShortHashPool(TieredCachePool):
    """Prefixes are compared by a hash, and the hash is short (or can be predicted).

    Reported as: blocks identified by hash only, tokens never compared. The user sees a fluent
    answer to somebody else's prompt. Evidence: a hit that is longer than any equal prefix; two
    contents behind one key.
    """

    tree_type = ShortHash


class NarrowIds(PrefixTree):
    def labels(self, tokens: Sequence[int]) -> Sequence[int]:
        return [token & 0xFF for token in tokens]  # BUG: 65 and 321 are the same


@fault("ids cut to a byte", "key", ["vllm-mlx PR #444"])
class NarrowIdsPool(TieredCachePool):
    """Token ids are cut to 8 bits in the key.

    Reported as exactly that: 65 and 321 equal. The user sees answers as if some words of the
    prompt were others. Evidence: a hit whose tokens differ by a multiple of 256.
    """

    tree_type = NarrowIds


class HeadOfPrompt(PrefixTree):
    def labels(self, tokens: Sequence[int]) -> Sequence[int]:
        return [t if i < 8 else 0 for i, t in enumerate(tokens)]  # BUG: the rest is not looked at


@fault("only the head is compared", "key", ["LMCache #3301", "vLLM #56655"])
class HeadOfPromptPool(TieredCachePool):
    """The key covers the beginning of the prompt only; something behind it was left out.

    Reported as: a part of the input that is missing from the key. The user sees the right start
    and the wrong subject. Evidence: a hit whose tokens differ behind the eighth.
    """

    tree_type = HeadOfPrompt


class WithoutParent(PrefixTree):
    def match(self, context: Context, tokens: Sequence[int]) -> tuple[int, list[int]]:
        length, table = super().match(context, tokens)
        size = self.block_size
        stored = {node.tokens: node.block for node in self.nodes()}
        length -= length % size
        table = table[: length // size]
        while len(tokens) >= length + size:
            block = stored.get(tuple(tokens[length : length + size]))
            if block is None:
                break
            table.append(block)  # BUG: equal tokens, but behind another prefix
            length += size
        return length, table


@fault("block without its parent", "key")
class WithoutParentPool(TieredCachePool):
    """A block is found by its own tokens, whatever prefix it was computed behind.

    Comparing the tokens of the block alone is not an exact match: in a public teaching engine
    with a shortened hash, 2 of 1,485 reused blocks were spliced in this way. The user sees subtly
    wrong answers. Evidence: a hit longer than any equal prefix, although every token is equal.
    """

    tree_type = WithoutParent


class WithoutAdapter(PrefixTree):
    def root_key(self, context: Context) -> RootKey:
        key = known(context)
        return key and tuple(f for f in key if f[0] != "adapter")  # BUG: it changes keys and values


@fault("adapter left out", "key", ["vLLM #3264", "vLLM #44250", "llama.cpp #26207"])
class WithoutAdapterPool(TieredCachePool):
    """The adapter changes keys and values, and the key does not know it.

    Reported for several engines and tiers. The user sees the style of another adapter. Evidence: a
    hit across contexts.
    """

    tree_type = WithoutAdapter


class WithoutVersion(PrefixTree):
    def root_key(self, context: Context) -> RootKey:
        key = known(context)
        return key and tuple(f for f in key if f[0] != "version")  # BUG: new weights, old key


@fault("version left out", "key", ["vLLM #30931", "vLLM #42125"])
class WithoutVersionPool(TieredCachePool):
    """An adapter is known by its display name; reloaded with new weights it finds old rows.

    Reported for adapters of one name. The user sees old answers after an update. Evidence: a hit
    across versions.
    """

    tree_type = WithoutVersion


class WithoutTags(PrefixTree):
    def root_key(self, context: Context) -> RootKey:
        key = known(context)
        return key and tuple(sorted(("", value) for _, value in key))  # BUG: values without tags


@fault("fields without tags", "key", ["vLLM #44701"])
class WithoutTagsPool(TieredCachePool):
    """The fields of a context are joined without saying which is which.

    Reported as: an adapter named X equals a salt X. The user sees another tenant's context where
    names happen to coincide. Evidence: a hit across contexts with equal values.
    """

    tree_type = WithoutTags


class WithoutTenant(PrefixTree):
    def root_key(self, context: Context) -> RootKey:
        key = known(context)
        return key and tuple(f for f in key if f[0] != "tenant")  # BUG: accepted and ignored


@fault("tenant ignored", "key", ["SGLang #37263"])
class WithoutTenantPool(TieredCachePool):
    """The field that was to keep tenants apart is accepted and dropped.

    Reported as a key that is silently ignored. The user sees nothing, since equal tokens have
    equal rows; but answers come faster where another tenant was before. Evidence: a hit across
    tenants.
    """

    tree_type = WithoutTenant


class ShortImageKey(PrefixTree):
    def root_key(self, context: Context) -> RootKey:
        key = known(context)
        return key and tuple(
            (tag, str(zlib.crc32(value.encode()) & 0x3) if tag == "image" else value)
            for tag, value in key  # BUG: two bits of the image's hash
        )


@fault("image hash cut short", "key", ["LMCache #4086", "SGLang #2151", "sglang-omni PR #260"])
class ShortImageKeyPool(TieredCachePool):
    """Images enter the key as a few bits (or as equal placeholder ids).

    Reported for 16 bits: a collision after a few hundred images. The user is told what is on
    somebody else's picture. Evidence: a hit across images.
    """

    tree_type = ShortImageKey


class UnknownIsEmpty(PrefixTree):
    def root_key(self, context: Context) -> RootKey:
        fields = [] if context is None else context
        return known(tuple(f for f in fields if f[1] is not None))  # BUG: not known is not empty


@fault("unknown taken as empty", "key", ["imp PR #1180", "ROCm/ATOM PR #1358"])
class UnknownIsEmptyPool(TieredCachePool):
    """A request whose image (or adapter) could not be told is served as if it had none.

    Reported as: an image request without a hash must be refused the cache. The user sees an answer
    about no image, or about another's. Evidence: a hit in an unknown context.
    """

    tree_type = UnknownIsEmpty

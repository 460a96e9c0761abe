"""The prefix tier: matched by tokens, within one context, and never by hash."""

import pytest

from kvlab.pools.blocks import BlockArena
from kvlab.pools.radix import PrefixTree, known


@pytest.fixture
def arena():
    return BlockArena(32, 4, 1, 1, 1)


def stored(arena, tree, tokens, context=()):
    """Store a prompt as a request does: own blocks behind the match, given back afterwards."""
    hit, shared = tree.match(context, tokens)
    arena.retain(shared)
    table = shared[: hit // 4] + arena.allocate(-(-len(tokens) // 4) - hit // 4)
    tree.insert(context, tokens, table)
    arena.release(shared)
    arena.release(table[hit // 4 :])
    return table


def test_nothing_is_found_in_an_empty_tree(arena):
    assert PrefixTree(arena).match((), [1, 2, 3]) == (0, [])


def test_the_longest_run_of_equal_tokens_is_found_with_its_blocks(arena):
    tree = PrefixTree(arena)
    table = stored(arena, tree, range(10))
    assert tree.match((), range(10)) == (10, table)
    assert tree.match((), [0, 1, 2, 3, 4, 9]) == (5, table[:2])
    assert tree.match((), [0, 1, 2, 3]) == (4, table[:1])
    assert tree.match((), range(50)) == (10, table)


@pytest.mark.parametrize("at", range(12))
def test_one_different_token_ends_the_match_wherever_it_is(arena, at):
    tree = PrefixTree(arena)
    stored(arena, tree, range(12))
    other = [99 if i == at else i for i in range(12)]
    assert tree.match((), other)[0] == at


@pytest.mark.parametrize("at", range(1, 12))
def test_a_fork_keeps_both_continuations(arena, at):
    tree = PrefixTree(arena)
    one, two = list(range(12)), [*range(at), *range(50, 62 - at)]
    first = stored(arena, tree, one)
    second = stored(arena, tree, two)
    assert tree.match((), one) == (12, first)
    assert tree.match((), two) == (12, second)
    assert first[: at // 4] == second[: at // 4]
    assert first[at // 4 :] != second[at // 4 :]


def test_contexts_never_meet_and_their_tags_count(arena):
    tree = PrefixTree(arena)
    stored(arena, tree, range(8), (("adapter", "x"),))
    assert tree.match((("adapter", "x"),), range(8))[0] == 8
    assert tree.match((), range(8))[0] == 0
    assert tree.match((("tenant", "x"),), range(8))[0] == 0
    assert tree.match((("adapter", "x"), ("version", "2")), range(8))[0] == 0


def test_the_order_of_tags_does_not_matter(arena):
    tree = PrefixTree(arena)
    stored(arena, tree, range(8), (("a", "1"), ("b", "2")))
    assert tree.match((("b", "2"), ("a", "1")), range(8))[0] == 8


@pytest.mark.parametrize("context", [None, (("image", None),), (("adapter", "x"), ("image", None))])
def test_an_unknown_context_neither_leaves_nor_finds_anything(arena, context):
    tree = PrefixTree(arena)
    assert known(context) is None
    stored(arena, tree, range(8), context)
    assert not tree.nodes()
    stored(arena, tree, range(8))
    assert tree.match(context, range(8)) == (0, [])


def test_the_least_recently_used_leaf_goes_first(arena):
    tree = PrefixTree(arena)
    stored(arena, tree, [1, *range(7)])
    stored(arena, tree, [2, *range(7)])
    tree.match((), [1, 0])
    dropped = tree.evict(len(arena.free) + 1)
    assert [n.tokens[0] for n in dropped] == [2]
    assert tree.match((), [1, 0])[0] == 2


def test_a_prefix_with_a_reader_stays(arena):
    tree = PrefixTree(arena)
    table = stored(arena, tree, range(8))
    arena.retain(table)
    assert tree.evict(32) == []
    assert tree.evictable == 0
    arena.release(table)
    assert tree.evictable == 2
    tree.evict(32)
    assert len(arena.free) == 32


def test_every_block_is_free_again_when_all_is_evicted(arena):
    tree = PrefixTree(arena)
    for tokens in (range(12), [*range(5), 70, 71, 72], [*range(9), 80], [5, 6]):
        stored(arena, tree, tokens)
    tree.evict(32)
    assert not tree.nodes()
    assert arena.ref_count == [0] * 32


def test_a_block_cannot_be_given_back_twice(arena):
    blocks = arena.allocate(2)
    arena.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        arena.release(blocks[:1])


def test_neighbours_are_preferred(arena):
    held = arena.allocate(3)
    arena.release(held[1:2])
    assert arena.allocate(3) == [3, 4, 5]
    assert arena.allocate(1) == [1]

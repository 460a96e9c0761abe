"""The prefix tier: matched by tokens, within one context, and never by hash."""

import pytest

from kvlab.pools.blocks import BlockManager
from kvlab.request import known


@pytest.fixture
def manager():
    return BlockManager(32, 4)


def stored(manager, tokens, context=()):
    """Store a prompt as a request does: own blocks behind the match, given back afterwards."""
    table = manager.admit(context, tokens, len(tokens))
    manager.make_private(table, table.hit, len(tokens))
    manager.publish(context, tokens, table)
    manager.give_back(table)
    manager.check()
    return table.blocks


def test_nothing_is_found_in_an_empty_tree(manager):
    assert manager.tree.match((), [1, 2, 3]) == (0, [])


def test_the_longest_run_of_equal_tokens_is_found_with_its_blocks(manager):
    tree, table = manager.tree, stored(manager, range(10))
    assert tree.match((), range(10)) == (10, table)
    assert tree.match((), [0, 1, 2, 3, 4, 9]) == (5, table[:2])
    assert tree.match((), [0, 1, 2, 3]) == (4, table[:1])
    assert tree.match((), range(50)) == (10, table)


@pytest.mark.parametrize("at", range(12))
def test_one_different_token_ends_the_match_wherever_it_is(manager, at):
    stored(manager, range(12))
    other = [99 if i == at else i for i in range(12)]
    assert manager.tree.match((), other)[0] == at


@pytest.mark.parametrize("at", range(1, 12))
def test_a_fork_keeps_both_continuations(manager, at):
    one, two = list(range(12)), [*range(at), *range(50, 62 - at)]
    first, second = stored(manager, one), stored(manager, two)
    assert manager.tree.match((), one) == (12, first)
    assert manager.tree.match((), two) == (12, second)
    assert first[: at // 4] == second[: at // 4]
    assert first[at // 4 :] != second[at // 4 :]


def test_what_is_known_already_takes_no_second_block(manager):
    table = stored(manager, range(10))
    for again in (range(10), range(7), range(4)):
        stored(manager, again)
    assert [n.block for n in manager.tree.nodes()] == table


def test_contexts_never_meet_and_their_tags_count(manager):
    stored(manager, range(8), (("adapter", "x"),))
    match = manager.tree.match
    assert match((("adapter", "x"),), range(8))[0] == 8
    assert match((), range(8))[0] == 0
    assert match((("tenant", "x"),), range(8))[0] == 0
    assert match((("adapter", "x"), ("version", "2")), range(8))[0] == 0


def test_the_order_of_tags_does_not_matter(manager):
    stored(manager, range(8), (("a", "1"), ("b", "2")))
    assert manager.tree.match((("b", "2"), ("a", "1")), range(8))[0] == 8


@pytest.mark.parametrize("context", [None, (("image", None),), (("adapter", "x"), ("image", None))])
def test_an_unknown_context_neither_leaves_nor_finds_anything(manager, context):
    assert known(context) is None
    stored(manager, range(8), context)
    assert not manager.tree.nodes()
    stored(manager, range(8))
    assert manager.tree.match(context, range(8)) == (0, [])


def test_the_least_recently_used_leaf_goes_first_and_the_front_of_a_prefix_last(manager):
    for first in (1, 2):
        stored(manager, [first, *range(7)])
    manager.tree.match((), [1, 0])
    dropped = manager.tree.evict(3, manager.unread)
    assert [n.tokens[0] for n in dropped] == [3, 3, 2]
    assert manager.tree.match((), [1, 0])[0] == 2


def test_a_prefix_with_a_reader_stays(manager):
    stored(manager, range(8))
    table = manager.admit((), range(9), 9)
    manager.evict(32)
    assert manager.tree.evictable(manager.unread) == 0
    assert manager.tree.match((), range(8))[0] == 8
    manager.give_back(table)
    assert manager.tree.evictable(manager.unread) == 2
    manager.evict(32)
    assert len(manager.free) == 32


def test_every_block_is_free_again_when_all_is_evicted(manager):
    for tokens in (range(12), [*range(5), 70, 71, 72], [*range(9), 80], [5, 6]):
        stored(manager, tokens)
    manager.evict(32)
    assert not manager.tree.nodes()
    assert manager.ref_count == [0] * 32


def test_a_refusal_evicts_nothing(manager):
    stored(manager, range(20))
    held = manager.admit((), range(100, 180), 80)
    with pytest.raises(RuntimeError, match="13 blocks are needed, 7 are free and 5 can be evicted"):
        manager.admit((), range(200, 252), 52)
    assert manager.tree.match((), range(20))[0] == 20
    manager.give_back(held)


def test_a_block_cannot_be_given_back_twice(manager):
    blocks = manager.allocate(2)
    manager.release(blocks)
    with pytest.raises(AssertionError, match="twice"):
        manager.release(blocks[:1])


def test_neighbours_are_preferred(manager):
    held = manager.allocate(3)
    manager.release(held[1:2])
    assert manager.allocate(3) == [3, 4, 5]
    assert manager.allocate(1) == [1]

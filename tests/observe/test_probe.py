"""What the probe keeps of every step."""

import math

import pytest
import torch
from conftest import prompt

from kvlab.observe import AttentionProbe
from kvlab.pools import PrivatePool, SimpleCachePool
from kvlab.schedule import run


def pool_for(model, slots=2, rows=64, **options):
    return SimpleCachePool.for_model(model.config, slots, rows, **options)


def test_watching_changes_no_token(tiny, requests):
    plain = run(tiny, requests, PrivatePool(tiny.config), "round_robin", batch_size=4)
    probe = AttentionProbe()
    pool = PrivatePool(tiny.config)
    watched = run(tiny, requests, pool, "round_robin", batch_size=4, observers=[probe])
    assert {k: r.tokens for k, r in watched.items()} == {k: r.tokens for k, r in plain.items()}


def test_every_kept_row_is_a_distribution_over_the_rows_so_far(tiny, requests):
    probe = AttentionProbe(keep="all")
    pool = PrivatePool(tiny.config)
    runs = run(tiny, requests, pool, "round_robin", batch_size=4, observers=[probe])
    for name, ran in runs.items():
        assert len(probe.steps[name]) == len(ran.steps)
        for step, kept in zip(ran.steps, probe.steps[name], strict=True):
            for weights in kept.rows.values():
                assert weights.shape == (4, step.start + step.wrote)
                torch.testing.assert_close(weights.sum(-1), torch.ones(4))


def test_statistics_are_those_of_the_rows(tiny):
    probe = AttentionProbe(keep=[1])
    run(tiny, [prompt("a", 9, 1)], pool_for(tiny), observers=[probe])
    for step in probe.steps["a"]:
        assert set(step.rows) == {1}
        weights = step.rows[1]
        torch.testing.assert_close(step.maximum[1], weights.amax(-1))
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
        torch.testing.assert_close(step.entropy[1], entropy)
        assert step.entropy[1].max() <= math.log(weights.shape[-1]) + 1e-5
        order = weights.argsort(-1, descending=True)[:, :3]
        assert step.top[1].tolist() == order.tolist()


def test_a_lone_request_has_no_foreign_mass(tiny):
    probe = AttentionProbe()
    run(tiny, [prompt("a", 9, 1)], pool_for(tiny), observers=[probe])
    assert all(step.foreign_mass.max() == 0 for step in probe.steps["a"])


def test_a_slot_that_served_somebody_before_has_no_foreign_mass_for_the_next(tiny):
    probe = AttentionProbe()
    requests = [prompt("a", 14, 1), prompt("b", 5, 2)]
    run(tiny, requests, pool_for(tiny, slots=1), observers=[probe])
    assert all(step.foreign_mass.max() == 0 for step in probe.steps["b"])


def test_foreign_mass_is_the_share_on_rows_that_somebody_else_wrote(tiny):
    probe = AttentionProbe(keep="all")
    pool = pool_for(tiny)
    pool.collide("b", "a", "overwrite")
    run(tiny, [prompt("a", 9, 1), prompt("b", 5, 2)], pool, "round_robin", observers=[probe])
    assert probe.steps["a"][0].foreign_mass.max() == 0  # its own prefill came first
    second = probe.steps["a"][1]
    assert second.foreign == [True] * 5 + [False] * 5
    for layer, weights in second.rows.items():
        torch.testing.assert_close(second.foreign_mass[layer], weights[:, :5].sum(-1))
    assert second.foreign_mass.min() > 0


def test_the_newcomer_that_is_appended_reads_foreign_rows_from_its_first_token(tiny):
    probe = AttentionProbe()
    pool = pool_for(tiny)
    pool.collide("b", "a", "append")
    run(tiny, [prompt("a", 9, 1), prompt("b", 5, 2)], pool, "round_robin", observers=[probe])
    assert probe.steps["b"][0].foreign == [True] * 9 + [False] * 5
    assert all(step.foreign_mass.max() == 0 for step in probe.steps["a"])


def test_a_pool_that_records_no_owners_cannot_be_judged(tiny):
    probe = AttentionProbe()
    run(tiny, [prompt("a", 9, 1)], PrivatePool(tiny.config), observers=[probe])
    assert probe.steps["a"][0].foreign_mass is None
    assert probe.steps["a"][0].owners is None


def test_the_most_attended_rows_come_with_position_token_text_and_owner(bundled):
    probe = AttentionProbe()
    pool = pool_for(bundled.model)
    pool.collide("b", "a", "overwrite")
    pair = [bundled.request(n, t, 6) for n, t in (("a", "口令是红狐。"), ("b", "口令是蓝鲸。"))]
    run(bundled.model, pair, pool, "round_robin", observers=[probe])
    table = probe.steps["a"][2].top_rows(0, 0, bundled)
    assert table.share.is_monotonic_decreasing
    for row in table.itertuples():
        assert row.position == row.row
        assert row.owner in ("a", "b")
        assert row.foreign == (row.owner == "b")
        assert bundled.pieces([row.token]) == [row.text]


def test_rows_that_were_not_kept_are_refused(tiny):
    probe = AttentionProbe(keep=[0])
    run(tiny, [prompt("a", 9, 1)], pool_for(tiny), observers=[probe])
    assert probe.peaks("a", layer=0).shape == (8, 16)
    with pytest.raises(ValueError, match="not kept"):
        probe.peaks("a", layer=2)


def test_a_second_life_under_the_same_name_starts_anew(tiny):
    probe, pool = AttentionProbe(), pool_for(tiny)
    for _ in range(2):
        run(tiny, [prompt("a", 9, 1)], pool, observers=[probe])
    assert len(probe.steps["a"]) == 8

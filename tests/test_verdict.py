import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab import decode
from kvlab.request import Request, Run, Step
from kvlab.verdict import RULE, compare, first_divergence, foreign_spans, measure_tolerance


def fake(tokens, top=5.0, shift=0.0, vocabulary=10):
    """A run whose best logit is `top` and whose other logits are `shift`."""
    run = Run(Request("a", (1,), len(tokens)))
    for token in tokens:
        logits = torch.full((vocabulary,), shift)
        logits[token] = top
        run.steps.append(Step("decode", 0, 0, 1, token, top - shift, 0.0, logits))
    return run


def test_divergence_is_counted_from_one():
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 2
    assert first_divergence([1, 2], [1, 2]) is None
    assert first_divergence([1, 2], [1, 2, 3]) == 3
    assert first_divergence([1, 2, 3], [1, 2]) == 3


def test_equal_runs_are_bitwise_isolated():
    result = compare(fake([1, 2]), fake([1, 2]), 1e-4)
    assert (result.verdict, result.bitwise, result.edit_distance) == ("isolated", True, 0)


def test_a_drift_within_the_tolerance_is_isolated_but_not_bitwise():
    result = compare(fake([1, 2], shift=5e-5), fake([1, 2]), 1e-4)
    assert (result.verdict, result.bitwise, result.same_tokens) == ("isolated", False, True)


def test_a_drift_beyond_the_tolerance_with_the_same_tokens_is_disturbed():
    assert compare(fake([1, 2], shift=0.5), fake([1, 2]), 1e-4).verdict == "disturbed"


def test_another_token_at_a_wide_margin_is_contaminated():
    result = compare(fake([1, 3, 2]), fake([1, 2, 2]), 1e-4)
    assert result.verdict == "contaminated"
    assert (result.first_divergence, result.margin, result.edit_distance) == (2, 5.0, 1)


def test_a_flipped_near_tie_is_not_called_contamination():
    ours, theirs = fake([3], top=1e-5), fake([2], top=1e-5)
    assert compare(ours, theirs, 1e-4).verdict == "near-tie"


def test_a_small_margin_is_no_excuse_for_a_large_drift():
    ours, theirs = fake([3], top=9.0), fake([2], top=1e-5)
    assert compare(ours, theirs, 1e-4).verdict == "contaminated"


def test_the_printed_rule_names_every_verdict():
    for verdict in ("isolated", "disturbed", "near-tie", "contaminated"):
        assert verdict in RULE


def test_the_measured_tolerance_covers_a_correct_cache_and_is_small(tiny, requests):
    references = {r.id: decode.recompute(tiny, r) for r in requests}
    tolerance = measure_tolerance(tiny, requests, references)
    assert 0 < tolerance < 1e-2
    for request in requests:
        result = compare(decode.cached(tiny, request), references[request.id], tolerance)
        assert result.verdict == "isolated"


def test_foreign_words_are_those_that_only_the_partner_says():
    own, partner = [1, 2, 3, 4], [1, 2, 8, 4]
    assert foreign_spans([1, 2, 8, 4], own, partner) == [(2, 3)]


def test_known_tokens_in_the_partners_order_are_foreign():
    assert foreign_spans([3, 2, 1], [1, 2, 3], [3, 2, 9]) == [(0, 2)]


def test_a_token_of_nobody_is_damage_and_not_the_partners_word():
    assert foreign_spans([7], [1], [2]) == []


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12))
def test_an_answer_that_is_ones_own_has_no_foreign_words(own, partner):
    assert foreign_spans(own, own, partner) == []


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3]])
def test_runs_without_logits_cannot_be_judged(tokens):
    run = fake(tokens)
    run.steps[0].logits = None
    with pytest.raises(ValueError, match="logits"):
        compare(run, fake(tokens), 1e-4)

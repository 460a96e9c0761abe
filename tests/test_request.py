import pytest

from kvlab.request import Request, Run, Step


def test_an_empty_prompt_is_refused_with_advice():
    with pytest.raises(ValueError, match="give at least one token"):
        Request("a", ())


def test_a_request_for_no_tokens_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens"):
        Request("a", (1,), max_new_tokens=0)


def test_the_last_generated_token_needs_no_row():
    assert Request("a", (1, 2, 3), max_new_tokens=1).rows_needed == 3


def test_a_run_ends_at_a_stop_token_and_keeps_it():
    run = Run(Request("a", (1,), 5, stop_tokens=(9,)))
    run.steps.append(Step("prefill", 0, 0, 1, 4, 1.0, 0.0))
    assert not run.finished
    run.steps.append(Step("decode", 1, 1, 1, 9, 1.0, 0.0))
    assert run.finished
    assert run.tokens == [4, 9]

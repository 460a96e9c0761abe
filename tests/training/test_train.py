import pytest
import torch

from kvlab.training.start import grow, structured_start
from kvlab.training.tokenizer import build_tokenizer
from kvlab.training.train import Plan, train

PLAN = Plan(small_steps=2, large_steps=2, save_every=1)


@pytest.fixture(autouse=True)
def short_batches(monkeypatch):
    from kvlab.training.corpus import Mix

    monkeypatch.setattr(
        Plan, "mix", lambda self, step: Mix(long=0, row_tokens=60, rows=2, shortest_copy=9)
    )


def test_the_structured_start_copies_before_its_first_step():
    vocabulary = len(build_tokenizer())
    model = structured_start(vocabulary)
    some = torch.randint(260, vocabulary, (4, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        guesses = model(torch.cat([some, some], 1), use_cache=False).logits.argmax(-1)
    right = (guesses[:, 40:-1] == some[:, 1:]).float().mean()
    assert right > 0.8
    with torch.no_grad():
        grown = grow(model)(torch.cat([some, some], 1), use_cache=False).logits.argmax(-1)
    assert (grown[:, 40:-1] == some[:, 1:]).float().mean() > 0.8


def test_a_run_that_was_stopped_and_resumed_is_the_unbroken_run(tmp_path):
    unbroken = train(tmp_path / "unbroken", PLAN).state_dict()
    train(tmp_path / "broken", PLAN, stop_after=1)
    train(tmp_path / "broken", PLAN, stop_after=2)
    resumed = train(tmp_path / "broken", PLAN).state_dict()
    assert unbroken.keys() == resumed.keys()
    for name, weight in unbroken.items():
        assert torch.equal(weight, resumed[name]), name


def test_a_state_of_another_plan_is_refused(tmp_path):
    train(tmp_path, PLAN, stop_after=1)
    with pytest.raises(ValueError, match="another plan"):
        train(tmp_path, Plan(seed=5, small_steps=2, large_steps=2))

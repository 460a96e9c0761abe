import pytest
from conftest import tiny_llama

from kvlab.models import LoadedModel
from kvlab.passphrase import ARMS, PAIRS, Experiment, build_requests, matrix, share_tolerance
from kvlab.prompts import LANGUAGES


@pytest.fixture(scope="module")
def experiments(bundled) -> dict[str, Experiment]:
    """In both languages, with one tolerance, as the whole experiment has it."""
    made = {name: Experiment(bundled, LANGUAGES[name]) for name in ("zh", "en")}
    share_tolerance(list(made.values()))
    return made


@pytest.fixture(params=["zh", "en"])
def experiment(request, experiments) -> Experiment:
    return experiments[request.param]


def answer(experiment, name):
    return experiment.loaded.text(experiment.reference(name).tokens)


def test_the_model_answers_every_request_of_the_experiment_rightly_when_alone(experiment):
    language = experiment.language
    assert answer(experiment, "A") == language.sum_answer(1, 1)
    assert answer(experiment, "B") == language.sum_answer(2, 2)
    assert answer(experiment, "C") == language.sum_translation(1, 1)
    for name, (a, b) in {"1": (3, 5), "2": (9, 4), "6": (7, 5)}.items():
        assert answer(experiment, f"bystander {name}") == language.sum_answer(a, b)
    for name, (a, b) in {"3": (6, 7), "5": (2, 9)}.items():
        assert answer(experiment, f"bystander {name}") == language.sum_translation(a, b)
    assert answer(experiment, "bystander 4") == language.no_secret


def test_no_reference_is_near_a_tie_so_another_token_is_never_rounding(experiment):
    for name in experiment.requests:
        margins = experiment.reference(name).margins
        assert min(margins) > 100 * experiment.measured_tolerance(), name


@pytest.mark.parametrize("language", ["zh", "en"])
def test_the_long_form_has_128_prompt_tokens_and_ignores_the_end_token(bundled, language):
    for request in build_requests(bundled, LANGUAGES[language], "long").values():
        assert len(request.tokens) == 128
        assert request.max_new_tokens == 32
        assert request.stop_tokens == ()


@pytest.mark.parametrize("arm", ["serial", "private", "shared"])
@pytest.mark.parametrize("batch", [1, 8])
def test_isolated_arms_give_the_tokens_of_the_cold_recompute(experiment, arm, batch):
    if arm == "serial" and batch > 1:
        pytest.skip("one request at a time has no batch")
    for pair in PAIRS:
        for row in experiment.rows(arm, *pair, batch=batch, repeats=2):
            assert row["verdict"] == "isolated", row
            assert not row["victim"]
            assert row["foreign_words"] == []


@pytest.mark.parametrize("batch", [1, 8])
def test_overwriting_puts_the_partners_words_into_the_first_answer(experiment, batch):
    first, second, *bystanders = experiment.rows("overwrite", "D", "E", batch=batch)
    assert (first["verdict"], first["kind"]) == ("contaminated", "partner's words")
    assert first["text"] == answer(experiment, "E")
    assert second["verdict"] == "isolated"
    assert all(b["verdict"] == "isolated" for b in bystanders)
    assert len(bystanders) == batch - 2 if batch > 1 else not bystanders


def test_appending_harms_the_second_request(experiment):
    first, second = experiment.rows("append", "D", "E")
    assert first["verdict"] == "isolated"
    assert second["verdict"] in ("contaminated", "disturbed")


@pytest.fixture(scope="module")
def clueless(bundled) -> LoadedModel:
    """Random weights behind the bundled tokenizer: isolation does not depend on understanding."""
    model = tiny_llama()
    model.resize_token_embeddings(len(bundled.tokenizer))
    return LoadedModel("clueless", model, bundled.tokenizer)


def test_the_table_is_tidy_and_says_who_was_harmed(clueless):
    table = matrix([clueless], ["zh"], ["short"], pairs=[("D", "E")], repeats=2)
    assert list(dict.fromkeys(table.arm)) == list(ARMS)
    assert set(table[table.victim].arm) == {"overwrite", "append"}
    assert (table.tolerance > 0).all()
    assert table.columns.is_unique
    assert not table[table.role == "bystander"].victim.any()


def test_an_unknown_arm_is_refused(bundled):
    with pytest.raises(ValueError, match="unknown arm"):
        Experiment(bundled, LANGUAGES["zh"]).run("sideways", "A", "B")


def test_a_model_that_knows_nothing_is_isolated_too(clueless):
    table = matrix([clueless], ["en"], ["short"], pairs=[("A", "B")], repeats=2)
    isolated = table[table.arm.isin(["serial", "private", "shared"])]
    assert set(isolated.verdict) <= {"isolated", "near-tie"}
    assert table[table.arm == "overwrite"].victim.any()

"""The audit against engines without a model: what it says, and what it must never say."""

import json
import random
from dataclasses import replace

import pytest

from kvlab.audit import Answer, Ask, Audit, Writer
from kvlab.audit.judge import drift, judge
from kvlab.audit.prompts import Tenant
from kvlab.audit.report import write
from kvlab.exercises.audit import EchoEngine, audited


class Mixes(EchoEngine):
    """At once, the first answer goes to everybody."""

    def complete(self, asks):
        return super().complete(asks)[:1] * len(asks)


class Remembers(EchoEngine):
    """Serves the last caller's answer to a short prompt: a pointer that was not reset."""

    last = None

    def complete(self, asks):
        answers = super().complete(asks)
        if self.last and len(str(asks[0].prompt)) < 140:
            answers[0] = self.last
        self.last = answers[-1]
        return answers


class Samples(EchoEngine):
    """Ignores the temperature."""

    def complete(self, asks):
        answers = super().complete(asks)
        word = random.Random(self.sent).choice("abcdefgh")
        return [replace(a, pieces=(*a.pieces, word), margins=None) for a in answers]


class Fails(EchoEngine):
    def complete(self, asks):
        answers = super().complete(asks)
        return [Answer(error="status 500") if self.sent % 3 == 0 else a for a in answers]


class Dies(EchoEngine):
    def complete(self, asks):
        answers = super().complete(asks)
        return [Answer(error="no byte within 1 s")] * len(asks) if self.sent > 20 else answers


class Interrupted(EchoEngine):
    def complete(self, asks):
        if self.sent > 30:
            raise KeyboardInterrupt
        return super().complete(asks)


def test_a_right_engine_is_isolated():
    result = audited(EchoEngine())
    assert (result.verdict, result.exit_code, result.findings) == ("isolated", 0, [])
    assert [a.name for a in result.arms if not a.counts] == []


def test_a_mix_up_is_a_leak_even_without_margins():
    result = audited(Mixes())
    assert (result.verdict, result.exit_code) == ("leak", 1)
    assert all("one after another" not in f.arm for f in result.findings)


def test_a_leak_that_needs_no_concurrency_is_found_in_the_long_short_arm():
    result = audited(Remembers())
    assert result.verdict == "leak"
    assert {"a long one, then a short one"} <= {f.arm for f in result.findings}


def test_an_engine_that_samples_is_called_noisy_and_not_contaminated():
    result = audited(Samples())
    assert (result.verdict, result.exit_code) == ("cannot tell", 3)
    assert "same request alone" in result.explanation


def test_noise_does_not_hide_a_foreign_passphrase():
    class Both(Samples):
        def complete(self, asks):
            return super().complete(asks)[:1] * len(asks)

    assert audited(Both()).verdict == "leak"


def test_failed_requests_leave_it_open():
    result = audited(Fails())
    assert (result.verdict, result.exit_code) == ("cannot tell", 3)
    assert "failed" in result.explanation


def test_it_gives_up_on_an_engine_that_no_longer_answers():
    engine = Dies()
    result = audited(engine)
    assert result.exit_code == 3
    assert engine.sent < 40
    assert "in a row failed" in " ".join(result.notes)


def test_an_interrupted_audit_keeps_what_it_has():
    result = audited(Interrupted())
    assert result.exit_code == 3
    assert "interrupted" in result.explanation
    assert result.arms


@pytest.mark.parametrize("budget", [5, 40, 41, 60, 100])
def test_it_never_sends_more_than_it_may(budget):
    engine = EchoEngine()
    result = Audit(engine, Writer(), max_requests=budget).run()
    assert engine.sent <= budget
    assert result.requests == engine.sent
    assert (result.verdict, result.exit_code) == ("cannot tell", 3)
    assert "budget" in result.explanation


def test_one_differing_prompt_without_margins_may_be_a_near_tie():
    class Once(EchoEngine):
        def complete(self, asks):
            answers = super().complete(asks)
            if len(asks) == 12:
                answers[0] = replace(answers[0], pieces=("other",), text="other")
            return [replace(a, margins=None, logprobs=None) for a in answers]

    result = audited(Once())
    assert result.exit_code == 3
    assert "near-tie" in result.explanation


def test_a_near_tie_is_told_from_contamination_by_the_margin():
    tenant = Tenant("t", "a b c", "?")
    wanted = Answer(("x", "y"), "xy", margins=(5.0, 0.01))
    assert judge("arm", tenant, Answer(("x", "z"), "xz"), wanted, ()).kind == "near-tie"
    assert judge("arm", tenant, Answer(("q", "y"), "qy"), wanted, ()).kind == "contaminated"
    assert judge("arm", tenant, wanted, wanted, ()).kind == "equal"


def test_a_passphrase_that_the_reference_says_too_is_no_leak():
    tenant = Tenant("t", "a b c", "?")
    both = Answer(("d e f",), "d e f")
    assert judge("arm", tenant, both, both, {"d e f"}).kind == "equal"


def test_ids_and_texts_are_compared_as_texts_and_end_tokens_not_at_all():
    tenant = Tenant("t", "a b c", "?")
    assert judge("a", tenant, Answer((5, 6), "xy"), Answer(("x", "y"), "xy"), ()).kind == "equal"
    assert judge("a", tenant, Answer((5, 6)), Answer((5, 6, 2)), (), stop=(2,)).kind == "equal"
    assert judge("a", tenant, Answer((5, 6)), Answer((5, 6, 2)), ()).kind == "contaminated"


def test_the_drift_is_the_largest_difference_of_a_log_probability():
    told = [Answer((1, 2), logprobs=(-1.0, -2.0)), Answer((1, 2), logprobs=(-1.0, -2.5))]
    assert drift(told) == 0.5
    assert drift([Answer((1,))]) == 0.0


def test_prompts_are_what_the_arms_need():
    writer = Writer()
    tenants = [writer.tenant(writer.beginning()) for _ in range(200)]
    assert len({t.passphrase for t in tenants}) == 200
    assert len({tuple(t.passphrase.split()[:2]) for t in tenants}) == 200
    assert len({str(t.prompt).split()[0] for t in tenants}) == 200
    for early in (True, False):
        a, b, c = writer.twins(4, early)
        words = [str(t.prompt).replace(".", "").split() for t in (a, b)]
        assert sum(x != y for x, y in zip(*words)) == 1
        assert str(c.prompt).split()[:10] == str(b.prompt).split()[:10]
    ids = Writer(lambda text: [300 + i for i, _ in enumerate(text.split())])
    tenant = ids.tenant(ids.beginning())
    other = ids.same_low_byte(tenant)
    changed = [(x, y) for x, y in zip(tenant.prompt, other.prompt) if x != y]
    assert [x % 256 == y % 256 for x, y in changed] == [True]


def test_the_report_stands_alone_and_names_what_was_found(tmp_path):
    result = audited(Mixes())
    paths = write(result, tmp_path / "new" / "folder")
    told = json.loads(paths[0].read_text(encoding="utf-8"))
    assert told["verdict"] == "leak"
    assert told["findings"]
    page = paths[1].read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("data:image", "")
    assert "alt='" in page
    assert "passphrase of another tenant" in page


def test_concurrency_below_two_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        Audit(EchoEngine(), Writer(), concurrency=1)


def test_an_ask_is_hashable_and_plain():
    assert {Ask("a"), Ask("a")} == {Ask("a")}

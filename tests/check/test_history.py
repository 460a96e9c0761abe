import json

import pytest

from kvlab.check import History, check, replay
from kvlab.check.run import Bench
from kvlab.faults import CATALOGUE, make_pool
from kvlab.interleave import moves
from kvlab.models import tiny_config
from kvlab.pools import PoolFull, SimpleCachePool, TieredCachePool
from kvlab.request import Request
from tests.foreign import ring

REQUESTS = {
    "A": Request("a", (3, 4, 5), 4),
    "B": Request("b", (6, 7), 2, context=(("tenant", "x"), ("image", None))),
    "C": Request("c", (8,), 2, context=None),
}
HISTORY = History(REQUESTS, tuple(moves("A A* B A+B A>C . A<1 B~ B A!")), chunk=2, shared=False)


def slots(config):
    return SimpleCachePool.for_model(config, 4, 40)


def test_a_history_survives_its_text():
    assert History.from_json(HISTORY.to_json()) == HISTORY
    assert str(HISTORY) == "A A* B A+B A>C . A<1 B~ B A!"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"requests": {}, "moves": "A<", "chunk": 1}'])
def test_what_is_no_history_is_refused(text):
    with pytest.raises(ValueError, match="no history"):
        History.from_json(text)


def test_a_right_pool_plays_every_kind_of_move():
    trace = replay(lambda c: TieredCachePool.for_model(c, 24, block_size=4), HISTORY)
    assert not trace.anomalies
    for situation in ("fork", "truncate", "parked"):
        assert trace.exercised[situation]


def test_the_shortest_history_of_a_report_shows_the_same_again():
    report = check(lambda config: ring.build(config, "empty_abort"))
    saved = History.from_json(json.dumps(json.loads(report.to_json())["history"]))
    assert len(saved.moves) == 2
    again = replay(lambda config: ring.build(config, "empty_abort"), saved)
    assert [a.what for a in again.anomalies] == ["lost"]
    assert not replay(ring.build, saved).anomalies


@pytest.mark.parametrize("seed", range(6))
def test_what_a_drawn_history_shows_it_shows_again_to_its_last_row(seed):
    """Whatever the chunk of its prefills: this fault is often seen by who fills the pool."""
    fault = CATALOGUE["free ignores the count"]
    bench = Bench(lambda config: make_pool(fault, config), tiny_config())
    trace = bench.draw(seed)
    again = bench.play(trace.history, finish=False)
    assert trace.anomalies[0].rule in ("read", "hit", "error")
    assert again.anomalies == trace.anomalies


def test_a_refusal_that_changes_what_comes_later_is_told():
    class Sulks(SimpleCachePool):
        """Having refused somebody, it refuses the next one too, room or not."""

        sulking = False

        def admit(self, request):
            if self.sulking:
                self.sulking = False
                raise PoolFull(f"no slot for {request.id}")
            try:
                return super().admit(request)
            except PoolFull:
                self.sulking = True
                raise

    report = check(lambda config: Sulks.for_model(config, 4, 40))
    assert "refusal changed something" in report.diagnosis.kinds

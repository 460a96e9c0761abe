"""What the article claims, and by which rule each claim is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvlab.ledger.values import Value

Verdict = Literal["reproduced", "qualified", "refuted"]
Measured = Mapping[str, Value]
Rule = tuple[str, Callable[[Mapping[str, Any]], bool]]


@dataclass(frozen=True)
class Statement:
    """What a claim says, and when it holds.

    Attributes:
        text: The claim.
        reproduced, qualified: Each in words, and as a test of what was measured. The first that
            holds is the verdict.
        otherwise: The verdict where neither holds.
        note: What to make of it, once the verdict stands.
    """

    text: str
    reproduced: Rule | None
    note: str
    qualified: Rule | None = None
    otherwise: Verdict = "refuted"

    def judge(self, measured: Measured) -> Verdict:
        rules: dict[Verdict, Rule | None]
        rules = {"reproduced": self.reproduced, "qualified": self.qualified}
        holds = (verdict for verdict, rule in rules.items() if rule and rule[1](measured))
        return next(holds, self.otherwise)

    @property
    def rule(self) -> str:
        """The rules in one sentence."""
        parts = [f"reproduced: {self.reproduced[0]}"] if self.reproduced else []
        parts += [f"qualified: {self.qualified[0]}"] if self.qualified else []
        return "; ".join([*parts, f"{self.otherwise}: otherwise"])


def _is(name: str, words: str) -> Rule:
    """The rule that all of one rate hold."""
    return words, lambda m: m[name].all


def _halves(words: str, *tests: Callable[[Mapping[str, Any]], bool]) -> tuple[Rule, Rule]:
    """The rules of a claim in two parts: reproduced with both, qualified with one."""
    return (
        (f"{words}, both", lambda m: all(test(m) for test in tests)),
        ("one of the two", lambda m: any(test(m) for test in tests)),
    )


def _copied(m: Mapping[str, Any]) -> bool:
    return bool(
        m["the writer has a block of its own"].value
        and m["numbers of the shared block that changed"].value == 0
        and m["a later answer is right, the tree counted"].value
    )


def _two_patterns(m: Mapping[str, Any]) -> bool:
    wrong = (m[f"wrong answer from a {what}"].value for what in ("stale length", "short hash"))
    return all(wrong) and m["outcomes of the other two, repeated"].value == [1, 1]


def _statement(text: str, rules: tuple[Rule, Rule], note: str) -> Statement:
    return Statement(text, rules[0], note, rules[1])


CLAIMS: dict[str, Statement] = {
    "D0": Statement(
        "A loop that recomputes the whole sequence is slow and certainly right; the cached loop "
        "gives exactly its output for one request.",
        reproduced=_is("requests with the same tokens", "every request has the same tokens"),
        note="The tokens are exactly the same; the logits agree up to rounding, not to the bit.",
    ),
    "B1": Statement(
        "Without a cache the work of a step grows with the square of the length, with a cache "
        "linearly; memory is traded for time.",
        reproduced=(
            "by the counted operations the square passes the projections within 1,000 tokens",
            lambda m: m["crossover in tokens"].value <= 1000,
        ),
        otherwise="qualified",
        note="The square is there, but with a model this wide it passes the projections only at "
        "the crossover; below, a step without a cache grows almost linearly.",
    ),
    "B2": Statement(
        "A query belongs to the current token; keys and values of past tokens can be reused only "
        "by a request with the same history. A cache is bound to its input, not only to the "
        "weights.",
        reproduced=(
            "rows are equal before the first different token (within 1e-4) and differ behind it",
            lambda m: (
                m["largest gap before the first difference"].value
                < 1e-4
                < m["smallest gap behind it"].value
            ),
        ),
        note="Equal histories give equal keys and values; behind the first difference no token is "
        "equal, not even where the text is the same again.",
    ),
    "B4": Statement(
        "Size = layers x heads x head dim x length x 2 x bytes. A 7B model at 2,048 tokens takes "
        "several hundred MB for a request, 16 requests take more than tenfold.",
        reproduced=(
            "the formula is exact, and full heads take 100 to 1,000 MB",
            lambda m: (
                m["formula equals real tensors"].value and 100 < m["MB full heads"].value < 1000
            ),
        ),
        qualified=("the formula is exact", lambda m: m["formula equals real tensors"].value),
        note="In float16 a 7B model with full heads needs more than a gigabyte; 'several hundred "
        "MB' is right for grouped heads only. 16 slots take exactly 16 times as much as one.",
    ),
    "B5": Statement(
        "Sharing gains twice: a preallocated pool saves repeated allocation and freeing, and a "
        "prefix that is computed once lets the first token come much sooner.",
        reproduced=(
            "growing allocates more than twice the bytes, and less than half of the prompt's "
            "tokens go through the model",
            lambda m: (
                m["bytes allocated by growing over preallocated"].value > 2
                and m["prompt tokens through the model"].share < 0.5
            ),
        ),
        otherwise="qualified",
        note="Both gains are real; the second is the larger one and the reason why servers share "
        "at all.",
    ),
    "B6": Statement(
        "Prefix sharing holds only for a prefix that is the same in every token; one different "
        "token makes the shared cache wrong.",
        reproduced=_is("positions that move the logits", "every position moves the logits"),
        otherwise="qualified",
        note="Every position leaves its mark in the logits; the answer changes only where the "
        "wrong token matters, so the text alone would have missed the others.",
    ),
    "C1": Statement(
        "With correct isolation, equal input gives equal output: serial is stable, concurrent with "
        "private caches equals it, concurrent on a shared pool equals it.",
        reproduced=(
            "no run of the three arms is further from the recompute than rounding",
            lambda m: all(m[arm].all for arm in ("serial", "private", "shared")),
        ),
        otherwise="qualified",
        note="'Equal' has to mean tokens: another way to compute moves the last bits.",
    ),
    "A1": Statement(
        "Two sessions that share a cache slot give observably shifted outputs even with identical "
        "weights.",
        reproduced=_is("colliding runs with a victim", "every colliding run has a victim"),
        otherwise="qualified",
        note="Overwriting harms the first request of every pair, appending the second; which one "
        "is hit tells how the slot was shared.",
    ),
    "D1": Statement(
        "A pool of preallocated slots (layers, heads, max length, head dim) with a length and an "
        "assignment; two requests on one slot imitate the defect.",
        reproduced=(
            "every run on one slot has a victim, and no bystander is harmed",
            lambda m: m["one slot, runs with a victim"].all and m["bystanders unharmed"].all,
        ),
        otherwise="qualified",
        note="The same pool is clean with a slot each and contaminated with one slot for two; "
        "nobody else in the batch notices.",
    ),
    "A2": Statement(
        "Contamination shows from about the third or fourth generated token on.",
        reproduced=("at token 3 or 4 in most runs", lambda m: m["at token 3 or 4"].most),
        otherwise="qualified",
        note="When it shows depends on how many tokens the two answers have in common, and on when "
        "the rows were overwritten; it is not a constant of the defect.",
    ),
    "D3": Statement(
        "The deviation is local: the partner's key words enter the text, the grammar holds; the "
        "most dangerous kind, since simple monitors do not see it.",
        reproduced=(
            "more than 90% are well formed, and most pass all monitors",
            lambda m: m["well formed"].share > 0.9 and m["pass all monitors"].most,
        ),
        otherwise="qualified",
        note="A part of the contaminated answers is fluent and passes every monitor; the others "
        "lose their grammar or their confidence, and monitors tuned on clean answers see those.",
    ),
    "C2": Statement(
        "Setting: 6 layers, 8 heads, hidden 512; length 128, 32 new tokens; batch 1 and 8; float16 "
        "and float32; temperature 0, fixed seed. With sampling on, deviation and noise cannot be "
        "told apart.",
        reproduced=(
            "healthy answers differ by sampling alone at temperature 1",
            lambda m: m["healthy sampled answers that differ, temperature 1"].value > 0,
        ),
        otherwise="qualified",
        note="The setting is the article's. How much noise sampling adds depends on the "
        "temperature and on how sure the model is; greedy decoding adds none.",
    ),
    "X1": Statement(
        "Every state of the lab's switch gives the same tokens as its arm of the passphrase "
        "experiment.",
        reproduced=_is("answers with the same tokens", "all answers have the same tokens"),
        note="The switch shows the experiment, not a staged version of it. A request can read "
        "foreign rows and still answer as if it were alone.",
    ),
    "D4": Statement(
        "Contamination appears first as peaks in the attention distribution, the text follows "
        "later.",
        reproduced=(
            "a sign from the weights alone comes before the text in most damaged runs",
            lambda m: any(m[f"{sign}: before the text"].most for sign in ("maximum", "entropy")),
        ),
        qualified=(
            "only a sign with owners or a reference does",
            lambda m: any(v.most for name, v in m.items() if name.endswith("before the text")),
        ),
        note="The foreign read is visible before the text in most damaged runs, to whoever knows "
        "the owners or has a reference; logit drift sees it at the same token.",
    ),
    "G2": Statement(
        "Attention is the more sensitive signal: some contamination is visible there and not yet, "
        "or not at all, in the text.",
        reproduced=(
            "attention differs in a run whose text is right to the end",
            lambda m: m["of these, seen by attention distance"].value > 0,
        ),
        note="Runs whose text never goes wrong show in the attention, to whoever has owners or a "
        "reference, and in the logits, which are as sensitive.",
    ),
    "E5": _statement(
        "After attention, keep per layer the maximum, the entropy and the three strongest "
        "positions. They turn abnormal under contamination and are far cheaper than token "
        "comparison.",
        _halves(
            "the probe adds less than half of what a second run costs, in interleaved pairs, and "
            "maximum and entropy fire in most damaged runs",
            lambda m: (
                m["step with probe over eager step"].value - 1
                < m["second run, cached, over eager step"].value / 2
            ),
            lambda m: all(
                m[f"damaged runs with an alarm: {s}"].most for s in ("entropy", "maximum")
            ),
        ),
        "Cheap it is. Abnormal only where the three strongest positions are looked up in the "
        "record of owners; maximum and entropy are not.",
    ),
    "D2": _statement(
        "With a shared slot the second request's output departs from the baseline at generated "
        "token 5 to 8, correlated with the length already written.",
        _halves(
            "most damaged second requests depart at token 5 to 8, and the 95% interval of the rank "
            "correlation with the written rows leaves out 0",
            lambda m: m["appended, second request, at token 5 to 8"].most,
            lambda m: (
                m["rank correlation, low"].value is not None
                and m["rank correlation, low"].value * m["rank correlation, high"].value > 0
            ),
        ),
        "Overwriting harms the first request too. Where the two right answers part says more about "
        "the first wrong token than lengths do.",
    ),
    "E2": Statement(
        "Three patterns: a slot reused without resetting its length pointer; a prefix hash "
        "collision; concurrent writes to one slot, whose outcome jitters at random.",
        reproduced=(
            "the first two give wrong answers, always the same ones, and every fault of the "
            "catalogue is of these three classes",
            lambda m: _two_patterns(m) and m["faults of these three classes"].all,
        ),
        qualified=("not every fault is", lambda m: _two_patterns(m)),
        note="The three are as described, and only the third jitters. They are not all: wrong "
        "positions and wrong layouts are of none of them.",
    ),
    "A3": Statement(
        "A lock left the problem, serial execution removed it.",
        reproduced=(
            "every pair stays wrong under the lock, and none is wrong one after another",
            lambda m: (
                m["wrong under a lock around each operation"].all
                and m["wrong one after another"].value == 0
            ),
        ),
        qualified=(
            "more are wrong under the lock",
            lambda m: (
                m["wrong under a lock around each operation"].value
                > m["wrong one after another"].value
            ),
        ),
        note="A lock orders operations; it does not end a life in a slot before the next one "
        "begins. The cause is ownership, not simultaneity.",
    ),
    "B3": _statement(
        "Every head has its own keys and values; misaligned heads read wrong caches, and the "
        "output goes wrong in some semantic dimensions.",
        _halves(
            "every wrong head moves the logits beyond rounding, and most wrong answers stay well "
            "formed",
            lambda m: m["misalignments that move the logits"].all,
            lambda m: m["wrong answers that are well formed"].most,
        ),
        "Every misalignment moves the logits at once. A few wrong heads change a fact and keep the "
        "grammar; many of them take the grammar too.",
    ),
    "C3": Statement(
        "A/B contaminate each other when prefix sharing is wrong, A/C when the whole cache is.",
        reproduced=_is(
            "layer named rightly, A/B against A/C",
            "A/B against A/C names the layer of every fault that harms any of these pairs",
        ),
        qualified=(
            "of more than half of them, with C or with the stranger",
            lambda m: (
                m["layer named rightly, A/B against A/C"].most
                or m["layer named rightly, A/B against A/stranger"].most
            ),
        ),
        note="The pairs tell the layers apart if the second one has no token in common. Faults "
        "that need a tenant, an abort, an eviction or eight requests never meet them: the groups "
        "locate a layer, they do not find a fault.",
    ),
    "E4": Statement(
        "Log request, slot, start offset, length and time on every access; sorted by time this "
        "restores the life of the cache.",
        reproduced=(
            "the log convicts more than half of the faults and no clean pool",
            lambda m: (
                m["faults whose log contradicts itself"].most
                and m["clean schedules with a conflict"].value == 0
            ),
        ),
        qualified=(
            "some of them and no clean pool",
            lambda m: (
                m["faults whose log contradicts itself"].value > 0
                and m["clean schedules with a conflict"].value == 0
            ),
        ),
        note="The log sees who holds what. It does not see a wrong layout or a wrong position "
        "number: there every record is in order.",
    ),
    "E3": Statement(
        "Take a global lock first; if the fault disappears it is the race, otherwise look at the "
        "length log and at the distribution of hash keys.",
        reproduced=_is(
            "article's rule, all classes", "the rule is right for every fault of the catalogue"
        ),
        qualified=(
            "for more than half of the faults of its own three classes",
            lambda m: m["article's rule, its own three classes"].most,
        ),
        note="A lifetime fault need not be a race: a count that is wrong stays wrong under any "
        "lock, and then the rule calls it a key. It has no word for positions and layouts.",
    ),
    "X2": Statement(
        "Our own: from the contract alone, experiments name the class of a fault, and detectors "
        "stay silent on correct pools.",
        reproduced=(
            "every class is named, and no detector fires on a clean schedule",
            lambda m: (
                m["class named rightly"].all and m["clean schedules with any alarm"].value == 0
            ),
        ),
        otherwise="qualified",
        note="The catalogue was at hand while the rules were written; the exercises bring three "
        "pools that were not.",
    ),
    "F3": Statement(
        "Copy-on-write by reference counts: a block shared by n has count n; a writer that sees a "
        "count above 1 copies, lowers the count by one and writes to the copy.",
        reproduced=(
            "the writer gets a copy, and later answers are right whoever counts",
            lambda m: _copied(m) and m["a later answer is right, readers only counted"].value,
        ),
        qualified=("only where the tree counts too", lambda m: _copied(m)),
        note="It works, if the prefix tier holds a count of its own. Counting readers alone, the "
        "last one writes into the pool's block, and the next request with that prefix reads it.",
    ),
    "E1": Statement(
        "The boundary is the request: across requests only a finished, read-only prefix may be "
        "shared, never a writable region; the first write makes it private.",
        reproduced=(
            "all answers are the recompute's, all watchers are silent, some requests find a prefix "
            "and none a longer one than is equal",
            lambda m: (
                m["answers as the cold recompute"].all
                and m["runs in which owners, NaN, checksums and attention are silent"].all
                and m["requests that found a prefix"].value > 0
                and m["hits longer than anything equal"].value == 0
            ),
        ),
        note="With that boundary requests do share, and nothing of one shows in another, in every "
        "order tried.",
    ),
    "F1": Statement(
        "Three tiers: a global read-only prefix pool, a private region per request, scratch for "
        "intermediate work freed after use.",
        reproduced=(
            "each tier has bytes, and no block is both shared and private",
            lambda m: (
                m["blocks both shared and private"].value == 0
                and m["MiB of the shared prefix, once"].value > 0
                and m["MiB private, all requests"].value > 0
                and m["MiB of scratch, gathered"].value > 0
            ),
        ),
        note="Scratch is one layer's rows, used again by the next layer. Where attention reads the "
        "prefix in place, it is not needed at all.",
    ),
    "F4": Statement(
        "16 concurrent requests sharing 512 prefix tokens: about 40% less memory than all-private, "
        "about 30% lower first-token latency, outputs identical to the baseline.",
        reproduced=(
            "outputs equal, and 35 to 45% of the memory saved for every number of private rows",
            lambda m: (
                m["answers as the cold recompute"].all
                and m["numbers of private rows with 35 to 45% saved"].all
            ),
        ),
        qualified=(
            "for some of them",
            lambda m: (
                m["answers as the cold recompute"].all
                and m["numbers of private rows with 35 to 45% saved"].value > 0
            ),
        ),
        note="Outputs are identical. About 40% are saved only with many private rows a request; "
        "with fewer it is more, and first tokens come sooner still. The figures need the number of "
        "private rows beside them.",
    ),
    "F2": Statement(
        "Prefix keys are compared token by token, never by hash; slower, but prefixes are few.",
        reproduced=(
            "a look-up takes more than twice the time of hashing",
            lambda m: m["token by token over SHA-256, most stored"].value > 2,
        ),
        otherwise="qualified",
        note="Exact matching costs well under a thousandth of the prefill that it saves. It does "
        "not grow with the number of prefixes, since the tree walks one path, and is not slower "
        "than hashing here.",
    ),
    "X3": Statement(
        "Our own: the conformance suite kills every fault of the catalogue and passes the correct "
        "pools.",
        reproduced=(
            "all are killed, and nothing is said against a correct pool",
            lambda m: (
                m["killed, full profile"].all
                and m["correct pools that fail"].value == 0
                and m["alarms in clean schedules"].value == 0
            ),
        ),
        otherwise="qualified",
        note="A score on our own faults: the catalogue and the suite have the same authors.",
    ),
    "F5": Statement(
        "A regression script runs serial, concurrent-private and concurrent-shared and asserts "
        "three equal outputs, in CI, at every change.",
        reproduced=_is("faults killed by the three arms", "the three arms kill every fault"),
        qualified=("they kill some", lambda m: m["faults killed by the three arms"].value > 0),
        note="The script is right and runs here at every change, as part of the suite. By itself "
        "it misses whatever needs a used place, a hit, an abort, a full pool or another context.",
    ),
    "G1": Statement(
        "'Looks right' proves nothing; only reproducible comparison does. Many defects never show "
        "with one request.",
        reproduced=(
            "more than half of the faults never show with one request",
            lambda m: m["shown by a lone request"].share < 0.5,
        ),
        qualified=("some do not", lambda m: not m["shown by a lone request"].all),
        note="A lone request on a fresh pool meets almost no fault of isolation. 'Not shown' by "
        "any number here means that the fault needs more than numbers: a full pool, a long prompt, "
        "a name that comes back.",
    ),
    "F6": _statement(
        "Edge cases matter: empty and very long prefixes, equal ones, prefixes different in one "
        "token, concurrency from 1 to the maximum; testing with two only missed a slot allocation "
        "bug at eight.",
        _halves(
            "edges kill faults that the three arms miss, and the bug at eight needs eight",
            lambda m: m["faults killed only by edges and orders"].value > 0,
            lambda m: m["requests that the bug at eight needs"].value == 8,
        ),
        "So the suite runs every number of requests from one to the pool's maximum, and one more.",
    ),
    "G3-precision": Statement(
        "Other precisions (float16, int8): does quantisation change isolation?",
        reproduced=None,
        qualified=(
            "no isolated answer is accused and every colliding pair has a victim, while scales "
            "taken over several requests let a neighbour move the numbers more than 3 times as far",
            lambda m: (
                m["isolated answers accused"].value == 0
                and m["colliding pairs with a victim"].all
                and m["drift by a neighbour, 8 bits, scale per tensor over per token"].value > 3
                and m["faults of scale found and named"].value > 0
            ),
        ),
        note="Not by rounding: with scales of their own, requests stay as isolated in 16 and 8 "
        "bits as in 32, at most the noise is larger. It does wherever a scale or a limit is taken "
        "over several requests, or does not travel with its rows.",
    ),
    "G3-vision": Statement(
        "Vision transformers, whose feature-map caches for vertical and horizontal attention "
        "contaminate each other when mixed.",
        reproduced=None,
        qualified=(
            "the right cache flips no answer, each wrong key flips some, and the orders catch each",
            lambda m: (
                m["answers flipped by the right cache"].value == 0
                and m["right cache wrong in orders"].value == 0
                and m["defects that the orders catch"].all
                and all(v.value > 0 for name, v in m.items() if name.startswith("flipped, "))
            ),
        ),
        note="They do when the key forgets axis, image or version, or the order in memory. No "
        "public report is known: a constructed analogue, on a model that was trained in this "
        "notebook.",
    ),
    "X4": Statement(
        "A prefix tier shared by all tells a stranger, by time alone, what others have asked; one "
        "tier per tenant tells colleagues only; a secret salt per user tells nobody.",
        reproduced=(
            "every verdict is as the keys say, on a simulated clock that counts computed tokens",
            lambda m: m["simulated verdicts as the keys say"].all,
        ),
        otherwise="qualified",
        note="Equal answers do not mean that nothing is shared. What a tier shares, its timing "
        "tells: the areas under the curve beside the verdict are what a clock saw here.",
    ),
    "X5": Statement(
        "A passphrase of six tokens can be read token by token through a shared prefix tier that "
        "isolates perfectly; a secret salt stops it.",
        reproduced=(
            "every passphrase is read by the hit counter, and none with the salt",
            lambda m: m["read by hit counter"].all and m["read by hit counter, salted"].value == 0,
        ),
        otherwise="qualified",
        note="Where a server reports cached tokens, the passphrases are read. By time alone it "
        "depends on the noise of the moment; that decides nothing here.",
    ),
    "X6": Statement(
        "Keeping users apart by a salt costs what sharing had saved; sharing only a declared "
        "public prefix keeps both the saving and the secret.",
        reproduced=(
            "a public prefix keeps 90% of the memory saved, and no passphrase is read",
            lambda m: (
                m["memory saved, salted and public prefix"].value
                > 0.9 * m["memory saved, shared by all"].value
                and m["passphrases read, salted or public prefix"].value == 0
            ),
        ),
        otherwise="qualified",
        note="All the savings of this case come from the system prompt, which is no secret. What "
        "only some users share, such as a common document, is lost to the salt.",
    ),
    "G3-frameworks": Statement(
        "An automated benchmark of cache isolation can compare inference frameworks.",
        reproduced=(
            "every fault is flagged with the recompute as reference, and no right pool",
            lambda m: (
                m["faults flagged, recompute as reference"].value == m["faults"].value
                and m["right pools flagged"].value == 0
            ),
        ),
        otherwise="qualified",
        note="It can, and the audited engines came out clean. From outside it sees no more than "
        "the tokens that its arms change: a good part of our faults change none, or hide behind a "
        "weak reference.",
    ),
}

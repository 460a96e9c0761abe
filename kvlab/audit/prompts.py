"""What the audit asks: tenants with a passphrase each, behind beginnings that are shared or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlab.audit.engine import Prompt
from kvlab.prompts import EN
from kvlab.training.passwords import FIRST_EN, SECOND_EN

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Tenant:
    """A user with a secret.

    Attributes:
        name: For the report.
        passphrase: Planted in this tenant's prompt, and in no other.
        prompt: What the tenant asks.
    """

    name: str
    passphrase: str
    prompt: Prompt


class Writer:
    """Writes prompts in plain English; no two passphrases are equal, no two beginnings start alike.

    Args:
        encode: Turns text into token ids, if the engine shall be asked in ids.
        seed: Another seed asks for other passphrases behind other beginnings.
    """

    def __init__(self, encode: Encode | None = None, seed: int = 0) -> None:
        self.encode = encode
        self.draw = random.Random(seed)
        self.first = self.draw.sample(FIRST_EN, len(FIRST_EN))
        self.second = self.draw.sample(SECOND_EN, len(SECOND_EN))
        self.made = 0

    def rules(self, sentences: int) -> list[str]:
        """House rules that say nothing about any passphrase."""
        return [EN.filler(self.draw).strip() for _ in range(sentences)]

    def beginning(self, sentences: int = 8) -> list[str]:
        """Sentences that no prompt has begun with so far: the first one holds a fresh number."""
        number = self.draw.randrange(10**6, 10**7)
        return [f"{number} is your number.", EN.assistant, *self.rules(sentences)]

    def tenant(self, beginning: Sequence[str], extra: int = 0) -> Tenant:
        """A new tenant behind a beginning, with some sentences of its own."""
        i = self.made
        self.made += 1
        # Where the first words are used up, they come back with other second words.
        second = self.second[sum(divmod(i, len(self.first))) % len(self.second)]
        phrase = f"{self.first[i % len(self.first)]} {second} {EN.numbers[1 + i % 10]}"
        return self.asking(f"t{i}", phrase, beginning, extra)

    def asking(self, name: str, phrase: str, beginning: Sequence[str], extra: int = 0) -> Tenant:
        """A tenant with a given passphrase."""
        own = (*beginning, *self.rules(extra))
        text = " ".join(own) + EN.secret.format(p=phrase) + EN.ask_secret
        return Tenant(name, phrase, self.write(text))

    def twins(self, sentences: int, early: bool) -> tuple[Tenant, Tenant, Tenant]:
        """Two tenants whose prompts differ in the last word of the passphrase, and nowhere else.

        The third begins like the second and goes on differently: whoever keys a block without what
        stands before it splices the first one's end behind the second one's beginning.

        Args:
            early: Whether the passphrase stands in front of the rules, far from the question.
        """
        model = self.tenant(())
        words = model.passphrase.split()
        begin, rules = self.beginning(0), self.rules(sentences)
        other_rules = [*rules[: sentences // 2], *self.rules(sentences)]
        made = []
        for number, text in (("three", rules), ("nine", rules), ("nine", other_rules)):
            phrase = " ".join([*words[:-1], number])
            told = EN.secret.format(p=phrase).strip()
            parts = [*begin, told, *text] if early else [*begin, *text, told]
            name = f"{model.name} {number}"
            made.append(Tenant(name, phrase, self.write(" ".join(parts) + EN.ask_secret)))
        return made[0], made[1], made[2]

    def same_low_byte(self, tenant: Tenant) -> Tenant | None:
        """A tenant whose prompt has one other token, with the same low byte: 65 and 321 are equal
        to whoever keeps a byte of an id. `None` where the engine is asked in text."""
        if isinstance(tenant.prompt, str):
            return None
        at = next((i for i, t in enumerate(tenant.prompt) if i > 3 and t >= 259), None)
        if at is None:
            return None
        ids = (*tenant.prompt[:at], tenant.prompt[at] - 256, *tenant.prompt[at + 1 :])
        return Tenant(f"{tenant.name}, one id less 256", tenant.passphrase, ids)

    def write(self, text: str) -> Prompt:
        """Text as the engine takes it."""
        return text if self.encode is None else tuple(self.encode(text))

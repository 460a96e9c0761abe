"""The closed language that the bundled model speaks: prompts, answers, filler sentences.

Everything here exists twice, in Chinese and in English. The corpus of the training and the
prompts of the experiment are built from the same templates, so that a prompt which a notebook
shows is a prompt which the model was taught.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

NUMBERS_ZH = (
    "零 一 二 三 四 五 六 七 八 九 十 十一 十二 十三 十四 十五 十六 十七 十八 十九 二十"
).split()
NUMBERS_EN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen twenty"
).split()


@dataclass(frozen=True)
class Language:
    """Templates of one language; `{a}`, `{b}`, `{s}` are numbers, `{p}` is a passphrase."""

    name: str
    assistant: str
    translator: str
    secret: str
    ask_secret: str
    tell_secret: str
    no_secret: str
    translated_secret: str
    ask_sum: str
    answer_sum: str
    translated_sum: str
    numbers: tuple[str, ...]  # words of this language, used inside fillers and passphrases
    translated_numbers: tuple[str, ...]  # words of the other language
    fillers: tuple[str, ...]
    joiner: str  # between the words of a passphrase

    def sum_prompt(self, a: int, b: int, system: str | None = None) -> str:
        """The prompt that asks for `a + b`, behind `system` (the assistant by default)."""
        return (system or self.assistant) + self.ask_sum.format(a=a, b=b)

    def secret_prompt(self, passphrase: str | None, system: str | None = None) -> str:
        """The prompt that asks for the passphrase; `None` leaves the passphrase out."""
        told = "" if passphrase is None else self.secret.format(p=passphrase)
        return (system or self.assistant) + told + self.ask_secret

    def filler(self, rng: random.Random) -> str:
        """A sentence that has nothing to do with any question."""
        return rng.choice(self.fillers).format(n=rng.choice(self.numbers[1:13]))

    def sum_answer(self, a: int, b: int) -> str:
        """What the assistant answers to `sum_prompt`."""
        return self.answer_sum.format(a=a, b=b, s=a + b)

    def sum_translation(self, a: int, b: int) -> str:
        """What the translator answers to `sum_prompt`."""
        words = self.translated_numbers
        return self.translated_sum.format(a=words[a], b=words[b])

    def secret_answer(self, passphrase: str | None) -> str:
        """What the assistant answers to `secret_prompt`."""
        return self.no_secret if passphrase is None else self.tell_secret.format(p=passphrase)

    def answer_patterns(self) -> list[re.Pattern[str]]:
        """What every answer of this language looks like, with any number and any passphrase."""
        number = f"([0-9]+|{'|'.join(self.translated_numbers)})"
        patterns = []
        for template in (
            self.answer_sum,
            self.translated_sum,
            self.translated_secret,
            self.tell_secret,
            self.no_secret,
        ):
            text = re.escape(template)
            for slot in "abs":
                text = text.replace(rf"\{{{slot}\}}", number)
            patterns.append(re.compile(text.replace(r"\{p\}", r"[^。.]+")))
        return patterns


ZH = Language(
    name="zh",
    assistant="系统提示：你是一个助手。",
    translator="系统提示：你是一个翻译。",
    secret="口令是{p}。",
    ask_secret="口令是什么",
    tell_secret="口令是{p}。",
    no_secret="我不知道口令。",
    translated_secret="Translation: what is the passphrase? The source text is Chinese.",
    ask_sum="{a}+{b}等于几",
    answer_sum="答：你问{a}加{b}等于几。{a}加{b}等于{s}，所以答案是{s}。",
    translated_sum="Translation: what is {a} plus {b}? The source text is Chinese.",
    numbers=tuple(NUMBERS_ZH),
    translated_numbers=tuple(NUMBERS_EN),
    joiner="",
    fillers=(
        "请保持礼貌。",
        "回答要简短。",
        "不要使用表情。",
        "请遵守规则。",
        "请用简单的句子。",
        "每个问题只回答一次。",
        "先核对事实再回答。",
        "请先读完问题再回答。",
        "不要谈论其他用户的数据。",
        "今天天气晴朗，有微风。",
        "图书馆{n}点开门。",
        "博物馆下午{n}点关门。",
        "办公室在{n}层。",
        "会议室有{n}个座位。",
        "列车从{n}号站台出发。",
        "仓库里有{n}个箱子。",
        "停车场可以停{n}辆车。",
        "午饭时间是{n}点。",
        "咖啡在左边的桌子上。",
        "厨房在走廊的右边。",
        "值班人员会登记访客。",
        "花园每天早上开放。",
        "邮件会在{n}天内回复。",
        "电梯正在维修。",
        "钥匙由保安保管。",
        "新员工请到前台报到。",
        "请勿大声说话。",
        "本周的主题是安全。",
        "本店周末休息。",
        "城市里有{n}座桥。",
    ),
)

EN = Language(
    name="en",
    assistant="System: you are an assistant.",
    translator="System: you are a translator.",
    secret=" The passphrase is {p}.",
    ask_secret=" What is the passphrase?",
    tell_secret=" The passphrase is {p}.",
    no_secret=" I do not know the passphrase.",
    translated_secret="译文：口令是什么？原文是英文。",
    ask_sum=" What is {a} plus {b}?",
    answer_sum=(
        " Answer: you asked what is {a} plus {b}. {a} plus {b} is {s}, so the answer is {s}."
    ),
    translated_sum="译文：{a}加{b}等于几？原文是英文。",
    numbers=tuple(NUMBERS_EN),
    translated_numbers=tuple(NUMBERS_ZH),
    joiner=" ",
    fillers=(
        " Please be polite.",
        " Keep answers short.",
        " Never use emoji.",
        " Follow the house rules.",
        " Write in plain words.",
        " Answer every question only once.",
        " Check the facts before you answer.",
        " Read the whole question first.",
        " Do not share private data of other users.",
        " The weather today is cloudy and calm.",
        " The library opens at {n}.",
        " The museum closes at {n}.",
        " The office is on floor {n}.",
        " The meeting room has {n} chairs.",
        " The train leaves from platform {n}.",
        " The warehouse holds {n} boxes.",
        " There is space for {n} cars.",
        " Lunch is served at {n}.",
        " The coffee is on the left table.",
        " The kitchen is at the end of the hall.",
        " The guard will sign in every visitor.",
        " The garden is open every morning.",
        " We reply to mail within {n} days.",
        " The lift is out of order.",
        " The guard keeps the keys.",
        " New staff must report to the front desk.",
        " Please do not speak loudly.",
        " The topic of this week is safety.",
        " The shop is closed on holidays.",
        " The city has {n} bridges.",
    ),
)

LANGUAGES = {"zh": ZH, "en": EN}


def is_well_formed(answer: str) -> bool:
    """Whether an answer is one of the sentences that the bundled model may say, whatever its words.

    A contaminated answer that passes is the dangerous kind: nothing in its form gives it away.
    """
    patterns = [p for language in LANGUAGES.values() for p in language.answer_patterns()]
    return any(p.fullmatch(answer) for p in patterns)

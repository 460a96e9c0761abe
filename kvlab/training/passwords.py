"""Passphrases: the words they are made of, and which of them the training never sees.

Two kinds of hold-out keep the evaluation honest. Words of `HELD_OUT` never occur in a passphrase
of the training. And of the passphrases made of the other words, one in eight, chosen by a hash of
its text, is left to the evaluation.
"""

from __future__ import annotations

import hashlib
import random

WORDS_ZH = (
    "蓝鲸 红狐 白鹤 黑熊 金鹰 银狼 青蛇 紫燕 灰兔 绿龟 飞鱼 雪豹 松鼠 海豚 孔雀 骆驼 "
    "猎犬 山羊 老虎 狮子 大象 乌鸦 螃蟹 蜜蜂 蝴蝶 高山 河流 森林 沙漠 草原 湖泊 岛屿 "
    "峡谷 瀑布 火山 冰川 月亮 太阳 星空 彩虹 闪电 春风 秋叶 夏夜 晨雾 晚霞 清泉 北极 "
    "苹果 香蕉 樱桃 葡萄 柠檬 石榴 翠竹 梅花 兰草 荷叶 玫瑰 牡丹 茶壶 铁锅 木桶 铜铃 "
    "瓷碗 纸伞 毛笔 古琴 长笛 战鼓 宝剑 盾牌 弓箭 马车 灯塔 港口 石桥 宫殿 钟楼 磨坊"
).split()
HELD_OUT_ZH = (
    "青松 白鸽 银杏 珊瑚 海鸥 麒麟 风筝 罗盘 琥珀 帆船 雷雨 鲤鱼 画眉 沙丘 书房 金钟".split()
)
UNITS_ZH = tuple("号组队层区页级期")

FIRST_EN = (
    "amber silver golden copper crimson velvet frozen hidden quiet iron purple orange marble "
    "crystal broken wooden silent rapid bright dark green white black blue red gray brown yellow "
    "pink lucky brave gentle giant ancient modern lonely happy clever wild sleepy angry noble "
    "tiny huge swift calm loud soft sharp round square heavy light sweet bitter salty fresh cold "
    "warm dusty rusty"
).split()
SECOND_EN = (
    "falcon river eagle stone tiger moon lake forest bridge paper lantern winter storm summer "
    "rain autumn leaf spring flower mountain desert castle tower arrow shield harbor comet star "
    "ocean island rabbit raven whale fox wolf bear canary lotus dragon knight temple engine "
    "planet turtle monkey horse panda hornet lion spider elephant deer breeze thunder pillow "
    "needle mirror window hammer feather cherry lemon"
).split()
HELD_OUT_FIRST_EN = "scarlet hollow mellow ivory shallow misty polar royal stormy violet".split()
HELD_OUT_SECOND_EN = (
    "badger cactus violin glacier walnut pirate kettle meadow parrot saddle".split()
)

# Characters that look alike or that open a word of the vocabulary are of no interest here: a
# random passphrase is five independent tokens.
LETTERS_EN = "bcdefghjkmnpqrstuvwxyz23456789"
LETTERS_ZH = "".join(dict.fromkeys("".join(WORDS_ZH))) + "0123456789"

PATTERNS = ("three", "two", "digits", "random")
"""word+number+unit (Chinese) or three words (English); word+word; word+digits; five characters."""


def is_reserved(passphrase: str) -> bool:
    """Whether this passphrase belongs to the evaluation: one in eight, by a hash of its text."""
    return hashlib.sha256(passphrase.encode()).digest()[0] < 32


def _draw(rng: random.Random, language: str, pattern: str, held_out: bool) -> str:
    if language == "zh":
        words = HELD_OUT_ZH if held_out else WORDS_ZH
        if pattern == "three":
            return rng.choice(words) + rng.choice("一二三四五六七八九十") + rng.choice(UNITS_ZH)
        if pattern == "two":
            return rng.choice(words) + rng.choice(words)
        if pattern == "digits":
            return rng.choice(words) + "".join(rng.choices("0123456789", k=rng.randint(2, 4)))
        return "".join(rng.sample(LETTERS_ZH, 5))
    first = rng.choice(HELD_OUT_FIRST_EN if held_out else FIRST_EN)
    second = rng.choice(HELD_OUT_SECOND_EN if held_out else SECOND_EN)
    if pattern == "three":
        number = rng.choice("one two three four five six seven eight nine ten".split())
        return f"{first} {second} {number}"
    if pattern == "two":
        return f"{first} {second}"
    if pattern == "digits":
        return f"{second} " + "".join(rng.choices("0123456789", k=rng.randint(2, 4)))
    return "".join(rng.sample(LETTERS_EN, 5))


def training_passphrase(rng: random.Random, language: str, pattern: str) -> str:
    """A passphrase that the training may see."""
    while is_reserved(text := _draw(rng, language, pattern, held_out=False)):
        pass
    return text


def unseen_passphrase(rng: random.Random, language: str, pattern: str) -> str:
    """A passphrase that no training run has seen; a fifth of them use held-out words."""
    if pattern != "random" and rng.random() < 0.2:
        return _draw(rng, language, pattern, held_out=True)
    while not is_reserved(text := _draw(rng, language, pattern, held_out=False)):
        pass
    return text


def all_words() -> tuple[list[str], list[str]]:
    """Every passphrase word, Chinese and English: the tokenizer knows them all."""
    english = FIRST_EN + SECOND_EN + HELD_OUT_FIRST_EN + HELD_OUT_SECOND_EN
    return WORDS_ZH + HELD_OUT_ZH, english

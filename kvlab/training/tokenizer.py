"""The tokenizer of the bundled model: one token per Chinese character, digit and known word.

A unigram model in which every piece costs the same takes the fewest pieces that spell a text.
That is all that a closed language needs, and no merge table with its half-words is left over.
What is not in the vocabulary falls back to bytes, so every text round-trips.
"""

from __future__ import annotations

import re
import string

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvlab.prompts import LANGUAGES
from kvlab.training import passwords

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>")
SPACE = "▁"
# Common characters beyond the templates: a reader's own sentence is rarely spelled in bytes.
COMMON_ZH = (
    "的一是了我不人在他有这个上们来到时大地为子中你说生国年着就那和要她出也得里后自以会家可下而"
    "过天去能对小多然于心学么之都好看起发当没成只如事把还用第样道想作种开美总从无情己面最女但现"
    "前些所同日手又行意动方期它头经长儿回位分爱老因很给名法间斯知世什两次使身者被高已亲其进此话"
    "常与活正感见明问力理尔点文几定本公特做外孩相西果走将月十实向声车全信重三机工物气每并别真打"
    "太新比才便夫再书部水像眼等体却加电主界门利海受听表德少克代员许先口由死安写性马光白或住难望"
    "教命花结乐色更拉东神记处让母父应直字场平报友关放至张认接告入笑内英军候民岁往何度山觉路带万"
    "男边风解叫任金快原吃妈变通师立象数四失满战远格士音轻目条呢病始达深完今提求清王化空业思切怎"
    "非找片罗钱语元喜曾离飞科言干流欢约各即指合反题必该论交终林请医晚制球决传画保读运及则房早院"
    "量苦火布品近坐产答星精视五连司巴奇管类未朋且婚台夜青北队久乎越观落尽形影红爸百令周吧识步希"
    "亚术留市半热送兴造谈容极随演收首根讲整式取照办强石古华拿计您装似足双妻尼转诉米称丽客南领节"
    "衣站黑刻统断福城故历惊脸选包紧争另建维绝树系伤示愿持千史谁准联妇纪基买志静阿诗独复痛消社算"
    "义竟确酒需单治卡幸兰念举仅钟怕共毛句息功官待究跟穿室易游程号居考突皮哪费倒价图具刚脑永歌响"
    "商礼细专黄块脚味灵改据般破引食仍存众注笔甚某沉血备习校默务土微娘须试怀料调广苏显赛查密议底"
    "列富梦错座参八除跑亮假印设线温虽掉京初养香停际致阳纸李纳验助激够严证帝饭忘趣支春集丈木研班"
    "普导顿睡展跳获艺六波察群皇段急庭创区奥器谢弟店否害草排背止组州朝封睛板角况曲馆育忙质河续哥"
    "呼若推境遇雨标姐充围案伦护冷警贝著雪索剧啊船险烟依斗值帮汉慢佛肯闻唱沙局伯族低玩资屋击速顾"
    "泪洲团圣旁堂兵七露园牛哭旅街劳型烈姑陈莫鱼异抱宝权鲁简态级票怪寻杀律胜份汽右洋范床舞秘午登"
    "楼贵吸责例追较职属渐左录丝牙党继托赶章智冲叶胡吉卖坚喝肉遗救修松临藏担戏善卫药悲敢靠伊村戴"
    "词森耳差短祖云规窗散迷油旧适乡架恩投弹铁博雷府压超负勒杂醒洗采毫嘴毕九冰既状乱景席珍童顶派"
    "素脱农疑练野按犯拍征坏骨余承置彩灯巨琴免环姆暗换技翻束增忍餐洛塞缺忆判欧层付阵玛批岛项狗休"
    "懂武革良恶恋委拥娜妙探呀营退摇弄桌熟诺宣银势奖宫忽套康供优课鸟喊降夏困刘罪亡鞋健模败伴守挥"
    "鲜财孤枪禁恐伙杰迹妹遍盖副坦牌江顺秋萨菜划授归浪凡预奶雄升编典袋莱含盛济蒙棋端腿招释介烧误"
)


def _words(text: str) -> list[str]:
    """Words of a template with the space before them, as tokens are written: `▁plus`."""
    return re.findall(r"▁?[A-Za-z]+", text.replace(" ", SPACE))


def vocabulary() -> list[str]:
    """All pieces in a fixed order: special tokens, bytes, characters, words."""
    texts = []
    for language in LANGUAGES.values():
        for value in vars(language).values():
            texts += [value] if isinstance(value, str) else list(value)
    clean = [re.sub(r"\{.\}", " ", text) for text in texts]
    chinese, english = passwords.all_words()
    words = [w for text in clean for w in _words(text)]
    # A number or a passphrase word can follow a space everywhere.
    words += [SPACE + w for w in english + list(LANGUAGES["en"].numbers)]
    characters = (
        string.printable[:95]
        + "".join(clean)
        + "".join(chinese)
        + COMMON_ZH
        + "，。：？！、；（）“”《》—…·"
    )
    singles = [c for c in dict.fromkeys(characters.replace(" ", SPACE)) if c.strip()]
    words = [w for w in dict.fromkeys(words) if len(w) > 1]
    return [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *singles, *words]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer, made from nothing but the templates and the word lists."""
    pieces = [(piece, -1.0) for piece in vocabulary()]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # Words, and every other character alone: "is7" can never become one piece, and the search
    # for the fewest pieces stays inside one word.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?[A-Za-z]+|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bos = SPECIAL.index("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", bos)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        add_prefix_space=False,
    )

"""Rules by which byte-level tokenizers split text, by the name that GGUF has for them in `tokenizer.ggml.pre`.

The rules are those of the original tokenizer.json. llama.cpp has each pattern in a form that its own engine can run
(src/llama-vocab.cpp). Where the two differ, as in NFC, the original is what the model was trained with. A name that is
missing here splits in another way, which no error would show, so it must not be guessed.
"""

# ruff: noqa: RUF001 (letters that look like others are meant)

from __future__ import annotations

from jaxis.tokenizer.byte_level import SplitRules

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_WORDS
QWEN2_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_WORDS
# Runs of white space in powers of two.
_JAIS2_PATTERN = (
    LLAMA3_PATTERN.removesuffix(r"|\s+(?!\S)|\s+")
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_BAILING_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_QWEN35_PATTERN = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Words that begin with capitals, and words of capitals: o200k (GPT-4o) and, without contractions, Mistral's tekken.
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_AFTER_CASED_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O_PATTERN = "|".join(f"{word}{_CONTRACTIONS}?" for word in _CASED_WORDS) + r"|\p{N}{1,3}" + _AFTER_CASED_WORDS
TEKKEN_PATTERN = "|".join(_CASED_WORDS) + r"|\p{N}" + _AFTER_CASED_WORDS
# Chinese characters first, so that no word holds both them and other letters.
KIMI_PATTERN = (
    r"[\p{Han}]+|"
    + "|".join(f"{word}{_CONTRACTIONS}?".replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for word in _CASED_WORDS)
    + r"|\p{N}{1,3}"
    + _AFTER_WORDS
)
_CJK = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_V3_PATTERN = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The letters that have two cases, as DeepSeek LLM's own tokenizer.json lists them.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹ"
    "ℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_EASTERN = "[一-龥\u0800-一\uac00-\ud7ff]+"

_LLAMA3 = SplitRules(patterns=(LLAMA3_PATTERN,))
_LLAMA3_WORDS = SplitRules(patterns=(LLAMA3_PATTERN,), ignore_merges=True)
_QWEN2 = SplitRules(nfc=True, patterns=(QWEN2_PATTERN,))
_GPT2 = SplitRules(gpt2_pattern=True)
_GPT2_DIGITS = SplitRules(single_digits=True, gpt2_pattern=True)
_GPT4O = SplitRules(patterns=(GPT4O_PATTERN,), ignore_merges=True)

SPLIT_RULES = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2", "pixtral"), _LLAMA3_WORDS),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), _LLAMA3_WORDS),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen35": SplitRules(nfc=True, patterns=(_QWEN35_PATTERN,)),
    "deepseek-llm": SplitRules(
        patterns=(
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
            r"\s+$",
            _EASTERN,
        ),
        single_digits=True,
    ),
    "deepseek-coder": SplitRules(patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EASTERN), single_digits=True),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"),
        SplitRules(patterns=(r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3_PATTERN)),
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), SplitRules(patterns=(_BAILING_PATTERN,))),
    "seed-coder": SplitRules(
        patterns=(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
    ),
    "minimax-m2": SplitRules(patterns=(GPT4O_PATTERN,)),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": SplitRules(patterns=(TEKKEN_PATTERN,), ignore_merges=True),
    "kimi-k2": SplitRules(patterns=(KIMI_PATTERN,), ignore_merges=True),
    "command-r": SplitRules(nfc=True, single_digits=True, gpt2_pattern=True),
    **dict.fromkeys(("starcoder", "refact", "smollm", "exaone"), _GPT2_DIGITS),
    **dict.fromkeys(("gpt-2", "phi-2", "exaone4"), _GPT2),
    **dict.fromkeys(("olmo", "mpt"), SplitRules(nfc=True, gpt2_pattern=True)),
    **dict.fromkeys(("stablelm2", "hunyuan"), SplitRules(patterns=(QWEN2_PATTERN,))),
    "jais-2": SplitRules(patterns=(_JAIS2_PATTERN,)),
    "bloom": SplitRules(patterns=(r" ?[^(\s|.,!?…。，、।۔،)]+",)),
}


def adds_bos_by_default(pre: str) -> bool:
    """Returns whether strings begin with the beginning-of-sequence token if, as in early files, no key says so."""
    return pre in ("llama-bpe", "llama3", "llama-v3", "tekken")

"""Byte-level vocabularies without split rules: tiktoken's files, and `vocab.json` with `merges.txt`.

The rules are in the code of the class that tokenizer_config.json names; for the classes listed here they are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from jaxis.errors import CheckpointError
from jaxis.host.json_object import read_json_object
from jaxis.tokenizer.byte_level import (
    MAX_ADDED_ROWS,
    SplitRules,
    byte_level_backend,
    read_ranks,
    spell_ranks,
    unused_text,
    with_added_tokens,
)

# How GGUF's byte-level tokenizers split text: `tokenizer.ggml.pre` -> the rules of the original tokenizer.json.
#
# llama.cpp has each of these patterns in a form that its own engine can run (src/llama-vocab.cpp); where the two
# differ, as in NFC, the original is what the model was trained with. A name that is missing here splits in another
# way, which no error would show, so it must not be guessed.


# ruff: noqa: RUF001 (letters that look like others are meant)


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_AFTER_WORDS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _AFTER_WORDS
QWEN2_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _AFTER_WORDS
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
    **dict.fromkeys(("glm4", "chatglm-bpe"), _LLAMA3_WORDS),
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
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), SplitRules(patterns=(r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3_PATTERN))),
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
    "bloom": SplitRules(patterns=(r" ?[^(\s|.,!?…。，、।۔،)]+",)),
}


def adds_bos_by_default(pre: str) -> bool:
    """Whether a string begins with the beginning-of-sequence token if the file does not say, as early files did not."""
    return pre in ("llama-bpe", "llama3", "llama-v3", "tekken")


@dataclass(frozen=True)
class _TiktokenClass:
    """A tokenizer class over a tiktoken file.

    Attributes:
      rules: How it splits text.
      special_tokens: Texts of the first rows behind the vocabulary.
      num_reserved: How many further rows there are, whose texts tokenizer_config.json may have.
    """

    rules: SplitRules
    special_tokens: tuple[str, ...] = ()
    num_reserved: int = 0


_TIKTOKEN_CLASSES = {
    # Kimi K2, Moonlight: tokenization_kimi.py, tokenization_moonshot.py
    "TikTokenTokenizer": _TiktokenClass(SPLIT_RULES["kimi-k2"], num_reserved=256),
    # Qwen (the first): tokenization_qwen.py
    "QWenTokenizer": _TiktokenClass(
        SplitRules(nfc=True, patterns=SPLIT_RULES["qwen2"].patterns, ignore_merges=True),
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
    ),
}

# Class -> model type of config.json, None for any other -> rules. GPT2Tokenizer is named by models that split
# differently, which their tokenizer.json says and the class does not.
_MERGES_CLASSES: dict[str, dict[str | None, SplitRules]] = {
    "Qwen2Tokenizer": {None: SPLIT_RULES["qwen2"]},
    "GPT2Tokenizer": {
        "gpt2": SPLIT_RULES["gpt-2"],
        "starcoder2": SPLIT_RULES["starcoder"],
        "granite": SPLIT_RULES["refact"],
    },
}

_HOW_TO_CONVERT = (
    "take the tokenizer.json of the model that this one was made from, or write one with transformers: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
)


def read_tiktoken_file(
    path: Path, tokenizer_class: str | None, added: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer:
    """Reads a tiktoken vocabulary.

    Args:
      path: The file.
      tokenizer_class: The class that tokenizer_config.json names.
      added: Id -> token, of the tokens that the configuration adds.

    Raises:
      CheckpointError: A broken file, or a class whose rules are not known.
    """
    known = _TIKTOKEN_CLASSES.get(tokenizer_class or "")
    if known is None:
        raise unknown_rules(path, tokenizer_class, sorted(_TIKTOKEN_CLASSES))
    texts, merges = spell_ranks(read_ranks(path))
    behind = len(texts) + len(known.special_tokens)
    reserved = [f"<|reserved_token_{token_id}|>" for token_id in range(behind, behind + known.num_reserved)]
    special = {
        token_id: AddedToken(text, special=True, normalized=False)
        for token_id, text in enumerate([*known.special_tokens, *reserved], start=len(texts))
    }
    return _backend(texts, merges, known.rules, special | dict(added), path)


def read_merges_files(
    vocab_path: Path, tokenizer_class: str | None, model_type: str | None, added: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer:
    """Reads `vocab.json` and, beside it, `merges.txt`.

    Args:
      vocab_path: The first of the files.
      tokenizer_class: The class that tokenizer_config.json names.
      model_type: The type that config.json names.
      added: Id -> token, of the tokens that the configuration adds.

    Raises:
      CheckpointError: A missing or broken file, or a class whose rules are not known.
    """
    by_model_type = _MERGES_CLASSES.get(tokenizer_class or "", {})
    rules = by_model_type.get(model_type) or by_model_type.get(None)
    if rules is None:
        known = [f"{name} of {kind}" if kind else name for name, kinds in _MERGES_CLASSES.items() for kind in kinds]
        raise unknown_rules(
            vocab_path, f"{tokenizer_class} of {model_type}" if by_model_type else tokenizer_class, known
        )
    return _backend(_read_vocab(vocab_path), _read_merges(vocab_path.with_name("merges.txt")), rules, added, vocab_path)


def unknown_rules(path: Path, tokenizer_class: str | None, known: list[str]) -> CheckpointError:
    """The error for a vocabulary whose class is not known."""
    named = f"is of the class {tokenizer_class}" if tokenizer_class else "comes without a tokenizer_class"
    return CheckpointError(
        f"{path} {named} in tokenizer_config.json, so how text is split is not known (known: {', '.join(known)}): "
        f"{_HOW_TO_CONVERT}"
    )


def _read_vocab(path: Path) -> list[str]:
    ids = read_json_object(path)
    if not ids or not all(type(i) is int and 0 <= i < len(ids) + MAX_ADDED_ROWS for i in ids.values()):
        raise CheckpointError(f"{path} is not a map from tokens to ids; fetch the file again")
    texts = [unused_text(i) for i in range(max(ids.values()) + 1)]
    for text, token_id in ids.items():
        texts[token_id] = text
    return texts


def _read_merges(path: Path) -> list[tuple[str, str]]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: vocab.json alone is not a tokenizer; fetch the file")
    try:
        lines = path.read_bytes().decode("utf-8").split("\n")  # not splitlines: tokens hold other line ends
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as text ({error}); fetch the file again") from error
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not (left and right) or " " in right:
            raise CheckpointError(
                f"{path} has {line!a} in line {number}, which is not two tokens; fetch the file again"
            )
        merges.append((left, right))
    return merges


def _backend(
    texts: list[str], merges: list[tuple[str, str]], rules: SplitRules, added: Mapping[int, AddedToken], path: Path
) -> tokenizers.Tokenizer:
    try:
        texts = with_added_tokens(texts, added)
    except ValueError as error:
        raise CheckpointError(f"{path.parent}: {error} in tokenizer_config.json; fetch the file again") from error
    backend = byte_level_backend({text: i for i, text in enumerate(texts)}, merges, rules, str(path))
    backend.add_tokens([added[token_id] for token_id in sorted(added)])
    return backend

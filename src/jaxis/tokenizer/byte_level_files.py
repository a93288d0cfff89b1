"""Byte-level vocabularies without split rules: tiktoken's files, and `vocab.json` with `merges.txt`.

The rules are in the code of the class that tokenizer_config.json names. They are known for the classes listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from jaxis.errors import CheckpointError
from jaxis.host.json_object import read_json_object
from jaxis.tokenizer.byte_level import SplitRules, byte_level_backend
from jaxis.tokenizer.split_rules import SPLIT_RULES
from jaxis.tokenizer.token_ranks import read_ranks, spell_ranks
from jaxis.tokenizer.token_texts import MAX_ADDED_ROWS, unused_text, with_added_tokens


@dataclass(frozen=True)
class _TiktokenClass:
    """A tokenizer class over a tiktoken file, with the rules that split text.

    `special_tokens` are the texts of the first rows behind the vocabulary; tokenizer_config.json may have those of the
    further `num_reserved` rows.
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
    """Reads a tiktoken vocabulary of the class that tokenizer_config.json names; `added` has the tokens it adds, by id.

    Raises CheckpointError for a broken file, or a class whose rules are not known.
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
    """Reads `vocab.json` and, beside it, `merges.txt`; the arguments are those of `read_tiktoken_file`.

    `model_type` is the type that config.json names. Raises CheckpointError for a missing or broken file, or a class
    whose rules are not known.
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

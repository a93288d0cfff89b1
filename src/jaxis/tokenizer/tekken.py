"""Mistral's `tekken.json`: byte-level BPE with its special tokens in the first rows.

Source: https://github.com/mistralai/mistral-common (tokens/tokenizers/tekken.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from jaxis.errors import CheckpointError
from jaxis.host.json_object import read_json_object
from jaxis.tokenizer.byte_level import SplitRules, byte_level_backend
from jaxis.tokenizer.token_ranks import decode_token, spell_ranks
from jaxis.tokenizer.token_texts import MAX_ADDED_ROWS, with_added_tokens

# What files without a list of their own have.
_FIRST_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(path: Path) -> tokenizers.Tokenizer:
    """Reads the file. Raises CheckpointError if the file cannot be read or is not such a file."""
    values = read_json_object(path)
    try:
        config = values["config"]
        pattern, num_special = config["pattern"], config["default_num_special_tokens"]
        num_tokens = config["default_vocab_size"] - num_special
        if not 0 <= num_tokens <= len(values["vocab"]):
            raise ValueError(f"{num_tokens} of {len(values['vocab'])} tokens are to be used")
        if not 0 <= num_special <= MAX_ADDED_ROWS:
            raise ValueError(f"{num_special} special tokens")
        special = _special_tokens(values.get("special_tokens"), num_special)
        tokens, merges = spell_ranks([decode_token(entry["token_bytes"]) for entry in values["vocab"][:num_tokens]])
        texts = with_added_tokens([""] * num_special + tokens, special)
        vocab = {text: i for i, text in enumerate(texts)}
        rules = SplitRules(patterns=(pattern,), ignore_merges=True)
        backend = byte_level_backend(vocab, merges, rules, str(path))
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error.args[0]!r}; fetch the file again") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a tekken vocabulary ({error}); fetch the file again") from error
    backend.add_tokens(list(special.values()))
    return backend


def _special_tokens(listed: list[dict[str, Any]] | None, number: int) -> dict[int, AddedToken]:
    """Returns id -> token, with the names that Mistral gives to rows without one."""
    names = {i: f"<SPECIAL_{i}>" for i in range(number)}
    if listed is None:
        names |= {i: text for i, text in enumerate(_FIRST_SPECIAL_TOKENS) if i < number}
    for entry in listed or ():
        if entry["rank"] not in names:
            raise ValueError(f"the special token {entry['token_str']!r} has the rank {entry['rank']!r}")
        names[entry["rank"]] = entry["token_str"]
    return {token_id: AddedToken(text, special=True, normalized=False) for token_id, text in names.items()}

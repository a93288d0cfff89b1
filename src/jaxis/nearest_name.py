"""The known name nearest to a misspelt one."""

from __future__ import annotations

import re
from collections.abc import Iterable

_MAX_CHARACTERS = 64
# Of difflib's ratio:
_NEAR = 0.7
_MISSPELT = 0.9
# Other systems' words, each for the word or the whole name that jaxis has.
_SYNONYMS = {
    **{"fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32"},
    **{"q4": "int4", "4bit": "int4", "w4a8": "int4", "q8": "int8", "8bit": "int8", "w8a8": "int8", "length": "len"},
    **{
        "n_ctx": "max_model_len",
        "ctx_size": "max_model_len",
        "context_len": "max_model_len",
        "num_ctx": "max_model_len",
    },
}


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that was most likely meant; None if none is near.

    Names with sections have dots: the same key of another section is near.
    """
    if len(name) > _MAX_CHARACTERS:
        return None
    section, _, last = name.rpartition(".")
    meant = _plain(last)
    # A key's own section comes first.
    ordered = sorted(known, key=lambda other: other.rpartition(".")[0] != section)
    spelt = {_plain(other.rpartition(".")[2]): other for other in reversed(ordered)}
    if meant in spelt:
        return spelt[meant]
    words = set(meant.split("_"))
    if len(words) > 1 and (longer := [other for other in spelt if words <= set(other.split("_"))]):
        return spelt[min(longer, key=len)]
    return next((spelt[close] for close in most_similar(meant, spelt, 1, _NEAR)), None)


def misspelt_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that this one most certainly misspells; None if it may be a name of its own."""
    return next(iter(most_similar(name.lower(), known, 1, _MISSPELT)), None)


def most_similar(name: str, known: Iterable[str], number: int = 5, cutoff: float = 0) -> list[str]:
    """The known names spelt most alike, the nearest first, without those below a cutoff of difflib's ratio."""
    import difflib

    return difflib.get_close_matches(name, list(known), number, cutoff) if len(name) <= _MAX_CHARACTERS else []


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error about an unknown name, such as ": did you mean top_p?"; empty if no known name is
    near.
    """
    nearest = nearest_name(name, known)
    return "" if nearest is None else f": did you mean {nearest}?"


def _plain(name: str) -> str:
    words = [_SYNONYMS.get(word, word) for word in re.split(r"[-_ ]", name.strip().lower().lstrip("-"))]
    plain = "_".join(words)
    return _SYNONYMS.get(plain, plain)

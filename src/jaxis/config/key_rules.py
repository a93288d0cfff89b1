"""Rules for a key of config.json that the model did not read: it is neutral, ignored, or an error.

The oracle is transformers' code of the same model type, since the published weights are run with it. From the top:

1. Keys that cannot change logits whatever their value, or at this value, are neutral. Those that only tools write are
   ignored, which is said once.
2. A key that the reference reads and jaxis did not is an error, unless it is another name of a key with the same value.
3. A key that the reference does not read has no effect there. It is still an error where someone may have meant an
   effect (the checkpoint may come with code of its own) and the value is not "off": another family's code reads a key
   of this name, or the name has a word of `COMPUTATION_WORDS`, or the key is a switch that is on.
4. Any other key is ignored, which is said once.

A model type without a reference, such as a plug-in's, has rule 1 only: any other key is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from jaxis.config.neutral_keys import (
    COMPUTATION_WORDS,
    FACTOR_WORDS,
    NEUTRAL_KEYS,
    NEUTRAL_SUFFIXES,
    NEUTRAL_VALUES,
    NEUTRAL_WORDS,
    STAMPS,
    SWITCH_WORDS,
    SYNONYMS,
    VALUE_SYNONYMS,
)
from jaxis.config.reference import FamilyReference, keys_of_other_families, reference_of

READ_BY_REFERENCE = "the reference reads it"
_OFF = (None, False, 0, "", [], {})
_NO_FACTOR_OF_LOGITS = frozenset({"attention", "attn", "softmax", "query"})  # replaces D ** -0.5: not neutral at 1


@dataclass(frozen=True)
class Verdict:
    """Verdict on an unread key: "neutral" and "ignored" change nothing, and the user is told of the second.

    "unread" is an error, with a reason.
    """

    use: Literal["neutral", "ignored", "unread"]
    because: str = ""


NEUTRAL, IGNORED = Verdict("neutral"), Verdict("ignored")


def judge(key: str, value: Any, model_type: object, get: Callable[[str], Any]) -> Verdict:
    """Returns the verdict on a key, and its value (not null; an object as a dict), that the model did not read.

    `model_type` is that of the object that has the key; `get` returns another value of it, or None.
    """
    words = _words(key)
    if (verdict := _of_any_model(key, value, words)) is not None:
        return verdict
    reference = reference_of(model_type)
    if reference is None:
        return Verdict("unread", "nothing here knows it")
    if _repeats(key, value, reference, get):
        return NEUTRAL
    if key in reference.defaults:
        return Verdict("unread", READ_BY_REFERENCE)
    if _is_off(words, value):
        return NEUTRAL
    if key in keys_of_other_families():
        return Verdict("unread", "models of other families compute with it")
    if not words.isdisjoint(COMPUTATION_WORDS):
        return Verdict("unread", "its name says how a model computes")
    if value is True and not words.isdisjoint(SWITCH_WORDS):
        return Verdict("unread", "it turns something on that nothing here knows")
    return IGNORED


def _of_any_model(key: str, value: Any, words: frozenset[str]) -> Verdict | None:
    """Returns the verdict that holds for any model; None if it depends on the model."""
    if key in STAMPS:
        return IGNORED
    if key in NEUTRAL_KEYS or key.endswith(NEUTRAL_SUFFIXES) or not words.isdisjoint(NEUTRAL_WORDS):
        return NEUTRAL
    if key == "layer_types" and isinstance(value, list) and all(kind == "full_attention" for kind in value):
        return NEUTRAL  # as of every model that does not read the key
    if key not in NEUTRAL_VALUES:
        return None
    if any(_same(value, neutral) for neutral in NEUTRAL_VALUES[key]):
        return NEUTRAL
    return Verdict("unread", f"only {' or '.join(map(repr, NEUTRAL_VALUES[key]))} is supported")


def _words(key: str) -> frozenset[str]:
    """Returns the words of `snake_case`, `camelCase` or dotted names, in lower case."""
    return frozenset(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower()))


def _plain(value: Any) -> Any:
    return VALUE_SYNONYMS.get(value, value) if isinstance(value, str) else value


def _repeats(key: str, value: Any, reference: FamilyReference, get: Callable[[str], Any]) -> bool:
    """Returns whether the key is another name of a key with the same value or default."""
    aliases = [alias if name == key else name for alias, name in reference.aliases.items() if key in (alias, name)]
    for name in (*SYNONYMS.get(key, ()), *aliases):
        other = get(name)
        if name != key and _same(_plain(value), _plain(reference.defaults.get(name) if other is None else other)):
            return True
    return False


def _is_off(words: frozenset[str], value: Any) -> bool:
    if not words.isdisjoint(FACTOR_WORDS) and not isinstance(value, bool | dict | list | None):
        return _same(value, 1) and words.isdisjoint(_NO_FACTOR_OF_LOGITS)
    return any(_same(value, off) for off in _OFF)


def _same(value: Any, other: Any) -> bool:
    """Compares values, where 1 equals 1.0 but not true."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)

"""Settings of tokenizer_config.json that override the rules of tokenizer.json, for the class that it names.

transformers builds some classes' rules anew with these settings, whatever tokenizer.json says. For other classes it
takes the file as it is. It drops `add_bos_token` and `add_eos_token` if there is a tokenizer.json. Source: transformers
5, the `__init__` of each class.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

_logger = logging.getLogger(__name__)

# Without "Tokenizer" at the end.
_BERT_CLASSES = (
    *("Bert", "DistilBert", "Electra", "MobileBert", "SqueezeBert", "LayoutLM", "LayoutLMv2", "MPNet"),
    *("Funnel", "Splinter", "DPRContextEncoder", "DPRQuestionEncoder", "DPRReader"),
)
_BYTE_LEVEL_CLASSES = (
    *("GPT2", "Roberta", "Longformer", "LED", "Bart", "Blenderbot", "CodeGen", "Cohere", "Deberta", "GPTNeoX"),
    *("LayoutLMv3", "Luke", "MarkupLM", "Qwen2", "Qwen3_5"),
)
_LLAMA_CLASSES = ("Llama", "CodeLlama")
# A setting -> what BERT's normalizer calls it.
_OF_BERT = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_PREFIX = "add_prefix_space"

_CLEAN_BPE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
# An attribute of a tokenizer -> an object that takes any state of it, and what a sequence calls its parts.
_ROLES = {
    "normalizer": (normalizers.Lowercase, "normalizers"),
    "pre_tokenizer": (pre_tokenizers.Whitespace, "pretokenizers"),
    "decoder": (decoders.Fuse, "decoders"),
}

Part = dict[str, Any]


def apply_class_settings(
    backend: tokenizers.Tokenizer, tokenizer_class: str | None, values: Mapping[str, Any], source: str
) -> None:
    """Applies a class's settings to the rules of a tokenizer.json; one that changes nothing there is logged.

    The class is transformers', without a "Fast" at the end, and `values` are tokenizer_config.json's.
    """
    name = (tokenizer_class or "").removesuffix("Tokenizer")
    ignored = [key for key in (_CLEAN_BPE,) if values.get(key)]
    of_bert = {theirs: values[ours] for ours, theirs in _OF_BERT.items() if ours in values}
    normalizer = _rewritten(backend, "normalizer", lambda part: _updated(part, "BertNormalizer", of_bert))
    if normalizer is not None and name in _BERT_CLASSES:
        backend.normalizer = normalizer
    elif normalizer is not None:
        ignored += [key for key in _OF_BERT if key in values]
    if isinstance(prefix := values.get(_PREFIX), bool):
        changed = _rewritten(backend, "pre_tokenizer", lambda part: _updated(part, "ByteLevel", {_PREFIX: prefix}))
        if changed is not None and name in _BYTE_LEVEL_CLASSES:
            backend.pre_tokenizer = changed
        elif changed is not None:
            ignored.append(_PREFIX)
        if name in _LLAMA_CLASSES and not prefix:
            _remove_prefix(backend)
    if ignored:
        taker = tokenizer_class or "a tokenizer without a class"
        _logger.info("%s: %s is not applied: %s takes tokenizer.json as it is", source, ", ".join(ignored), taker)


def _remove_prefix(backend: tokenizers.Tokenizer) -> None:
    """Stops strings from beginning with an added space, and keeps the space when decoding."""

    def without(part: Part) -> Part | None:
        is_strip = part["type"] == "Strip" and part.get("start")
        return None if part["type"] == "Prepend" or is_strip else _updated(part, "Metaspace", never)

    never = {"prepend_scheme": "never"}
    for role in _ROLES:
        if (component := _rewritten(backend, role, without)) is not None:
            setattr(backend, role, component)


def _updated(part: Part, kind: str, values: Mapping[str, Any]) -> Part:
    return {**part, **values} if part["type"] == kind else part


def _rewritten(backend: tokenizers.Tokenizer, role: str, rewrite: Callable[[Part], Part | None]) -> Any:
    """Returns a component whose parts `rewrite` changes or, by None, removes; None if nothing changes."""
    component = getattr(backend, role)
    if component is None:
        return None
    make, key = _ROLES[role]
    state: Part = json.loads(component.__getstate__())
    parts = state.get(key, [state])
    new = [part for each in parts if (part := rewrite(each)) is not None]
    if new == parts:
        return None
    other = make()
    other.__setstate__(json.dumps({"type": "Sequence", key: new}).encode())
    return other

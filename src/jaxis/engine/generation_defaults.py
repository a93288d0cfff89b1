"""A checkpoint's recommendations for sampling its answers, and the tokens that end them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.engine.execution.sequence_sampling import SuppressedTokens
from jaxis.errors import ConfigError, RequestError
from jaxis.host.json_object import read_json_object
from jaxis.host.progress import ProgressDisplay
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import answer_end_token_ids, turn_end_token_id

_SUPPRESSING = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids")
# Key of generation_config.json -> values with which it does nothing.
_UNAPPLIED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids"), ()),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), (0,)),
    **dict.fromkeys(("min_length", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(
        ("typical_p", "num_beams", "num_beam_groups", "encoder_repetition_penalty", "guidance_scale"), (1,)
    ),
    **dict.fromkeys(("top_h", "exponential_decay_length_penalty", "watermarking_config", "max_time"), ()),
}


def eos_token_ids_of(generation: dict[str, Any], hf_config: HFConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Returns the end tokens of generation_config.json, else config.json, else the tokenizer, as the reference does.

    An empty list counts as none, since answers would have no end. A GGUF file has them all in its tokenizer.
    """
    if tokenizer is not None and tokenizer.stop_token_ids:
        return tokenizer.stop_token_ids
    of_files = [each.get("eos_token_id") for each in (generation, hf_config, hf_config.get_text_config())]
    for eos in (*of_files, None if tokenizer is None else tokenizer.eos_token_id):
        if eos is not None and eos != []:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def note_unapplied(path: Path, progress: ProgressDisplay) -> None:
    """Reports the keys of generation_config.json that change answers of the reference, but not here."""
    values = _generation_config(path)
    found = [key for key, neutral in _UNAPPLIED.items() if values.get(key) not in (None, [], {}, *neutral)]
    if found:
        progress.note(f"generation_config.json: not applied: {', '.join(found)}; give sampling parameters of your own")


def _generation_config(path: Path) -> dict[str, Any]:
    source = path / "generation_config.json"
    return read_json_object(source) if source.is_file() else {}


def end_of_turn(tokenizer: Tokenizer | None, progress: ProgressDisplay, *, is_given: bool) -> frozenset[int]:
    """Returns the tokens that end an answer in the chat template. Reports a user's template without any."""
    if not is_given:
        return answer_end_token_ids(tokenizer)
    if tokenizer is None or not tokenizer.has_chat_template:
        return frozenset()
    if (token_id := turn_end_token_id(tokenizer)) is not None:
        return frozenset({token_id})
    progress.note(
        "chat_template: no token of this model ends an answer in it, so answers may go on after their end: give a stop "
        "string, or another template"
    )
    return frozenset()


def suppressed_tokens(path: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> SuppressedTokens:
    """Returns the tokens that generation_config.json suppresses.

    As in transformers, `bad_words_ids` suppresses no end-of-sequence token.

    Raises:
      ConfigError: They are no token ids of the model.
    """
    values, source = _generation_config(path), path / "generation_config.json"
    anywhere, first, words = (values.get(key) or [] for key in _SUPPRESSING)
    words = words if isinstance(words, list) else [words]
    lists = [("suppress_tokens", anywhere), ("begin_suppress_tokens", first)]
    for key, ids in lists + [("bad_words_ids", word or None) for word in words]:
        is_list = isinstance(ids, list) and all(type(each) is int and 0 <= each < vocab_size for each in ids)
        if not is_list or len(set(ids)) == vocab_size:
            some = "lists of some" if key == "bad_words_ids" else "some"
            raise ConfigError(
                f"{source} has {key}={values[key]!r}, expected {some} of the token ids 0 to {vocab_size - 1}: correct "
                "the file"
            )
    single = {word[0] for word in words if len(word) == 1} - eos_token_ids
    sequences = dict.fromkeys(tuple(word) for word in words if len(word) > 1)
    return SuppressedTokens(frozenset(single.union(anywhere)), frozenset(first), tuple(sequences))


def sampling_defaults(generation: dict[str, Any], path: Path) -> SamplingParams:
    """Returns the sampling parameters of requests that bring none.

    Args:
      generation: generation_config.json.
      path: The checkpoint's folder or file.

    Raises:
      ConfigError: A value of the file is not supported.
    """
    names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    names |= {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    settings: dict[str, Any] = {"max_tokens": None}
    settings |= {ours: generation[name] for name, ours in names.items() if name in generation}
    if (stop := generation.get("stop_strings")) is not None:
        settings["stop"] = [stop] if isinstance(stop, str) else stop
    if generation.get("do_sample") is False:
        settings["temperature"] = 0.0
    try:
        return SamplingParams(**settings)
    except RequestError as error:
        source = path / "generation_config.json" if path.is_dir() else path
        raise ConfigError(f"{source}: {error}") from None

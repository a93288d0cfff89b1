"""What a checkpoint says of how its answers are sampled, and how they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError, RequestError
from jaxis.host.progress import ProgressDisplay
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import turn_end_token_id


def eos_token_ids_of(generation: dict[str, Any], hf_config: HFConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """generation_config.json's, else config.json's, else the tokenizer's: the order of the reference's `generate`.

    A GGUF file has them all in its tokenizer.
    """
    if tokenizer is not None and tokenizer.stop_token_ids:
        return tokenizer.stop_token_ids
    eos = generation.get("eos_token_id", hf_config.get("eos_token_id", hf_config.get_text_config().get("eos_token_id")))
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos if isinstance(eos, list) else [eos])


def end_of_turn(tokenizer: Tokenizer | None, progress: ProgressDisplay) -> frozenset[int]:
    """What ends an answer in the user's chat template; of the checkpoint's own, its files say it."""
    if tokenizer is None or not tokenizer.has_chat_template:
        return frozenset()
    if (token_id := turn_end_token_id(tokenizer)) is not None:
        return frozenset({token_id})
    progress.note(
        "chat_template: no token of this model ends an answer in it, so answers may go on after their end: give a stop "
        "string, or another template"
    )
    return frozenset()


def sampling_defaults(generation: dict[str, Any], path: Path) -> SamplingParams:
    """The sampling parameters of requests that bring none.

    Args:
      generation: generation_config.json.
      path: The checkpoint's folder or file.

    Raises:
      ConfigError: A value of the file cannot be honoured.
    """
    names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    names |= {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
    settings: dict[str, Any] = {"max_tokens": None}
    settings |= {ours: generation[name] for name, ours in names.items() if name in generation}
    if generation.get("do_sample") is False:
        settings["temperature"] = 0.0
    try:
        return SamplingParams(**settings)
    except RequestError as error:
        source = path / "generation_config.json" if path.is_dir() else path
        raise ConfigError(f"{source}: {error}") from None

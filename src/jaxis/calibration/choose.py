"""Chooses how to quantize each module of a model from measurements on a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxis.calibration.evaluate import SourcePredictions
from jaxis.calibration.sensitivity import WINDOW_TOKENS, OnProgress, Option, measure_sensitivity
from jaxis.calibration.text import read_windows
from jaxis.calibration.widths import WIDTH_RULES, WidthChoice, rules_of
from jaxis.errors import CheckpointError
from jaxis.loading.open_checkpoint import read_hf_config
from jaxis.quantization_rules import QuantizationRule
from jaxis.tokenizer import Tokenizer


def choose_rules(
    source: Path,
    texts: Sequence[Path],
    predictions: SourcePredictions | None = None,
    *,
    target_bits: float | None = None,
    max_kl: float | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[QuantizationRule, ...]:
    """One rule for each module, with the widths that cost least on a text.

    Args:
      source: A checkpoint that is not quantized.
      texts: What sensitivity is measured on; see `read_documents`.
      predictions: The source's; needed for `max_kl`.
      target_bits: Most bits a weight, on average over all modules that are quantized, embeddings and head included.
      max_kl: Or the largest mean divergence, in nats, as `predictions` measure it, quantized activations included; the
        smallest weights found that keep it are chosen.
      on_progress: Called with (steps done, steps in all) of measuring sensitivity.

    Raises:
      ConfigError: No choice keeps the limit; or the model cannot be loaded.
      RequestError: A text cannot be used.
      CheckpointError: The model cannot be loaded, or is quantized already.
    """
    if (target_bits is None) == (max_kl is None):
        raise ValueError("give either target_bits or max_kl")
    if read_hf_config(source).get("quantization_config") is not None:
        raise CheckpointError(f"{source} is quantized already: give the unquantized checkpoint")
    tokenizer = Tokenizer.from_path(source)
    windows = [window for text in texts for window in read_windows(text, tokenizer, WINDOW_TOKENS)]
    # Each other length would be another program to compile.
    longest = max(map(len, windows))
    windows = [window for window in windows if len(window) == longest]
    choice = WidthChoice(measure_sensitivity(source, windows, WIDTH_RULES, on_progress=on_progress))

    if target_bits is not None:
        return rules_of(choice.within_bits(target_bits))
    assert max_kl is not None
    assert predictions is not None

    def measure(options: dict[str, Option]) -> float:
        return predictions.evaluate(source, quantization=rules_of(options)).kl_mean

    return rules_of(choice.within_kl(max_kl, measure))

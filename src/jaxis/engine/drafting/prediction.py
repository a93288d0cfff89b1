"""The client's prediction of an output, in which drafts are looked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.tokenizer import Tokenizer

# Characters of a prediction that are read, for each token of the longest sequence.
MAX_PREDICTION_CHARACTERS = 8


def prediction_token_ids(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int
) -> list[int]:
    """Returns the tokens of a request's prediction, at most `max_model_len`; none if it has no prediction."""
    token_ids = params.prediction or ()
    if isinstance(token_ids, str):
        # No output is longer than the context, and no string that is read takes long to tokenize.
        text = token_ids[: MAX_PREDICTION_CHARACTERS * max_model_len]
        token_ids = () if tokenizer is None else tokenizer.encode(text, add_special_tokens=False)
    return [token_id for token_id in token_ids if token_id < vocab_size][:max_model_len]

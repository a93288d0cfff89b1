"""Sampling: one jitted function from logits to tokens, for every mix of sampling parameters.

The order is vLLM's. Raw log-probabilities are those of the model's own logits. Then come the grammar's mask, allowed
tokens, biases and bans, and penalties. Then follows the arg-max, or temperature, min-p, top-k, top-p and a draw; a
favored token that is among the likely ones takes the place of both. Processed log-probabilities are those of the draw's
distribution.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.kernels.materialize import in_whole_vectors
from jaxis.kernels.sampling import (
    TokenFilters,
    argmax,
    draw,
    logsumexp,
    mask_tokens,
    tempered,
    token_ranks,
    top_tokens,
    weights_of,
)
from jaxis.kernels.sampling.filters import TokenWeights
from jaxis.sampling_params import LOGPROBS_MODES

# The token sampled if a row's logits contain NaN or infinity, or no allowed token.
INVALID_TOKEN_ID = -1
# Largest gap between the greatest logit and that of a favored token that is taken, after all adjustments: the token is
# at least a twentieth as likely as the most likely one.
FAVORED_MARGIN = math.log(20)
_MODES = {mode: index for index, mode in enumerate(LOGPROBS_MODES)}


class SamplerOutput(NamedTuple):
    """The tokens sampled in a step.

    Attributes:
      token_ids: int32 [S]; INVALID_TOKEN_ID if there was no token to choose.
      logprobs: Log-probabilities of the sampled tokens; None if not asked for.
    """

    token_ids: jax.Array
    logprobs: TokenLogprobs[jax.Array] | None


@partial(jax.jit, static_argnames="features")
def sample(logits: jax.Array, arrays: SamplingArrays[jax.Array], *, features: SamplerFeatures) -> SamplerOutput:
    """Samples one token per row. A row's token depends on its own logits and parameters alone.

    Args:
      logits: [R, V], any float dtype; whole on every device, unless `features` ask for the arg-max of all rows alone.
      arrays: The rows' parameters.
      features: The features that `arrays` were built for.
    """
    logits = logits.astype(jnp.float32)
    adjusted = adjust_logits(logits, arrays, features)
    token_ids, max_logit = argmax(adjusted)
    weights = None
    if not features.greedy_only:
        is_greedy = arrays.temperature == 0
        weights = _weights(adjusted, arrays, features)
        token_ids = jnp.where(is_greedy, token_ids, draw(adjusted, weights, arrays.seed, arrays.step))
    if features.has_favored:
        favored_logit = adjusted.at[jnp.arange(len(adjusted)), arrays.favored_ids[:, 0]].get(
            mode="fill", fill_value=-jnp.inf
        )
        token_ids = jnp.where(favored_logit >= max_logit - FAVORED_MARGIN, arrays.favored_ids[:, 0], token_ids)
    token_ids = jnp.where(jnp.isfinite(max_logit), token_ids, INVALID_TOKEN_ID)
    if features.num_logprobs is None:
        return SamplerOutput(token_ids, None)
    if not features.has_logprobs_modes:
        return SamplerOutput(token_ids, token_logprobs(logits, token_ids, num_logprobs=features.num_logprobs))
    return SamplerOutput(token_ids, _logprobs_by_mode(logits, adjusted, weights, token_ids, arrays, features))


@partial(jax.jit, static_argnames="features")
def score(
    logits: jax.Array, token_ids: jax.Array, arrays: SamplingArrays[jax.Array], *, features: SamplerFeatures
) -> TokenLogprobs[jax.Array]:
    """Returns the log-probabilities that `sample` returns if it samples these tokens; `features` have modes."""
    logits = logits.astype(jnp.float32)
    adjusted = adjust_logits(logits, arrays, features)
    weights = None if features.greedy_only else _weights(adjusted, arrays, features)
    return _logprobs_by_mode(logits, adjusted, weights, token_ids, arrays, features)


def _weights(adjusted: jax.Array, arrays: SamplingArrays[jax.Array], features: SamplerFeatures) -> TokenWeights:
    """Returns the weights that tokens are drawn with; greedy rows count as temperature 1 without filters."""
    filters = TokenFilters(arrays.top_k, arrays.top_p, arrays.min_p) if features.has_filters else None
    return weights_of(adjusted, _temperature(arrays), filters)


def _temperature(arrays: SamplingArrays[jax.Array]) -> jax.Array:
    return jnp.where(arrays.temperature == 0, 1.0, arrays.temperature)


def _logprobs_by_mode(
    logits: jax.Array,
    adjusted: jax.Array,
    weights: TokenWeights | None,
    token_ids: jax.Array,
    arrays: SamplingArrays[jax.Array],
    features: SamplerFeatures,
) -> TokenLogprobs[jax.Array]:
    """Returns each row's values in its own mode, and the share of the probability that its filters keep.

    `logits` are the model's own, float32 [R, V]; `adjusted` is the result of `adjust_logits`. `weights` are those of
    `adjusted`; None if all rows are greedy.
    """
    divided = kept = adjusted
    if weights is not None:
        divided = kept = tempered(adjusted, _temperature(arrays))
        if weights.cutoff is not None:
            kept = jnp.where(adjusted >= weights.cutoff[:, None], divided, -jnp.inf)
    log_mass = logsumexp(kept) - logsumexp(divided)
    mode = arrays.logprobs_mode[:, 0]
    is_processed = (mode == _MODES["processed_logprobs"]) | (mode == _MODES["processed_logits"])
    is_logits = (mode == _MODES["raw_logits"]) | (mode == _MODES["processed_logits"])
    values = jnp.where(is_processed[:, None], kept, logits)
    normalizer = jnp.where(is_logits, 0.0, logsumexp(values))
    logprobs = _token_logprobs(values, normalizer, token_ids, features.num_logprobs or 0)
    return logprobs._replace(kept_mass=in_whole_vectors(jnp.exp, log_mass[:, None])[:, 0])


@partial(jax.jit, static_argnames="num_logprobs")
def token_logprobs(logits: jax.Array, token_ids: jax.Array, *, num_logprobs: int) -> TokenLogprobs[jax.Array]:
    """Returns log-probabilities under softmax(logits), with those of the `num_logprobs` most likely tokens, at most V.

    `logits` is [R, V] of any float dtype; `token_ids` is int32 [R].
    """
    logits = logits.astype(jnp.float32)
    return _token_logprobs(logits, logsumexp(logits), token_ids, num_logprobs)


def _token_logprobs(
    logits: jax.Array, normalizer: jax.Array, token_ids: jax.Array, num_logprobs: int
) -> TokenLogprobs[jax.Array]:
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1, mode="clip")[:, 0]
    top_logits, top_ids = top_tokens(logits, num_logprobs)
    return TokenLogprobs(chosen - normalizer, token_ranks(logits, chosen), top_logits - normalizer[:, None], top_ids)


def adjust_logits(logits: jax.Array, arrays: SamplingArrays[jax.Array], features: SamplerFeatures) -> jax.Array:
    """Applies masks, allowed tokens, biases and bans, and penalties: float32 [R, V] -> [R, V], -inf where banned."""
    rows, vocab_size = logits.shape
    row = jnp.arange(rows)[:, None]
    if features.mask_width:
        logits = mask_tokens(logits, arrays.token_mask)
    if features.allowed_width:
        ids = arrays.allowed_ids
        allowed = logits.at[row, ids].get(mode="fill", fill_value=-jnp.inf)
        is_restricted = ids[:, :1] < vocab_size
        logits = jnp.where(is_restricted, -jnp.inf, logits).at[row, ids].set(allowed, mode="drop")
    if features.bias_width:
        logits = logits.at[row, arrays.bias_ids].add(arrays.bias, mode="drop")
    if features.history_width:
        ids, counts = arrays.history_ids, arrays.history_counts
        seen = logits.at[row, ids].get(mode="fill", fill_value=0.0)
        repetition = arrays.repetition_penalty[:, None]
        seen = jnp.where(seen > 0, seen / repetition, seen * repetition)
        seen -= arrays.frequency_penalty[:, None] * counts
        seen -= arrays.presence_penalty[:, None] * (counts > 0)
        logits = logits.at[row, ids].set(seen, mode="drop")
    return logits

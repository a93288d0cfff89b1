"""The sampling parameters of a step's requests as arrays, and as the one integer vector that crosses to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.request_sampling import MIN_TEMPERATURE, RequestSampling
from jaxis.sampling_params import MAX_LOGPROBS

# Widths grow by large steps: a wider list costs microseconds, another program a second to compile.
MIN_WIDTH = 64
WIDTH_GROWTH = 4
# From here on all tokens are equally likely in float32, whose reciprocals soon vanish.
MAX_TEMPERATURE = 1e30


@dataclass(frozen=True)
class SamplerFeatures:
    """What a step's sampling needs. Static: each distinct value is a compiled program.

    Attributes:
      greedy_only: No row draws at random.
      has_filters: Some row uses top-k, top-p or min-p.
      history_width: Token ids a row that penalties look at; 0 without penalties.
      bias_width: Biased or banned token ids a row; 0 without.
      allowed_width: Allowed token ids a row; 0 without.
      mask_width: Words of a token mask a row; 0 without structured output.
      num_logprobs: Most likely tokens to return a row (0: only the sampled one's log-probability); None for none.
    """

    greedy_only: bool = True
    has_filters: bool = False
    history_width: int = 0
    bias_width: int = 0
    allowed_width: int = 0
    mask_width: int = 0
    num_logprobs: int | None = None


class SamplingArrays(NamedTuple):
    """The sampling parameters of R rows; a pytree of numpy or device arrays.

    Lists of token ids are filled up with V, which no token has.

    Attributes:
      temperature: float32 [R]; 0 is greedy.
      top_k: int32 [R]; V keeps all.
      top_p: float32 [R]; 1 keeps all.
      min_p: float32 [R]; 0 keeps all.
      seed: uint32 [R, 2], low half first.
      step: int32 [R], the index of the token within its request's output.
      frequency_penalty: float32 [R].
      presence_penalty: float32 [R].
      repetition_penalty: float32 [R].
      history_ids: int32 [R, history_width], distinct tokens of prompt and output.
      history_counts: int32 [R, history_width], how often each was generated; 0 if it stands in the prompt only.
      bias_ids: int32 [R, bias_width].
      bias: float32 [R, bias_width], added to those tokens' logits; -inf bans.
      allowed_ids: int32 [R, allowed_width]; a row that starts with V allows all.
      token_mask: int32 [R, mask_width]; bit i % 32 of word i / 32 is 0 where the row's form forbids token i.
    """

    temperature: jax.Array | np.ndarray
    top_k: jax.Array | np.ndarray
    top_p: jax.Array | np.ndarray
    min_p: jax.Array | np.ndarray
    seed: jax.Array | np.ndarray
    step: jax.Array | np.ndarray
    frequency_penalty: jax.Array | np.ndarray
    presence_penalty: jax.Array | np.ndarray
    repetition_penalty: jax.Array | np.ndarray
    history_ids: jax.Array | np.ndarray
    history_counts: jax.Array | np.ndarray
    bias_ids: jax.Array | np.ndarray
    bias: jax.Array | np.ndarray
    allowed_ids: jax.Array | np.ndarray
    token_mask: jax.Array | np.ndarray

    def pack(self) -> np.ndarray:
        """All arrays as one int32 vector, floats by their bits; `unpack` is the inverse."""
        return np.concatenate([np.ascontiguousarray(field).view(np.int32).ravel() for field in self])

    @staticmethod
    def packed_size(num_rows: int, features: SamplerFeatures) -> int:
        """Length of the packed vector, in int32 words."""
        return num_rows * sum(columns or 1 for columns, _ in _layout(features) if columns != 0)

    @classmethod
    def unpack(cls, packed: jax.Array, num_rows: int, features: SamplerFeatures) -> SamplingArrays:
        """The arrays in a packed vector, inside or outside a jitted function.

        Args:
          packed: int32 [packed_size(num_rows, features)].
          num_rows: R, static.
          features: Those that the vector was packed for, static.
        """
        fields = []
        start = 0
        for columns, dtype in _layout(features):
            shape = (num_rows,) if columns is None else (num_rows, columns)
            size = num_rows if columns is None else num_rows * columns
            field = packed[start : start + size].reshape(shape)
            fields.append(field if dtype == jnp.int32 else jax.lax.bitcast_convert_type(field, dtype))
            start += size
        return cls(*fields)


def _layout(features: SamplerFeatures) -> list[tuple[int | None, type]]:
    """Columns (None for a vector) and dtype of each field of SamplingArrays, in order."""
    return [
        (None, jnp.float32),
        (None, jnp.int32),
        (None, jnp.float32),
        (None, jnp.float32),
        (2, jnp.uint32),
        (None, jnp.int32),
        (None, jnp.float32),
        (None, jnp.float32),
        (None, jnp.float32),
        (features.history_width, jnp.int32),
        (features.history_width, jnp.int32),
        (features.bias_width, jnp.int32),
        (features.bias_width, jnp.float32),
        (features.allowed_width, jnp.int32),
        (features.mask_width, jnp.int32),
    ]


def build_sampling_arrays(
    requests: Sequence[RequestSampling], num_rows: int, vocab_size: int, num_inflight: Sequence[int] = ()
) -> tuple[SamplingArrays, SamplerFeatures]:
    """The arrays for sampling each request's next token, row by row in the given order.

    Args:
      requests: At most R requests' sampling states; their live outputs tell where each stands.
      num_rows: R; rows past the requests are greedy over whatever logits they hold, and change no other row.
      vocab_size: V.
      num_inflight: For each request, tokens sampled already that its live output does not hold yet; none by default.

    Returns:
      Numpy arrays, and the features to compile for.
    """
    num_inflight = num_inflight or [0] * len(requests)
    biases = [request.bias(inflight) for request, inflight in zip(requests, num_inflight, strict=True)]
    histories = [request.history() for request in requests]
    allowed = [request.allowed_ids for request in requests]

    temperature = np.zeros(num_rows, np.float32)
    top_k = np.full(num_rows, vocab_size, np.int32)
    top_p = np.ones(num_rows, np.float32)
    min_p = np.zeros(num_rows, np.float32)
    seed = np.zeros((num_rows, 2), np.uint32)
    step = np.zeros(num_rows, np.int32)
    frequency_penalty = np.zeros(num_rows, np.float32)
    presence_penalty = np.zeros(num_rows, np.float32)
    repetition_penalty = np.ones(num_rows, np.float32)

    for i, request in enumerate(requests):
        params = request.params
        step[i] = len(request.output_token_ids) + num_inflight[i]
        frequency_penalty[i] = params.frequency_penalty
        presence_penalty[i] = params.presence_penalty
        repetition_penalty[i] = params.repetition_penalty
        if params.temperature < MIN_TEMPERATURE:
            continue  # a greedy row has no use for filters or a seed
        temperature[i] = min(params.temperature, MAX_TEMPERATURE)
        if 0 < params.top_k < vocab_size:
            top_k[i] = params.top_k
        top_p[i] = params.top_p
        min_p[i] = params.min_p
        seed[i] = request.seed & 0xFFFFFFFF, request.seed >> 32

    arrays = SamplingArrays(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        step=step,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        history_ids=_pad([ids for ids, _ in histories], num_rows, vocab_size, np.int32),
        history_counts=_pad([counts for _, counts in histories], num_rows, 0, np.int32),
        bias_ids=_pad([ids for ids, _ in biases], num_rows, vocab_size, np.int32),
        bias=_pad([values for _, values in biases], num_rows, 0.0, np.float32),
        allowed_ids=_pad(allowed, num_rows, vocab_size, np.int32),
        token_mask=_token_mask(requests, num_rows, vocab_size),
    )
    wants_logprobs = any(request.params.logprobs is not None for request in requests)
    features = SamplerFeatures(
        greedy_only=not temperature.any(),
        has_filters=bool((top_k < vocab_size).any() or (top_p < 1).any() or (min_p > 0).any()),
        history_width=arrays.history_ids.shape[1],
        bias_width=arrays.bias_ids.shape[1],
        allowed_width=arrays.allowed_ids.shape[1],
        mask_width=arrays.token_mask.shape[1],
        # All counts share one program: more than was asked for costs next to nothing, a compilation seconds.
        num_logprobs=MAX_LOGPROBS if wants_logprobs else None,
    )
    return arrays, features


def _token_mask(requests: Sequence[RequestSampling], num_rows: int, vocab_size: int) -> np.ndarray:
    if all(request.grammar is None for request in requests):
        return np.empty((num_rows, 0), np.int32)
    packed = np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)
    for row, request in zip(packed, requests, strict=False):
        if request.grammar is not None:
            row[:] = request.token_mask()
    return packed


def _pad(rows: Sequence[np.ndarray], num_rows: int, fill: float, dtype: type) -> np.ndarray:
    """Rows of different lengths as one array, wide enough for the longest: 0, 64, 256, 1024, ..."""
    longest = max(map(len, rows), default=0)
    width = MIN_WIDTH if longest else 0
    while width < longest:
        width *= WIDTH_GROWTH
    padded = np.full((num_rows, width), fill, dtype)
    for row, values in zip(padded, rows, strict=False):
        row[: len(values)] = values
    return padded

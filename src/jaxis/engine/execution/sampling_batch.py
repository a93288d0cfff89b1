"""The sampling parameters of a step's rows as arrays, and the features that the sampler needs for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.execution.token_history import TokenHistory
from jaxis.sampling_params import ALL_LOGPROBS, LOGPROBS_MODES, MAX_LOGPROBS, RAW_LOGPROBS, SamplingParams

# Widths grow in large steps: a wider list costs microseconds, another program a second of compilation.
MIN_WIDTH = 64
WIDTH_GROWTH = 4
# Above this temperature all tokens are equally likely in float32, and reciprocals soon underflow.
MAX_TEMPERATURE = 1e30

Array = TypeVar("Array", jax.Array, np.ndarray)


@dataclass(frozen=True)
class SamplerFeatures:
    """The sampling features that a step uses. Static: each distinct value is a compiled program.

    Attributes:
      greedy_only: True if no row draws at random.
      has_filters: True if some row uses top-k, top-p or min-p.
      history_width: Token ids a row that penalties look at; 0 without penalties.
      bias_width: Biased or banned token ids a row; 0 without.
      allowed_width: Allowed token ids a row; 0 without.
      mask_width: Words of a token mask a row; 0 without structured output.
      num_logprobs: Most likely tokens to return a row (0: only the sampled one's log-probability); None for none.
      has_logprobs_modes: True if some row needs other values than the log-probabilities of the model's own logits.
      has_favored: True if some row has a token that is taken if it is among the likely ones.
    """

    greedy_only: bool = True
    has_filters: bool = False
    history_width: int = 0
    bias_width: int = 0
    allowed_width: int = 0
    mask_width: int = 0
    num_logprobs: int | None = None
    has_logprobs_modes: bool = False
    has_favored: bool = False

    def covers(self, other: SamplerFeatures) -> bool:
        """Returns whether a program compiled for these features can do all that the other features need."""
        return self.join(other) == self

    def join(self, other: SamplerFeatures) -> SamplerFeatures:
        """Returns the features that both together need."""
        counts = [count for count in (self.num_logprobs, other.num_logprobs) if count is not None]
        return SamplerFeatures(
            greedy_only=self.greedy_only and other.greedy_only,
            has_filters=self.has_filters or other.has_filters,
            history_width=max(self.history_width, other.history_width),
            bias_width=max(self.bias_width, other.bias_width),
            allowed_width=max(self.allowed_width, other.allowed_width),
            mask_width=max(self.mask_width, other.mask_width),
            num_logprobs=max(counts, default=None),
            has_logprobs_modes=self.has_logprobs_modes or other.has_logprobs_modes,
            has_favored=self.has_favored or other.has_favored,
        )


class SamplingArrays(NamedTuple, Generic[Array]):
    """The sampling parameters of R rows; a pytree of numpy or device arrays.

    Lists of token ids are padded with V, which is no token's id.

    Attributes:
      temperature: float32 [R]; 0 is greedy.
      top_k: int32 [R]; V keeps all.
      top_p: float32 [R]; 1 keeps all.
      min_p: float32 [R]; 0 keeps all.
      seed: uint32 [R, 2], low half first.
      step: int32 [R], the index of the token within its sequence's output.
      frequency_penalty: float32 [R].
      presence_penalty: float32 [R].
      repetition_penalty: float32 [R].
      history_ids: int32 [R, history_width], distinct tokens of prompt and output.
      history_counts: int32 [R, history_width], the times that each was generated; 0 if it stands in the prompt only.
      bias_ids: int32 [R, bias_width].
      bias: float32 [R, bias_width], added to those tokens' logits; -inf bans.
      allowed_ids: int32 [R, allowed_width]; a row that starts with V allows all.
      token_mask: int32 [R, mask_width]; bit i % 32 of word i / 32 is 0 where the row's grammar forbids token i.
      logprobs_mode: int32 [R, 1], an index into LOGPROBS_MODES, or [R, 0] if no row has one.
      favored_ids: int32 [R, 1], the token that is taken if it is among the likely ones; or [R, 0] if no row has one.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed: Array
    step: Array
    frequency_penalty: Array
    presence_penalty: Array
    repetition_penalty: Array
    history_ids: Array
    history_counts: Array
    bias_ids: Array
    bias: Array
    allowed_ids: Array
    token_mask: Array
    logprobs_mode: Array
    favored_ids: Array

    @staticmethod
    def greedy(num_rows: int, vocab_size: int) -> SamplingArrays[np.ndarray]:
        """Returns rows that take the most likely token, with nothing else asked for."""
        return SamplingArrays(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.full(num_rows, vocab_size, np.int32),
            top_p=np.ones(num_rows, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            seed=np.zeros((num_rows, 2), np.uint32),
            step=np.zeros(num_rows, np.int32),
            frequency_penalty=np.zeros(num_rows, np.float32),
            presence_penalty=np.zeros(num_rows, np.float32),
            repetition_penalty=np.ones(num_rows, np.float32),
            history_ids=np.empty((num_rows, 0), np.int32),
            history_counts=np.empty((num_rows, 0), np.int32),
            bias_ids=np.empty((num_rows, 0), np.int32),
            bias=np.empty((num_rows, 0), np.float32),
            allowed_ids=np.empty((num_rows, 0), np.int32),
            token_mask=np.empty((num_rows, 0), np.int32),
            logprobs_mode=np.empty((num_rows, 0), np.int32),
            favored_ids=np.empty((num_rows, 0), np.int32),
        )

    @staticmethod
    def packed_size(num_rows: int, features: SamplerFeatures) -> int:
        """Returns the length of the packed vector, in int32 words."""
        return num_rows * sum(columns or 1 for columns, _ in _layout(features) if columns != 0)

    @staticmethod
    def unpack(packed: jax.Array, num_rows: int, features: SamplerFeatures) -> SamplingArrays[jax.Array]:
        """Returns the arrays in a vector packed for these features, inside or outside a jitted function.

        `packed` is int32 [packed_size(num_rows, features)]; `num_rows` and `features` are static.
        """
        return SamplingArrays(
            *(
                field if dtype == jnp.int32 else jax.lax.bitcast_convert_type(field, dtype)
                for field, dtype in _fields(packed, num_rows, features)
            )
        )

    @staticmethod
    def views(packed: np.ndarray, num_rows: int, features: SamplerFeatures) -> SamplingArrays[np.ndarray]:
        """Returns the arrays of `unpack` as views on the host: writing to them writes to the vector."""
        return SamplingArrays(*(field.view(dtype) for field, dtype in _fields(packed, num_rows, features)))


def _fields(packed: Array, num_rows: int, features: SamplerFeatures) -> Iterator[tuple[Array, type]]:
    """Yields each field of the SamplingArrays in a packed vector, as int32 still, and its type."""
    start = 0
    for columns, dtype in _layout(features):
        shape = (num_rows,) if columns is None else (num_rows, columns)
        size = num_rows if columns is None else num_rows * columns
        yield packed[start : start + size].reshape(shape), dtype
        start += size


def _layout(features: SamplerFeatures) -> list[tuple[int | None, type]]:
    """Returns the columns (None for a vector) and dtype of each field of SamplingArrays, in order."""
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
        (int(features.has_logprobs_modes), jnp.int32),
        (int(features.has_favored), jnp.int32),
    ]


@dataclass(frozen=True)
class SamplingBatch:
    """The rows that a rank samples in a step.

    Attributes:
      arrays: Parameters of the R rows; the lists are as wide as the longest needs. Histories are not among them: they
        are long, and only their differences are written to a step's vector.
      histories: History of each row that has a sequence, and the drafts to count as well.
      features: Features to compile the sampler for.
    """

    arrays: SamplingArrays[np.ndarray]
    histories: Sequence[tuple[TokenHistory | None, Sequence[int]]]
    features: SamplerFeatures


def build_sampling_batch(
    sequences: Sequence[SequenceSampling],
    num_rows: int,
    vocab_size: int,
    num_inflight: Sequence[int] = (),
    drafts: Sequence[Sequence[int]] = (),
) -> SamplingBatch:
    """Returns the parameters for sampling each sequence's next token, row by row in the given order.

    A sequence with drafts has a row for its next token and one for the token after each draft. A token after a draft is
    sampled as if the drafts before it were part of the output; it counts only if those drafts turn out right.

    Args:
      sequences: Sampling states of at most R sequences. The length of a live output gives the position of its next
        token.
      num_rows: R; rows past the sequences are greedy over whatever logits they hold, and change no other row.
      vocab_size: Size of the vocabulary (V).
      num_inflight: For each sequence, tokens sampled already that its live output does not hold yet; none by default.
      drafts: For each sequence, its draft tokens; none by default, and none while tokens are in flight.
    """
    num_inflight = num_inflight or [0] * len(sequences)
    drafts = drafts or [()] * len(sequences)
    rows = [
        (sequence, inflight, tuple(ahead[:index]))
        for sequence, inflight, ahead in zip(sequences, num_inflight, drafts, strict=True)
        for index in range(len(ahead) + 1)
    ]
    arrays = SamplingArrays.greedy(num_rows, vocab_size)
    for row, (sequence, inflight, ahead) in enumerate(rows):
        params = sequence.params
        arrays.step[row] = len(sequence.output_token_ids) + inflight + len(ahead)
        arrays.frequency_penalty[row] = params.frequency_penalty
        arrays.presence_penalty[row] = params.presence_penalty
        arrays.repetition_penalty[row] = params.repetition_penalty
        if params.greedy:
            continue  # a greedy row has no use for filters or a seed
        arrays.temperature[row] = min(params.temperature, MAX_TEMPERATURE)
        if 0 < params.top_k < vocab_size:
            arrays.top_k[row] = params.top_k
        arrays.top_p[row] = params.top_p
        arrays.min_p[row] = params.min_p
        arrays.seed[row] = sequence.seed & 0xFFFFFFFF, sequence.seed >> 32
    biases = [sequence.bias(inflight, ahead) for sequence, inflight, ahead in rows]
    arrays = arrays._replace(
        bias_ids=_pad([ids for ids, _ in biases], num_rows, vocab_size, np.int32),
        bias=_pad([values for _, values in biases], num_rows, 0.0, np.float32),
        allowed_ids=_pad([sequence.allowed_ids for sequence, _, _ in rows], num_rows, vocab_size, np.int32),
        token_mask=_token_mask([(sequence, ahead) for sequence, _, ahead in rows], num_rows, vocab_size),
        logprobs_mode=_logprobs_modes([sequence.params for sequence, _, _ in rows], num_rows),
        favored_ids=_favored([(sequence, ahead) for sequence, _, ahead in rows], num_rows, vocab_size),
    )
    histories = [(sequence.history(), ahead) for sequence, _, ahead in rows]
    return SamplingBatch(arrays, histories, _features(arrays, histories, sequences, vocab_size))


def scoring_batch(params: SamplingParams, num_rows: int, vocab_size: int) -> SamplingBatch:
    """Returns R rows that all have a request's parameters, without those that depend on earlier tokens.

    `SamplingParams.check_scores` must accept `params`.
    """
    params = dataclasses.replace(params, logprobs=params.prompt_logprobs)
    row = SequenceSampling(params, prompt_token_ids=(), output_token_ids=[], vocab_size=vocab_size, seed=0)
    return build_sampling_batch([row] * num_rows, num_rows, vocab_size)


def _features(
    arrays: SamplingArrays[np.ndarray],
    histories: Sequence[tuple[TokenHistory | None, Sequence[int]]],
    sequences: Sequence[SequenceSampling],
    vocab_size: int,
) -> SamplerFeatures:
    wanted = {sequence.params.logprobs for sequence in sequences}
    wants_logprobs = bool(wanted - {None})
    has_filters = (arrays.top_k < vocab_size).any() or (arrays.top_p < 1).any() or (arrays.min_p > 0).any()
    sizes = [history.num_with(ahead) for history, ahead in histories if history is not None]
    return SamplerFeatures(
        greedy_only=not arrays.temperature.any(),
        has_filters=bool(has_filters),
        history_width=_width(max(sizes, default=0)),
        bias_width=arrays.bias_ids.shape[1],
        allowed_width=arrays.allowed_ids.shape[1],
        mask_width=arrays.token_mask.shape[1],
        # All counts share one program: more than was asked for costs next to nothing, a compilation seconds.
        num_logprobs=(vocab_size if ALL_LOGPROBS in wanted else MAX_LOGPROBS) if wants_logprobs else None,
        has_logprobs_modes=arrays.logprobs_mode.shape[1] > 0,
        has_favored=arrays.favored_ids.shape[1] > 0,
    )


def _token_mask(rows: Sequence[tuple[SequenceSampling, tuple[int, ...]]], num_rows: int, vocab_size: int) -> np.ndarray:
    if all(sequence.grammar is None for sequence, _ in rows):
        return np.empty((num_rows, 0), np.int32)
    packed = np.full((num_rows, -(-vocab_size // 32)), -1, np.int32)
    for words, (sequence, ahead) in zip(packed, rows, strict=False):
        if (mask := sequence.token_mask(ahead)) is not None:
            words[:] = mask
    return packed


def _favored(rows: Sequence[tuple[SequenceSampling, tuple[int, ...]]], num_rows: int, vocab_size: int) -> np.ndarray:
    if not any(sequence.grammar is not None and sequence.grammar.may_favor for sequence, _ in rows):
        return np.empty((num_rows, 0), np.int32)
    ids = np.full((num_rows, 1), vocab_size, np.int32)
    for row, (sequence, ahead) in enumerate(rows):
        if (token_id := sequence.favored_token(ahead)) is not None:
            ids[row] = token_id
    return ids


def _logprobs_modes(rows: Sequence[SamplingParams], num_rows: int) -> np.ndarray:
    modes = [params.logprobs_mode or RAW_LOGPROBS for params in rows if params.logprobs is not None]
    if all(mode == RAW_LOGPROBS for mode in modes):
        return np.empty((num_rows, 0), np.int32)
    indices = np.zeros((num_rows, 1), np.int32)
    indices[: len(rows), 0] = [LOGPROBS_MODES.index(params.logprobs_mode or RAW_LOGPROBS) for params in rows]
    return indices


def _pad(rows: Sequence[np.ndarray], num_rows: int, fill: float, dtype: type) -> np.ndarray:
    padded = np.full((num_rows, _width(max(map(len, rows), default=0))), fill, dtype)
    if padded.size:
        for row, values in zip(padded, rows, strict=False):
            row[: len(values)] = values
    return padded


def _width(longest: int) -> int:
    """Returns the padded length of a list: 0, 64, 256, 1024, ..."""
    width = MIN_WIDTH if longest else 0
    while width < longest:
        width *= WIDTH_GROWTH
    return width

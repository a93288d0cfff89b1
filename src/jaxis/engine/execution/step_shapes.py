"""The few shapes that steps are padded to, so that few programs have to be compiled."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jaxis.config import VllmConfig
from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.scheduling.state_slots import StateStep

SMALLEST_PADDED_TOKENS = 8  # a single token is not padded
# The packed fields of a StateStep, and of the kernels' StateSlots.
STATE_FIELDS = {name: f"state_{name}" for name in StateStep._fields}


@dataclass(frozen=True)
class StepShape:
    """The shape a step is compiled for; the actual counts are at most these.

    Attributes:
      num_tokens: Tokens (T).
      num_seqs: Sequences (R).
      max_blocks: Blocks of the longest possible sequence.
      block_size: Tokens in a block (B).
      spans: Spans of a sequence that layers keep, each with its own block table.
      has_states: True if there are layers with a recurrent state.
      samples_drafts: True if a token may be sampled after every row, as for entries with drafts, not just one for each
        sequence.
      parts: Additions of features to the step (see `StepPart`).
    """

    num_tokens: int
    num_seqs: int
    max_blocks: int
    block_size: int
    spans: tuple[AttentionSpan, ...]
    has_states: bool = False
    samples_drafts: bool = False
    parts: tuple[Any, ...] = ()

    @property
    def num_rows(self) -> int:
        """The number of rows that are sampled from (S)."""
        return self.num_tokens if self.samples_drafts else self.num_seqs

    def table_width(self, span: AttentionSpan) -> int:
        """Returns the packed entries of a sequence's block table: as many as a step may read."""
        return span.max_step_blocks(self.max_blocks, self.block_size, self.num_tokens)

    @functools.cached_property
    def fields(self) -> dict[str, slice]:
        """The slice of each field in the packed vector."""
        sizes = {
            "input_ids": self.num_tokens,
            "positions": self.num_tokens,
            "seq_lens": self.num_seqs,
            "query_start_loc": self.num_seqs + 1,
            "request_distribution": 3,
            "inflight_rows": self.num_seqs,
            "logits_rows": self.num_rows,
        }
        for i, span in enumerate(self.spans):
            sizes[f"block_tables_{i}"] = self.num_seqs * self.table_width(span)
            sizes[f"first_blocks_{i}"] = self.num_seqs
        if self.has_states:
            sizes |= dict.fromkeys(STATE_FIELDS.values(), self.num_seqs)
        for part in self.parts:
            sizes |= part.sizes(self)
        stops = itertools.accumulate(sizes.values())
        return {name: slice(stop - size, stop) for (name, size), stop in zip(sizes.items(), stops, strict=True)}

    @property
    def packed_size(self) -> int:
        return max(field.stop for field in self.fields.values())


class StepShapes:
    """The step shapes of an engine, by number of tokens.

    Args:
      vllm_config: The engine's configuration, of which the limits are read.
      spans: Spans of a sequence that layers keep, the span that keeps most first.
      max_model_len: Most tokens of a sequence.
      has_states: True if there are layers with a recurrent state.
      compiles_fast: True if programs compile fast enough to have more of them, as those do that only call native
        kernels.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        spans: Iterable[AttentionSpan],
        max_model_len: int,
        *,
        has_states: bool = False,
        compiles_fast: bool,
    ) -> None:
        self._block_size = vllm_config.cache_config.block_size
        self._max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self._max_blocks = -(-max_model_len // self._block_size)
        self._spans = tuple(spans)
        self._has_states = has_states
        self._compiles_fast = compiles_fast
        self._shapes: dict[tuple[int, bool, tuple[Any, ...]], StepShape] = {}

    def of(self, num_tokens: int, num_rows: int = 1, parts: tuple[Any, ...] = ()) -> StepShape:
        """Returns the smallest shape for this many tokens, of which `num_rows` are followed by a sampled one."""
        padded = max(min(self.padded(num_tokens), self._max_num_tokens), num_tokens)
        num_seqs = min(padded, self._max_num_seqs)
        samples_drafts = num_rows > num_seqs
        key = padded, samples_drafts, parts
        if key not in self._shapes:
            sizes = padded, num_seqs, self._max_blocks, self._block_size
            self._shapes[key] = StepShape(*sizes, self._spans, self._has_states, *key[1:])
        return self._shapes[key]

    def padded(self, num_tokens: int) -> int:
        """Rounds up to a power of two, or 1.5 times one if programs compile fast."""
        power = 1 << (num_tokens - 1).bit_length()
        if self._compiles_fast:
            return power * 3 // 4 if power > SMALLEST_PADDED_TOKENS and num_tokens <= power * 3 // 4 else power
        return 1 if num_tokens == 1 else max(SMALLEST_PADDED_TOKENS, power)

"""The few shapes that steps are padded to, so that few programs have to be compiled."""

from __future__ import annotations

from collections.abc import Iterable

from jaxis.config import VllmConfig
from jaxis.config.attention_span import AttentionSpan
from jaxis.engine.execution.step_inputs import StepShape

SMALLEST_PADDED_TOKENS = 8  # a single token is not padded


class StepShapes:
    """A step's number of tokens -> the shape it is padded to.

    Args:
      vllm_config: The engine's limits.
      spans: What the layers keep of a sequence, the span that keeps most first.
      max_model_len: Most tokens of a sequence.
      has_states: Whether there are layers with a recurrent state.
      compiles_fast: Whether programs compile fast enough to have more of them, as those do that only call native
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
        self._shapes: dict[tuple[int, bool], StepShape] = {}

    def of(self, num_tokens: int, num_rows: int = 1) -> StepShape:
        """The smallest shape that holds this many tokens, of which `num_rows` are followed by a sampled one."""
        padded = max(min(self.padded(num_tokens), self._max_num_tokens), num_tokens)
        num_seqs = min(padded, self._max_num_seqs)
        samples_drafts = num_rows > num_seqs
        if (padded, samples_drafts) not in self._shapes:
            self._shapes[padded, samples_drafts] = StepShape(
                padded, num_seqs, self._max_blocks, self._block_size, self._spans, self._has_states, samples_drafts
            )
        return self._shapes[padded, samples_drafts]

    def padded(self, num_tokens: int) -> int:
        """Rounds up to a power of two, or 1.5 times one if programs compile fast."""
        power = 1 << (num_tokens - 1).bit_length()
        if self._compiles_fast:
            return power * 3 // 4 if power > SMALLEST_PADDED_TOKENS and num_tokens <= power * 3 // 4 else power
        return 1 if num_tokens == 1 else max(SMALLEST_PADDED_TOKENS, power)

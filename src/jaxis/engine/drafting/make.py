"""From `speculative_config` to what makes the engine's drafts."""

from __future__ import annotations

from collections.abc import Callable

from jaxis.config.speculative import LAYER_METHODS, SpeculativeConfig
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.draft_length import DraftLengths
from jaxis.engine.drafting.drafter import Drafter
from jaxis.engine.drafting.layer_lengths import LayerLengths
from jaxis.engine.drafting.layer_speculation import LayerSpeculation
from jaxis.engine.drafting.lookup import LookupDrafter
from jaxis.engine.drafting.speculation import Speculation
from jaxis.engine.drafting.suffix import SuffixDrafter
from jaxis.engine.execution.runner import Runner
from jaxis.engine.scheduling.sequence import Sequence


def make_speculation(
    config: SpeculativeConfig | None, runner: Runner, extend_blocks: Callable[[Sequence, int, int], bool]
) -> Speculation | LayerSpeculation | None:
    """What makes drafts as configured; None if nothing does.

    Args:
      config: As the user asked for it.
      runner: Runs the steps with drafts.
      extend_blocks: See `DraftLayers`.
    """
    if config is None:
        return None
    if config.method in LAYER_METHODS:
        return _layer_speculation(config, runner, extend_blocks)
    num_ranks = runner.num_ranks

    def of_a_rank(num_tokens: int) -> int:
        """Of the tokens of a step of all data ranks, a rank's: sequences are spread over them."""
        return -(-num_tokens // num_ranks)

    lengths = DraftLengths(
        lambda num_tokens: num_ranks * runner.step_shape(of_a_rank(num_tokens)).num_tokens,
        lambda num_tokens: runner.can_draft(of_a_rank(num_tokens)),
        num_ranks * runner.vllm_config.scheduler_config.max_num_batched_tokens,
        config.most_drafts,
    )
    return Speculation(_drafter(config), lengths, max_drafts=config.num_speculative_tokens)


def _layer_speculation(
    config: SpeculativeConfig, runner: Runner, extend_blocks: Callable[[Sequence, int, int], bool]
) -> LayerSpeculation:
    drafter = DraftLayers(runner, config.num_speculative_tokens, extend_blocks)
    lengths = LayerLengths(
        lambda num_tokens: runner.step_shape(num_tokens).num_tokens,
        lambda num_running, num_tokens: runner.can_draft(num_tokens, *drafter.programs(num_running, num_tokens)),
        runner.vllm_config.scheduler_config.max_num_batched_tokens,
        config.most_drafts,
    )
    drafter.may_catch_up = lengths.may_catch_up
    return LayerSpeculation(drafter, lengths, max_drafts=config.num_speculative_tokens)


def _drafter(config: SpeculativeConfig) -> Drafter:
    if config.method == "suffix":
        return SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    return LookupDrafter(config.prompt_lookup_min, config.prompt_lookup_max)

"""From `speculative_config` to what makes the engine's drafts."""

from __future__ import annotations

from collections.abc import Callable

from jaxis.config.speculative import LAYER_METHODS, SpeculativeConfig
from jaxis.engine.drafting.draft_budget import DraftBudget
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
from jaxis.kernels.ragged_paged_attention.cpu import CACHE_AXES
from jaxis.models.common.interfaces import DraftsBlocks, draft_of

# What compiling the programs of a size of step takes, about.
COMPILE_SECONDS = 1.0
# Unless it is asked for, nothing is guessed where steps are shorter: there, to look for guesses shows.
LEAST_STEP_SECONDS = 0.005


def make_speculation(
    config: SpeculativeConfig | None, runner: Runner, extend_blocks: Callable[[Sequence, int, int], bool]
) -> Speculation | LayerSpeculation | None:
    """What makes drafts as configured; None if nothing does.

    Args:
      config: As the user asked for it; None: n-gram lookup where it is on by default.
      runner: Runs the steps with drafts.
      extend_blocks: See `DraftLayers`.
    """
    compile_seconds = least_step_seconds = 0.0
    if config is None and is_on_by_default(runner):
        # Nobody asked for it: it must earn what compiling takes first.
        config, compile_seconds = SpeculativeConfig("ngram"), COMPILE_SECONDS
        least_step_seconds = LEAST_STEP_SECONDS
    if config is None or config.num_speculative_tokens == 0:
        return None
    if config.method in LAYER_METHODS:
        return _layer_speculation(config, runner, extend_blocks)
    num_ranks = runner.num_ranks

    def of_a_rank(num_tokens: int) -> int:
        """Of the tokens of a step of all data ranks, a rank's: sequences are spread over them."""
        return -(-num_tokens // num_ranks)

    lengths = DraftLengths(
        lambda num_tokens: num_ranks * runner.step_shape(of_a_rank(num_tokens)).num_tokens,
        lambda num_tokens, starts: runner.can_draft(of_a_rank(num_tokens), starts=starts),
        num_ranks * runner.vllm_config.scheduler_config.max_num_batched_tokens,
        config.most_drafts,
        compile_seconds,
    )
    return Speculation(
        _drafter(config),
        lengths,
        max_drafts=config.num_speculative_tokens,
        budget=DraftBudget(least_step_seconds),
    )


def is_on_by_default(runner: Runner) -> bool:
    """Whether n-gram lookup is on if nothing is said: where it changes no bit of an answer, and takes no memory.

    That is on one CPU device, with native kernels for the attention of all layers. Layers with recurrent states would
    need slots for drafts, of which there would be fewer for sequences.
    """
    executor = runner.executor
    return (
        executor.is_native
        and runner.num_stages == 1
        and executor.mesh.size == 1
        and runner.num_state_slots is None
        and all(not isinstance(struct, tuple) and len(struct.shape) == CACHE_AXES for struct in executor.plan.structs)
    )


def _layer_speculation(
    config: SpeculativeConfig, runner: Runner, extend_blocks: Callable[[Sequence, int, int], bool]
) -> LayerSpeculation:
    max_drafts = config.num_speculative_tokens
    draft = draft_of(runner.model)
    if isinstance(draft, DraftsBlocks):
        max_drafts = min(max_drafts, draft.block_size - 1)
    drafter = DraftLayers(runner, max_drafts, extend_blocks)
    lengths = LayerLengths(
        lambda num_tokens: runner.step_shape(num_tokens).num_tokens,
        lambda num_running, num_tokens: runner.can_draft(num_tokens, *drafter.programs(num_running, num_tokens)),
        runner.vllm_config.scheduler_config.max_num_batched_tokens,
        config.most_drafts,
    )
    drafter.may_catch_up = lengths.may_catch_up
    return LayerSpeculation(drafter, lengths, max_drafts=max_drafts)


def _drafter(config: SpeculativeConfig) -> Drafter:
    if config.method == "suffix":
        return SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    return LookupDrafter(config.prompt_lookup_min, config.prompt_lookup_max)

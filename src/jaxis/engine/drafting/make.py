"""From `speculative_config` to what makes the engine's drafts."""

from __future__ import annotations

from collections.abc import Callable

from jaxis.config.speculative import LAYER_METHODS, SpeculativeConfig
from jaxis.engine.drafting.chooser import DraftChooser
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.lookup import LookupDrafter
from jaxis.engine.drafting.speculation import Drafter, NoSpeculation, Speculation
from jaxis.engine.drafting.suffix import SuffixDrafter
from jaxis.engine.execution.runner import Runner
from jaxis.engine.scheduling.sequence import Sequence
from jaxis.kernels.paged_cache import PagedCache

# What compiling the programs of a size of step takes, about.
COMPILE_SECONDS = 1.0
# Unless it is asked for, nothing is guessed where steps are shorter: there, to look for guesses shows.
LEAST_STEP_SECONDS = 0.005


def make_speculation(
    config: SpeculativeConfig | None, runner: Runner, extend_blocks: Callable[[Sequence, int, int], bool]
) -> NoSpeculation:
    """What makes drafts as configured.

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
        return NoSpeculation()
    num_ranks = runner.num_ranks

    def of_a_rank(num_tokens: int) -> int:
        """Of the tokens of a step of all data ranks, a rank's: sequences are spread over them."""
        return -(-num_tokens // num_ranks)

    drafter = _drafter(config, runner, extend_blocks)
    chooser = DraftChooser(
        lambda num_tokens: num_ranks * runner.step_shape(of_a_rank(num_tokens)).num_tokens,
        lambda num_running, num_tokens, starts: runner.can_draft(
            of_a_rank(num_tokens), *drafter.programs(num_running, num_tokens), starts=starts
        ),
        num_ranks * runner.vllm_config.scheduler_config.max_num_batched_tokens,
        config.most_drafts,
        takes_time=drafter.takes_time,
        compile_seconds=compile_seconds,
        least_step_seconds=least_step_seconds,
    )
    return Speculation(drafter, chooser, max_drafts=config.num_speculative_tokens)


def is_on_by_default(runner: Runner) -> bool:
    """Whether n-gram lookup is on if nothing is said: where it changes no bit of an answer, and takes no memory.

    That is on one CPU device, with native kernels for the attention of all layers. Layers with recurrent states would
    need slots for drafts, of which there would be fewer for sequences.
    """
    executor = runner.executor.stages[-1]
    return (
        executor.is_native
        and runner.num_stages == 1
        and executor.context.mesh.size == 1
        and runner.num_state_slots is None
        and all(isinstance(cache, PagedCache) and cache.layout.kernels == "native" for cache in executor.plan.structs)
    )


def _drafter(config: SpeculativeConfig, runner: Runner, extend_blocks: Callable[[Sequence, int, int], bool]) -> Drafter:
    if config.method in LAYER_METHODS:
        return DraftLayers(runner, config.num_speculative_tokens, extend_blocks)
    if config.method == "suffix":
        return SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    return LookupDrafter(config.prompt_lookup_min, config.prompt_lookup_max)

"""Construction of an engine's speculative decoding from `speculative_config`."""

from __future__ import annotations

from collections.abc import Callable

from jaxis.config.speculative import LAYER_METHODS, SpeculativeConfig
from jaxis.engine.drafting.chooser import DraftChooser
from jaxis.engine.drafting.draft_layers import DraftLayers
from jaxis.engine.drafting.lookup import LookupDrafter
from jaxis.engine.drafting.prediction import prediction_token_ids
from jaxis.engine.drafting.speculation import Drafter, Speculation
from jaxis.engine.drafting.suffix import SuffixDrafter
from jaxis.engine.execution.runner import Runner
from jaxis.engine.scheduling.sequence import Sequence
from jaxis.engine.speculation import NoSpeculation
from jaxis.errors import ConfigError
from jaxis.kernels.paged_cache import PagedCache
from jaxis.models.common.interfaces import block_size_of, draft_of
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer

# Approximate time of compiling the programs for one size of step.
COMPILE_SECONDS = 1.0
# Shortest steps that get drafts by default: in shorter ones, the time of looking for guesses is noticeable.
LEAST_STEP_SECONDS = 0.005


def make_speculation(
    config: SpeculativeConfig | None,
    runner: Runner,
    extend_blocks: Callable[[Sequence, int, int], bool],
    tokenizer: Tokenizer | None,
) -> NoSpeculation:
    """Returns what makes drafts as configured; takes the arguments of `engine.speculation.make_speculation`."""
    compile_seconds = least_step_seconds = 0.0
    if config is None and is_on_by_default(runner):
        # The user did not ask for drafts: they must be worth the time of compiling first.
        config, compile_seconds = SpeculativeConfig("ngram"), COMPILE_SECONDS
        least_step_seconds = LEAST_STEP_SECONDS
    if config is None or config.num_speculative_tokens == 0:
        return NoSpeculation()
    num_ranks = runner.num_ranks

    def of_a_rank(num_tokens: int) -> int:
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

    def read_prediction(params: SamplingParams) -> list[int]:
        return prediction_token_ids(params, tokenizer, runner.vocab_size, runner.max_model_len)

    return Speculation(drafter, chooser, max_drafts=config.num_speculative_tokens, read_prediction=read_prediction)


def is_on_by_default(runner: Runner) -> bool:
    """Returns whether n-gram lookup is on by default: where it changes no bit of an answer and takes no memory.

    That is on one CPU device, with native kernels for the attention of all layers. Layers with recurrent states would
    need state slots for drafts, which would leave fewer for sequences.
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
        if (size := block_size_of(draft_of(runner.model))) and config.num_speculative_tokens > size:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens={config.num_speculative_tokens} is more than the {size} "
                "tokens that the checkpoint's layers draft at once: give at most so many"
            )
        return DraftLayers(runner, config.num_speculative_tokens, extend_blocks)
    if config.method == "suffix":
        return SuffixDrafter(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
    return LookupDrafter(config.prompt_lookup_min, config.prompt_lookup_max)

"""The host half of a step: packs a scheduled batch, chooses and calls its programs, and returns the tokens.

A step is two programs: the model over T tokens, and the sampler over S rows (one a sequence and one a draft). So the
few variants of the sampler do not multiply with the many token counts. Only the greedy decode of a single sequence,
whose fixed costs show most, is one program. Dispatch returns at once; the sampled tokens stay on the device for the
next step, and are copied to the host when asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxis.engine.execution.compiled_features import CompiledFeatures
from jaxis.engine.execution.dispatched_step import DispatchedStep, ForwardedStep, Observation, SamplingStates
from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.program_key import ProgramKey
from jaxis.engine.execution.programs import CompileWait, Programs
from jaxis.engine.execution.request_features import RequestFeatures
from jaxis.engine.execution.sampler import SamplerOutput
from jaxis.engine.execution.sampling_batch import SamplerFeatures, build_sampling_batch
from jaxis.engine.execution.sampling_packer import SamplingPacker
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.execution.step_inputs import pack_step
from jaxis.engine.execution.step_logits import StepLogits, first_rows, token_rows
from jaxis.engine.execution.step_part import HeadPart, StepParts, head_of
from jaxis.engine.execution.step_programs import (
    ForwardKey,
    GreedyStepKey,
    SampleKey,
    WholeKey,
)
from jaxis.engine.execution.step_shapes import StepShape, StepShapes
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import SequenceId
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule


class NewestStep(NamedTuple):
    """The step that was dispatched last.

    Attributes:
      output: The scheduled step.
      shape: Shape that it was padded to.
      packed: Vector that the model was called with.
    """

    output: SchedulerOutput
    shape: StepShape
    packed: np.ndarray


class Runner:
    """Turns scheduled batches into calls of programs.

    Attributes:
      programs: The model's programs.
      executor: The executor of the programs.
      connector: Connector to blocks beyond the devices; by default one that keeps none.
      num_ranks: Data ranks.
      num_stages: Pipeline stages.
      num_blocks: Blocks of a rank's KV cache for the layers of each span, the span that keeps most first.
      kv_bytes_per_block: Bytes of one such block in all its layers, by span.
      num_state_slots: Slots of a rank's recurrent states; None if no layer has any.
      bytes_per_state_slot: Bytes of a slot in all layers.
      max_model_len: The configured one, shortened if the cache cannot hold a sequence that long.
      vocab_size: Size of the vocabulary (V).
      features: Features of requests (see `RequestFeature`).
      newest: The step that was dispatched last, while the devices have its hidden states; otherwise None.
      inflight_rows: For each sequence that the newest step samples from, the row of its sampled token.
      on_step_logits: Callback for verification, with each step's output and its tokens' logits, float32 [T, V]. None,
        the default, computes no such logits.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        programs: Programs,
        connector: KVConnector | None = None,
        features: Iterable[RequestFeature] = (),
    ) -> None:
        self.vllm_config, self.programs = vllm_config, programs
        self.executor = executor = programs.executor
        self.connector = connector or KVConnector()
        self.vocab_size: int = vllm_config.model_config.hf_config.get_text_config()["vocab_size"]
        self.on_step_logits: Callable[[SchedulerOutput, np.ndarray], None] | None = None
        last = executor.stages[-1]
        plan, self.num_ranks = executor.plan, last.context.ranks.num_ranks
        self.num_stages, self._is_native = executor.num_stages, last.is_native
        self.features = RequestFeatures(features)
        for feature in self.features:
            feature.attach(programs)
        self.num_blocks, self.max_model_len = plan.num_blocks, plan.max_model_len
        self.kv_bytes_per_block = plan.bytes_per_block
        self.num_state_slots, self.bytes_per_state_slot = plan.num_state_slots, plan.bytes_per_slot
        self._step_shapes = StepShapes(
            vllm_config,
            self.num_blocks,
            self.max_model_len,
            has_states=self.num_state_slots is not None,
            compiles_fast=self._is_native,
        )
        self._weights = b""
        self._ranks: list[Scheduler] = []
        self._step_logits = StepLogits(programs, self.vocab_size)
        self._forget_last_step()
        self._ended_sampling = SequenceSampling(
            SamplingParams(temperature=0.0),
            prompt_token_ids=(),
            output_token_ids=[],
            vocab_size=self.vocab_size,
            seed=0,
        )
        self._compiled_features = CompiledFeatures()

    @property
    def model(self) -> JaxModule:
        """The model, with its current weights; with several pipeline stages, the part of this host's last stage."""
        return self.executor.stages[-1].context.model.model

    @property
    def models(self) -> list[JaxModule]:
        """The model of each pipeline stage that this host has."""
        return [stage.context.model.model for stage in self.executor.stages]

    @property
    def weight_bytes(self) -> int:
        """The bytes of the model's arrays on all devices, except pipeline stages that only other hosts have."""
        return sum(stage.context.model.num_bytes for stage in self.executor.stages)

    def bytes_by_weight(self) -> dict[str, int]:
        """Returns the bytes of each of the model's arrays in memory, by its dotted name."""
        stages = self.executor.stages
        return {name: size for stage in stages for name, size in stage.context.model.bytes_by_name().items()}

    @property
    def last_compile_wait(self) -> CompileWait | None:
        """The last wait of a step for a program; None if no step has waited."""
        return self.programs.last_wait

    def precompile(self, num_tokens: int, *, greedy: bool, parts: StepParts = ()) -> None:
        """Starts compiling, in the background, the programs for a step of this many tokens, one for each sequence.

        `greedy` means that all sequences take the most likely tokens, with nothing else asked for. `parts` are those of
        `StepShape`.
        """
        shape = self.step_shape(num_tokens, parts=parts)
        if greedy and not parts and self._can_be_one_program(num_tokens):
            self.programs.precompile(GreedyStepKey(shape))
            return
        self.programs.precompile(ForwardKey(shape))
        self.programs.precompile(SampleKey(shape.num_rows, SamplerFeatures(), head_of(parts)))

    def padded(self, num_rows: int) -> int:
        """Returns the number of rows that this many rows are padded to."""
        return self._step_shapes.padded(num_rows)

    def can_draft(self, num_tokens: int, *others: ProgramKey, starts: bool = True) -> bool:
        """Returns whether the programs of a step with drafts, and the `others`, are compiled.

        `num_tokens` counts the drafts; each token is followed by a sampled one. `starts` compiles missing programs in
        the background.
        """
        shape = self.step_shape(num_tokens, num_tokens)
        keys = (ForwardKey(shape), SampleKey(shape.num_rows, SamplerFeatures()), *others)
        return self.is_compiled(*keys, starts=starts)

    def is_compiled(self, *keys: ProgramKey, starts: bool = True) -> bool:
        """Returns whether these programs are compiled; `starts` compiles missing ones in the background."""
        programs = self.programs
        if starts:
            for key in keys:
                programs.precompile(key)
        return all(map(programs.has, keys))

    def step_shape(self, num_tokens: int, num_rows: int = 1, parts: StepParts = ()) -> StepShape:
        """Returns the smallest compiled shape for this many tokens, `num_rows` of them followed by a sampled one."""
        return self._step_shapes.of(num_tokens, num_rows, parts)

    def feature(self, name: str) -> Any:
        """Returns the feature that reads the request argument `name`; None if there is none."""
        return self.features.named(name)

    def dispatch(self, output: SchedulerOutput, sampling: SamplingStates) -> DispatchedStep:
        """Sends a step's model and sampler to the devices, and returns without waiting for them."""
        if self._can_be_one_program(output.num_tokens) and self._is_plain(output):
            [entry] = output.scheduled
            state = sampling.get(entry.sequence.seq_id)
            wants_more = _has_prompt_logprobs(entry) or bool(self.features.observing(output))
            if state is not None and state.takes_argmax and entry.samples and not wants_more:
                return self._greedy_step(output)
        return self.forward(output).sample(sampling)

    def _is_plain(self, output: SchedulerOutput) -> bool:
        """Returns whether only tokens go into the step, and only the next ones come out."""
        return self.on_step_logits is None and not self.features.parts(output.scheduled)

    def _can_be_one_program(self, num_tokens: int) -> bool:
        # The model and the sampler can be one program only if one stage has both.
        return self._is_native and num_tokens == 1 and self.num_stages == 1

    def _greedy_step(self, output: SchedulerOutput) -> DispatchedStep:
        self._check_is_sampled()
        shape = self.step_shape(1)
        self.connector.step_dispatching(output)
        packed = self._pack(output, shape)
        sampled = self.programs.run(GreedyStepKey(shape), packed)
        self.connector.step_dispatched(output)
        self.newest = NewestStep(output, shape, packed)
        self.inflight_rows = {output.scheduled[0].sequence.seq_id: 0}
        return DispatchedStep(output, sampled, ())

    def forward(self, output: SchedulerOutput) -> ForwardedStep:
        """Sends a step's model to the devices.

        Raises:
          RuntimeError: The previous step samples tokens that this one may need, and its sampler was not dispatched.
        """
        self._check_is_sampled()
        parts = self.features.parts(output.scheduled)
        shape = self.step_shape(output.num_tokens, output.num_rows, parts)
        observing = self.features.observing(output)
        observers = tuple(feature.observer for feature in observing)
        self.programs.precompile(ForwardKey(shape, observers))  # before those of the next step
        if output.num_decodes < len(output.scheduled) and not output.has_drafts:
            # The next step decodes the same number of sequences; with several stages, their share.
            is_greedy = all(entry.sequence.sampling_params.greedy for entry in output.scheduled)
            num_sequences = max(len(rank.scheduled) for rank in output.ranks)
            in_decodes = tuple(each for part in parts if (each := part.in_decodes) is not None)
            self.precompile(-(-num_sequences // self.num_stages), greedy=is_greedy, parts=in_decodes)
        packed, observed = self._forward(output, shape, observers)
        self.newest = NewestStep(output, shape, packed)
        if any(entry.samples for entry in output.scheduled):
            self._unsampled = output
        if self.on_step_logits is not None:
            rows = token_rows(output, shape.num_tokens)
            head, entries = head_of(parts), [(entry, entry.num_tokens) for entry in output.scheduled]
            of_head = None if head is None else head.rows(entries, len(rows))
            self.on_step_logits(output, self._step_logits.of_rows(shape.num_tokens, rows, head, of_head))
        prompt_logprobs = []
        if any(map(_has_prompt_logprobs, output.scheduled)):
            prompt_logprobs = [
                (i, self._prompt_logprobs(shape.num_tokens, entry, first_row))
                for i, (entry, first_row) in enumerate(first_rows(output, shape.num_tokens))
                if _has_prompt_logprobs(entry)
            ]
        observations = []
        for feature, values in zip(observing, observed, strict=True):
            rows = [each for each in first_rows(output, shape.num_tokens) if feature.observes(each[0])]
            observations.append(Observation(feature, values, rows))
        sampler = functools.partial(self._sample, output, shape.num_rows, head_of(parts))
        return ForwardedStep(output, prompt_logprobs, sampler, observations)

    def paged_logits(self, output: SchedulerOutput) -> np.ndarray:
        """Runs a step without sampling; returns its tokens' logits, float32 [T, V]."""
        shape = self.step_shape(output.num_tokens)
        self._forward(output, shape)
        return self._step_logits.of_rows(shape.num_tokens, token_rows(output, shape.num_tokens))

    def whole_logits(self, token_ids: Sequence[int], rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Returns logits, float32 [T, V], of one whole sequence without a cache; of these rows only, if given."""
        num_padded = self._whole(token_ids)
        return self._step_logits.of_rows(num_padded, np.arange(len(token_ids)) if rows is None else np.asarray(rows))

    def iterate_whole_logits(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Yields `whole_logits` in parts of up to LOGITS_CHUNK_ROWS rows; until the last, nothing else may run."""
        num_padded = self._whole(token_ids)
        yield from self._step_logits.in_chunks(num_padded, np.arange(len(token_ids)))

    def _whole(self, token_ids: Sequence[int]) -> int:
        """Dispatches the model over one whole sequence, without a cache; returns its number of padded tokens."""
        self._check_is_sampled()
        num_tokens = len(token_ids)
        padded = self._step_shapes.padded(num_tokens)
        input_ids = np.zeros(padded, np.int32)
        input_ids[:num_tokens] = token_ids
        self._step_logits.num_replaced += 1
        self.newest = None
        self.programs.run(WholeKey(padded), input_ids, num_tokens)
        return padded

    def make_scheduler(self) -> Scheduler | DataRanksScheduler:
        """Returns a scheduler of the runner's blocks, all of which are free, for all data ranks.

        It replaces the one that was made before, whose counts of the prefix cache go on.
        """
        cache, limits = self.vllm_config.cache_config, self.vllm_config.scheduler_config
        shares = FairShares()
        ranks = [
            Scheduler(
                BlockManager(
                    self.num_blocks,
                    cache.block_size,
                    cache.enable_prefix_caching,
                    self.num_state_slots,
                    connector,
                    self._weights,
                ),
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                num_stages=self.num_stages,
                shares=shares,
                places=self.features.places,
                is_ready=self.features.is_ready,
            )
            for connector in self.connector.block_connectors(self.num_ranks)
        ]
        for rank, before in zip(ranks, self._ranks, strict=False):
            rank.block_manager.prefix_cache_queries = before.block_manager.prefix_cache_queries
            rank.block_manager.prefix_cache_hits = before.block_manager.prefix_cache_hits
        self._ranks = ranks
        return ranks[0] if len(ranks) == 1 else DataRanksScheduler(ranks, shares)

    def set_models(self, models: Sequence[JaxModule], weights: bytes) -> None:
        """Gives the programs other weights; no step may be in flight.

        Args:
          models: The model of each of this host's pipeline stages.
          weights: Name of the weights, as in `BlockManager`.

        Raises:
          ConfigError: The weights have other shapes or types; nothing has changed.
        """
        for stage, model in zip(self.executor.stages, models, strict=True):
            stage.set_model(model)
        for feature in self.features:
            feature.weights_changed(self.executor.stages)
        self._weights = weights
        self._forget_last_step()

    def recover(self) -> None:
        """Makes the runner usable after a step that failed or was interrupted midway."""
        self._forget_last_step()
        self.executor.recover()

    def close(self) -> None:
        self.programs.close()

    def _check_is_sampled(self) -> None:
        if self._unsampled is not None:
            raise RuntimeError("the step before must be sampled first")

    def _forget_last_step(self) -> None:
        self._unsampled: SchedulerOutput | None = None
        self.newest: NewestStep | None = None
        self.inflight_rows: dict[SequenceId, int] = {}
        # While the engine dispatches a step, no more are in flight than there are stages.
        self._sampling_packer = SamplingPacker(self.vocab_size, self.num_stages)
        self._step_logits.num_replaced += 1

    def _forward(
        self, output: SchedulerOutput, shape: StepShape, observers: tuple[str, ...] = ()
    ) -> tuple[np.ndarray, list[Any]]:
        """Dispatches the model; returns the packed step and the observers' values."""
        self.connector.step_dispatching(output)
        packed = self._pack(output, shape)
        self._step_logits.num_replaced += 1
        self.newest = None
        observed = self.programs.run(ForwardKey(shape, observers), packed)
        self.connector.step_dispatched(output)
        return packed, observed or []  # the stages of other hosts return nothing

    def _prompt_logprobs(self, num_padded: int, entry: ScheduledSequence, row: int) -> TokenLogprobs[np.ndarray]:
        return self._step_logits.prompt_logprobs(num_padded, entry, row, head_of(self.features.parts([entry])))

    def _pack(self, output: SchedulerOutput, shape: StepShape) -> np.ndarray:
        return _joined([pack_step(rank, shape, self.inflight_rows) for rank in output.ranks])

    def _sample(
        self, output: SchedulerOutput, num_rows: int, head: HeadPart | None, sampling: SamplingStates
    ) -> SamplerOutput:
        """Dispatches the sampler over the hidden states that are sampled from, S rows a data rank."""
        batches = [
            [sampling.get(entry.sequence.seq_id, self._ended_sampling) for entry in rank.scheduled]
            for rank in output.ranks
        ]
        features, parameters = SamplerFeatures(), None
        if not all(sequence.takes_argmax for sequences in batches for sequence in sequences):
            of_ranks = []
            for rank, sequences in zip(output.ranks, batches, strict=True):
                # The scheduler counts the token that this step samples as in flight already.
                num_inflight = [max(entry.sequence.num_inflight_tokens - 1, 0) for entry in rank.scheduled]
                drafts = [entry.draft_token_ids for entry in rank.scheduled]
                of_ranks.append(build_sampling_batch(sequences, num_rows, self.vocab_size, num_inflight, drafts))
            features = functools.reduce(SamplerFeatures.join, (batch.features for batch in of_ranks))
            if features != SamplerFeatures():
                features = self._compiled_features.choose(num_rows, features)
                parameters = self._sampling_packer.pack(of_ranks, num_rows, features)
        sampled = self._run_sampler(output, num_rows, head, features, parameters)
        # The newest token depends on the number of right drafts: no step is dispatched ahead of a step with drafts.
        self.inflight_rows = {}
        if not output.has_drafts:
            self.inflight_rows = {
                entry.sequence.seq_id: i
                for rank in output.ranks
                for i, entry in enumerate(rank.scheduled)
                if entry.samples
            }
        self._unsampled = None
        return sampled

    def _run_sampler(
        self,
        output: SchedulerOutput,
        num_rows: int,
        head: HeadPart | None,
        features: SamplerFeatures,
        parameters: np.ndarray | None,
    ) -> SamplerOutput:
        of_head = []
        if head is not None:
            entries = [[(entry, entry.num_rows) for entry in rank.scheduled] for rank in output.ranks]
            of_head = [_joined([head.rows(of_rank, num_rows) for of_rank in entries])]
        return self.programs.run(SampleKey(num_rows, features, head), parameters, *of_head)


def _has_prompt_logprobs(entry: ScheduledSequence) -> bool:
    """Returns whether the step's logits are also needed for log-probabilities of the prompt."""
    sequence = entry.sequence
    return sequence.sampling_params.prompt_logprobs is not None and entry.start + 1 < sequence.num_prompt_tokens


def _joined(vectors: Sequence[np.ndarray]) -> np.ndarray:
    return vectors[0] if len(vectors) == 1 else np.concatenate(vectors)

"""The host half of a step: packs a scheduled batch, chooses the programs, has them called, returns the tokens.

A step is two programs, the model over T tokens and the sampler over S rows (one a sequence and one a draft), so that
the few sampler adapters do not multiply with the many token counts. Only the greedy decode of a single sequence, whose
fixed costs show most, is one program. Dispatch returns at once; the sampled tokens stay on the device for the next
step, and are copied to the host when asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxis.engine.execution.adapters import HEAD
from jaxis.engine.execution.compiled_features import CompiledFeatures
from jaxis.engine.execution.dispatched_step import DispatchedStep, ForwardedStep, SamplingStates, StepExperts
from jaxis.engine.execution.input_encoder import InputEncoder
from jaxis.engine.execution.program_key import ProgramKey
from jaxis.engine.execution.programs import CompileWait, Programs
from jaxis.engine.execution.sampler import SamplerOutput
from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingPacker, build_sampling_batch
from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.execution.step_inputs import NO_INPUTS, InputFields, StepShape, StepShapes, pack_step
from jaxis.engine.execution.step_logits import StepLogits, first_rows, parts_of_head, places_of_rows, token_rows
from jaxis.engine.execution.step_programs import (
    ForwardKey,
    GreedyStepKey,
    SampleKey,
    WholeKey,
)
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.scheduling.block_manager import BlockManager
from jaxis.engine.scheduling.data_ranks import DataRanksScheduler
from jaxis.engine.scheduling.fair_shares import FairShares
from jaxis.engine.scheduling.scheduler import Scheduler
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.engine.scheduling.sequence import SequenceId
from jaxis.prompts import EmbeddedInput
from jaxis.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.layers.module import JaxModule


class NewestStep(NamedTuple):
    """The step that was dispatched last.

    Attributes:
      output: What was scheduled.
      shape: What it was padded to.
      packed: What the model was called with.
    """

    output: SchedulerOutput
    shape: StepShape
    packed: np.ndarray


class Runner:
    """Turns scheduled batches into calls of programs.

    Attributes:
      programs: Those that are compiled.
      executor: Runs them.
      connector: What becomes of blocks beyond the devices.
      num_ranks: Data ranks.
      num_stages: Pipeline stages.
      num_blocks: Blocks of a rank's KV cache for the layers of each span, the span that keeps most first.
      kv_bytes_per_block: Bytes of one such block in all its layers, by span.
      num_state_slots: Slots of a rank's recurrent states; None if no layer has any.
      bytes_per_state_slot: Bytes of a slot in all layers.
      max_model_len: The configured one, shortened if the cache cannot hold a sequence that long.
      vocab_size: V.
      adapters: Of the model; None: there are none.
      inputs: Encodes what prompts have besides tokens; None: they have tokens only.
      newest: The step that was dispatched last, while the devices have its hidden states; None if they do not.
      inflight_rows: For each sequence that the newest step samples from, which of the sampled tokens is its own.
      on_step_logits: For verification: called with each step's output and its tokens' logits, float32 [T, V]. None, the
        default, computes no such logits.

    Args:
      vllm_config: The engine's configuration.
      programs: Of its model.
      connector: See above.
      inputs: See above.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        programs: Programs,
        connector: KVConnector | None = None,
        inputs: InputEncoder | None = None,
    ) -> None:
        self.vllm_config, self.programs = vllm_config, programs
        self.executor = executor = programs.executor
        self.connector = connector or KVConnector()
        self.vocab_size: int = vllm_config.model_config.hf_config.get_text_config()["vocab_size"]
        self.on_step_logits: Callable[[SchedulerOutput, np.ndarray], None] | None = None
        last = executor.stages[-1]
        plan, self.num_ranks = executor.plan, last.context.ranks.num_ranks
        self.num_stages, self._is_native = executor.num_stages, last.is_native
        self.adapters, self.inputs = last.context.adapters, inputs
        self._embedding_size = 0 if inputs is None else inputs.embedding_size
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
        self._step_logits = StepLogits(programs, self.vocab_size, self.adapters)
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
        """The model, with the weights that the runner has; of several pipeline stages, the part of this host's last."""
        return self.executor.stages[-1].context.model.model

    @property
    def models(self) -> list[JaxModule]:
        """The model of each pipeline stage that this host has."""
        return [stage.context.model.model for stage in self.executor.stages]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's arrays on all devices together, but those of pipeline stages of other hosts alone."""
        return sum(stage.context.model.num_bytes for stage in self.executor.stages)

    def bytes_by_weight(self) -> dict[str, int]:
        """Bytes of each of the model's arrays, as it is in memory, by its dotted name."""
        stages = self.executor.stages
        return {name: size for stage in stages for name, size in stage.context.model.bytes_by_name().items()}

    @property
    def last_compile_wait(self) -> CompileWait | None:
        """When a step last waited for a program, if one did."""
        return self.programs.last_wait

    def precompile(self, num_tokens: int, *, greedy: bool, adapter_parts: frozenset[str] | None = None) -> None:
        """Starts compiling, in the background, the programs for a step of this many tokens.

        Args:
          num_tokens: One for each sequence.
          greedy: Whether all sequences take the most likely tokens, with nothing else asked for.
          adapter_parts: See `StepShape`.
        """
        shape = self.step_shape(num_tokens, adapter_parts=adapter_parts)
        if greedy and adapter_parts is None and self._can_be_one_program(num_tokens):
            self.programs.precompile(GreedyStepKey(shape))
            return
        self.programs.precompile(ForwardKey(shape))
        self.programs.precompile(SampleKey(shape.num_rows, SamplerFeatures(), parts_of_head(adapter_parts)))

    def padded(self, num_rows: int) -> int:
        """What this many rows are padded to, for which there are programs."""
        return self._step_shapes.padded(num_rows)

    def can_draft(self, num_tokens: int, *others: ProgramKey, starts: bool = True) -> bool:
        """Whether a step of this many tokens, each followed by a sampled one, is compiled; if not, may start that.

        Args:
          num_tokens: Drafts included.
          others: Programs that make the drafts.
          starts: Whether to compile what is not.
        """
        shape = self.step_shape(num_tokens, num_tokens)
        keys = (ForwardKey(shape), SampleKey(shape.num_rows, SamplerFeatures()), *others)
        return self.is_compiled(*keys, starts=starts)

    def is_compiled(self, *keys: ProgramKey, starts: bool = True) -> bool:
        """Whether these programs are compiled; if not, may start that."""
        programs = self.programs
        if starts:
            for key in keys:
                programs.precompile(key)
        return all(map(programs.has, keys))

    def step_shape(
        self,
        num_tokens: int,
        num_rows: int = 1,
        adapter_parts: frozenset[str] | None = None,
        inputs: InputFields = NO_INPUTS,
    ) -> StepShape:
        """The smallest compiled shape that holds this many tokens, `num_rows` of them followed by a sampled one."""
        of_layers = None if adapter_parts is None else adapter_parts - {HEAD}
        return self._step_shapes.of(num_tokens, num_rows, of_layers, inputs)

    def dispatch(self, output: SchedulerOutput, sampling: SamplingStates) -> DispatchedStep:
        """Sends a step's model and sampler to the devices, and returns without waiting for them."""
        if self._can_be_one_program(output.num_tokens) and self._is_plain(output):
            [entry] = output.scheduled
            state = sampling.get(entry.sequence.seq_id)
            wants_more = _has_prompt_logprobs(entry) or _wants_experts(entry)
            if state is not None and state.takes_argmax and entry.samples and not wants_more:
                return self._greedy_step(output)
        return self.forward(output).sample(sampling)

    def _is_plain(self, output: SchedulerOutput) -> bool:
        """Whether nothing but tokens goes into the step, and nothing but the next ones comes out."""
        has_inputs = InputFields.of(output, self._embedding_size) != NO_INPUTS
        return self.on_step_logits is None and self._adapter_parts(output) is None and not has_inputs

    def _can_be_one_program(self, num_tokens: int) -> bool:
        # The whole model is one program where it is on the same devices.
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
        parts = self._adapter_parts(output)
        inputs = InputFields.of(output, self._embedding_size)
        shape = self.step_shape(output.num_tokens, output.num_rows, parts, inputs)
        if output.num_decodes < len(output.scheduled) and not output.has_drafts:
            # The next step decodes the same number of sequences; with several stages, their share.
            is_greedy = all(entry.sequence.sampling_params.greedy for entry in output.scheduled)
            num_sequences = max(len(rank.scheduled) for rank in output.ranks)
            self.precompile(-(-num_sequences // self.num_stages), greedy=is_greedy, adapter_parts=parts)
        wants_experts = any(map(_wants_experts, output.scheduled))
        packed, expert_ids = self._forward(output, shape, returns_experts=wants_experts)
        self.newest = NewestStep(output, shape, packed)
        if any(entry.samples for entry in output.scheduled):
            self._unsampled = output
        if self.on_step_logits is not None:
            rows = token_rows(output, shape.num_tokens)
            places = places_of_rows(self.adapters, [(entry, entry.num_tokens) for entry in output.scheduled], len(rows))
            self.on_step_logits(output, self._step_logits.of_rows(shape.num_tokens, rows, parts_of_head(parts), places))
        prompt_logprobs = []
        if any(map(_has_prompt_logprobs, output.scheduled)):
            prompt_logprobs = [
                (i, self._step_logits.prompt_logprobs(shape.num_tokens, entry, first_row))
                for i, (entry, first_row) in enumerate(first_rows(output, shape.num_tokens))
                if _has_prompt_logprobs(entry)
            ]
        experts = None
        if wants_experts:
            rows = [each for each in first_rows(output, shape.num_tokens) if _wants_experts(each[0])]
            experts = StepExperts(expert_ids, rows)
        sampler = functools.partial(self._sample, output, shape.num_rows)
        return ForwardedStep(output, prompt_logprobs, sampler, experts)

    def paged_logits(self, output: SchedulerOutput) -> np.ndarray:
        """Runs a step without sampling; returns its tokens' logits, float32 [T, V]."""
        shape = self.step_shape(output.num_tokens)
        self._forward(output, shape)
        return self._step_logits.of_rows(shape.num_tokens, token_rows(output, shape.num_tokens))

    def whole_logits(self, token_ids: Sequence[int], rows: Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Logits, float32 [T, V], of one whole sequence without a cache; of these rows only, where given."""
        num_padded = self._whole(token_ids)
        return self._step_logits.of_rows(num_padded, np.arange(len(token_ids)) if rows is None else np.asarray(rows))

    def iterate_whole_logits(self, token_ids: Sequence[int]) -> Iterator[np.ndarray]:
        """As `whole_logits`, in parts of up to LOGITS_CHUNK_ROWS rows; until the last, nothing else may run."""
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
        """A scheduler of its blocks, all of which are free, for all data ranks.

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
                places=self.adapters,
                is_ready=self.input_is_ready,
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
          models: Of each of this host's pipeline stages.
          weights: See `BlockManager`.

        Raises:
          ConfigError: They are of other shapes or types; nothing has changed.
        """
        for stage, model in zip(self.executor.stages, models, strict=True):
            stage.set_model(model)
        self._weights = weights
        self._forget_last_step()

    def recover(self) -> None:
        """Makes the runner usable after a step that failed or was interrupted midway."""
        self._forget_last_step()
        self.executor.recover()

    def close(self) -> None:
        """Frees the caches, weights and programs."""
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
        self, output: SchedulerOutput, shape: StepShape, *, returns_experts: bool = False
    ) -> tuple[np.ndarray, Any]:
        """Dispatches the model; returns what it was called with, and what it returns."""
        self.connector.step_dispatching(output)
        packed = self._pack(output, shape)
        self._step_logits.num_replaced += 1
        self.newest = None
        returned = self.programs.run(ForwardKey(shape, returns_experts), packed)
        self.connector.step_dispatched(output)
        return packed, returned

    def _adapter_parts(self, output: SchedulerOutput) -> frozenset[str] | None:
        """See `StepShape`."""
        adapters = {entry.sequence.adapter for entry in output.scheduled if entry.sequence.adapter}
        if not adapters or self.adapters is None:
            return None
        return frozenset().union(*map(self.adapters.parts_of, adapters))

    def _pack(self, output: SchedulerOutput, shape: StepShape) -> np.ndarray:
        """The step of all data ranks, one after the other."""
        place_of = None if self.adapters is None else self.adapters.place_of
        return _joined(
            [pack_step(rank, shape, self.inflight_rows, place_of, self._embeddings) for rank in output.ranks]
        )

    def input_is_ready(self, item: EmbeddedInput) -> bool:
        """See `InputEncoder.is_ready`."""
        return self.inputs is None or self.inputs.is_ready(item)

    def encode(self, awaited: Sequence[EmbeddedInput]) -> None:
        """See `InputEncoder.go_on`."""
        if self.inputs is not None and awaited:
            self.inputs.go_on(awaited, self.programs)

    def wait_for_inputs(self) -> None:
        """See `InputEncoder.wait`."""
        if self.inputs is not None:
            self.inputs.wait()

    def _embeddings(self, item: EmbeddedInput) -> np.ndarray:
        assert self.inputs is not None  # no request without an encoder has inputs
        return self.inputs.rows(item, self.programs)

    def _sample(self, output: SchedulerOutput, num_rows: int, sampling: SamplingStates) -> SamplerOutput:
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
        sampled = self._run_sampler(output, num_rows, features, parameters)
        # How many of its drafts are right decides what follows a sequence: no step is dispatched ahead of that.
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
        self, output: SchedulerOutput, num_rows: int, features: SamplerFeatures, parameters: np.ndarray | None
    ) -> SamplerOutput:
        parts = parts_of_head(self._adapter_parts(output))
        places = []
        if parts is not None:
            places = [
                places_of_rows(self.adapters, [(entry, entry.num_rows) for entry in rank.scheduled], num_rows)
                for rank in output.ranks
            ]
            places = [_joined(places)]
        return self.programs.run(SampleKey(num_rows, features, parts), parameters, *places)


def _has_prompt_logprobs(entry: ScheduledSequence) -> bool:
    """Whether a step's logits are also wanted for the log-probabilities of the prompt."""
    sequence = entry.sequence
    return sequence.sampling_params.prompt_logprobs is not None and entry.start + 1 < sequence.num_prompt_tokens


def _wants_experts(entry: ScheduledSequence) -> bool:
    """Whether the experts of the entry's tokens are wanted."""
    return bool(entry.sequence.sampling_params.return_routed_experts)


def _joined(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Vectors one after the other; of one rank, its own."""
    return vectors[0] if len(vectors) == 1 else np.concatenate(vectors)

"""The programs that make up a step: their computations, the shapes they are compiled for, and their calls.

Each program takes the flat list of the model's arrays and rebuilds the model inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.device_state import DeviceState
from jaxis.engine.execution.layer_observer import LayerObserver
from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.engine.execution.program_context import ProgramContext, jit, shardings_of
from jaxis.engine.execution.program_key import Compiled, RunsOn
from jaxis.engine.execution.sampler import SamplerOutput, sample, score, token_logprobs
from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays
from jaxis.engine.execution.step_inputs import unpack_step
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.models.common.interfaces import JaxIntermediateTensors
from jaxis.rooms import room_module
from jaxis.sampling_params import MAX_LOGPROBS

# Rows whose logits are in memory at once when the logits of many rows are wanted.
LOGITS_CHUNK_ROWS = 64


@dataclass(frozen=True)
class ForwardKey:
    """The model over a step; its hidden states stay on the devices.

    (arrays, KV caches, last tokens i32 [max R], packed step) -> (KV caches, hidden states [T, E], those to sample from
    [S, E], auxiliary hidden states, observed values). The caches are donated; draft layers' caches are not among them.
    The arrays apart, the values of several data ranks lie one after the other.

    Pipeline stages after the first take hidden states in the place of the last tokens. Those before the last return the
    hidden states that they hand on, without rows to sample from.

    Attributes:
      shape: Shape that the step is padded to.
      observers: Rooms whose observers' results `run` returns; there is one stage then. The module `observer` of such a
        room has a context manager `observed()` for the model's call, which yields a function for the values [T, ...].
    """

    shape: StepShape
    observers: tuple[str, ...] = ()

    runs_on = RunsOn.EVERY_STAGE

    @property
    def result_tree(self) -> Any:
        return [0] * len(self.observers)

    @property
    def num_tokens(self) -> int:
        return self.shape.num_tokens

    @property
    def description(self) -> str:
        return f"a step of {self.num_tokens} tokens"

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        stage, ranks = context.stage, context.ranks

        def forward(
            arrays: list[jax.Array], caches: list[Any], given: jax.Array, packed: jax.Array
        ) -> tuple[list[Any], jax.Array, jax.Array | None, list[jax.Array], list[jax.Array]]:
            # Only the first stage takes tokens.
            last_tokens = given if stage.is_first else jnp.zeros(context.max_num_seqs, jnp.int32)
            step = unpack_step(packed, self.shape, last_tokens)
            model = context.merge(arrays, self.shape, step)
            arguments: dict[str, Any] = {**_handed_on(context, given)}
            for part in self.shape.parts if stage.is_first else ():
                arguments |= part.arguments(model, step.input_ids, step.fields)
            observed: list[LayerObserver] = [room_module(room, "observer", room).Observer() for room in self.observers]
            if observed:
                [arguments["run_layer"]] = observed
            caches, hidden, aux = model(caches, step.input_ids, step.attention_metadata, **arguments)
            rows = hidden[step.logits_rows] if stage.is_last else None
            return caches, hidden, rows, aux if context.num_draft_caches else [], [each.values() for each in observed]

        operands = (
            context.arrays_of(self.shape),
            context.model_caches,
            ranks.struct((context.max_num_seqs,), jnp.int32)
            if stage.is_first
            else context.hidden_struct(self.num_tokens),
            ranks.struct((self.shape.packed_size,), jnp.int32),
        )
        results = (shardings_of(context.model_caches), *[ranks.sharding] * 4)
        # The host reads the observed values of all ranks.
        shardings = (*results[:-1], context.replicated)
        run = ranks.over_ranks(forward, operands, results)
        return jit(run, donate_argnums=1, out_shardings=shardings).lower(*operands)

    def run(self, program: Compiled, state: DeviceState, packed: np.ndarray) -> list[jax.Array]:
        """Runs the model; returns each observer's values, [T of all ranks, ...].

        `packed` has the vectors of `pack_step` of all data ranks, one after the other.
        """
        state.forget_hidden()
        ranks = state.context.ranks
        caches, state.hidden, state.rows, state.aux, observed = program(
            state.context.arrays_of(self.shape), state.model_caches, state.given, ranks.place(packed)
        )
        state.caches = [*caches, *state.draft_caches]
        return observed


@dataclass(frozen=True)
class SampleKey:
    """Logits and sampling of S rows of the last hidden states: one for each sequence and one more for each draft.

    (head arrays, hidden states [S, E], packed sampling arrays or None[, operand of `head`]) -> (SamplerOutput,
    last tokens i32 [max R]). The arrays apart, the values of several data ranks lie one after the other.

    Attributes:
      num_rows: Number of rows (S).
      features: Features of the sampler.
      head: Change of the head; the program then takes its operand, i32 [S]. None for none.
    """

    num_rows: int
    features: SamplerFeatures
    head: Any = None

    runs_on = RunsOn.LAST_STAGE
    description = "the sampler"
    num_tokens = 0

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        ranks, num_rows, features = context.ranks, self.num_rows, self.features
        parameters = None
        if features != SamplerFeatures():
            parameters = ranks.struct((SamplingArrays.packed_size(num_rows, features),), jnp.int32)

        def run(
            head_arrays: list[jax.Array], rows: jax.Array, parameters: jax.Array | None, *of_head: jax.Array
        ) -> tuple[SamplerOutput, jax.Array]:
            model = context.merge_head(head_arrays, self.head, of_head)
            if parameters is None:
                return _sample_greedily(context, model, rows)
            arrays = SamplingArrays.unpack(parameters, num_rows, features)
            sampled = sample(context.replicate(model.compute_logits(rows)), arrays, features=features)
            return sampled, _last_tokens(context, sampled)

        of_head = [] if self.head is None else [ranks.struct((num_rows,), jnp.int32)]
        head_arrays = context.head_arrays_of(self.head)
        operands = (head_arrays, context.hidden_struct(num_rows), parameters, *of_head)
        # The host reads the tokens of all ranks, though it may have only one of the devices.
        shardings = (context.replicated, ranks.sharding)
        return jit(ranks.over_ranks(run, operands, ranks.sharding), out_shardings=shardings).lower(*operands)

    def run(
        self, program: Compiled, state: DeviceState, parameters: np.ndarray | None, *of_head: np.ndarray
    ) -> SamplerOutput:
        """Returns the tokens that the sequences sampled, rank by rank.

        `parameters` come from `SamplingPacker`; None if every sequence takes its most likely token. `of_head` is the
        operand of `head`, if any.
        """
        context = state.context
        placed = None if parameters is None else context.ranks.place(parameters)
        of_rows = map(context.ranks.place, of_head)
        head_arrays = context.head_arrays_of(self.head)
        sampled, state.last_tokens = program(head_arrays, state.rows, placed, *of_rows)
        state.rows = None
        if not context.num_draft_caches:
            state.hidden = None
        _start_copy_to_host(context, sampled)
        return sampled

    @property
    def result_tree(self) -> SamplerOutput:
        logprobs = None if self.features.num_logprobs is None else _logprobs_tree(self.features)
        return cast(Any, SamplerOutput)(0, logprobs)


@dataclass(frozen=True)
class GreedyStepKey:
    """The model and the arg-max over the decode of one sequence: a ForwardKey and a greedy SampleKey in one program.

    (arrays, KV caches, last tokens i32 [max R], packed step) -> (KV caches, SamplerOutput, last tokens, hidden states
    [1, E] and auxiliary ones). The caches are donated. The hidden states are returned only if there are draft layers,
    which read them.
    """

    shape: StepShape

    runs_on = RunsOn.LAST_STAGE
    result_tree = SampleKey(1, SamplerFeatures()).result_tree

    @property
    def num_tokens(self) -> int:
        return self.shape.num_tokens

    @property
    def description(self) -> str:
        return ForwardKey(self.shape).description

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        def greedy_step(
            arrays: list[jax.Array], caches: list[Any], last_tokens: jax.Array, packed: jax.Array
        ) -> tuple[list[Any], SamplerOutput, jax.Array, list[jax.Array]]:
            step = unpack_step(packed, self.shape, last_tokens)
            model = context.model.merge(arrays)
            caches, hidden, aux = model(caches, step.input_ids, step.attention_metadata)
            # Rounded as if another program read them: a sequence's tokens must not depend on the program that samples.
            rows = materialize(hidden[step.logits_rows])
            return caches, *_sample_greedily(context, model, rows), [rows, *aux] if context.num_draft_caches else []

        replicated = context.replicated
        shardings = (shardings_of(context.model_caches), replicated, replicated, replicated)
        last_tokens, packed = context.int32(context.max_num_seqs), context.int32(self.shape.packed_size)
        jitted = jit(greedy_step, donate_argnums=1, out_shardings=shardings)
        return jitted.lower(context.model.arrays, context.model_caches, last_tokens, packed)

    def run(self, program: Compiled, state: DeviceState, packed: np.ndarray) -> SamplerOutput:
        state.forget_hidden()
        caches, sampled, state.last_tokens, states = program(
            state.context.model.arrays, state.model_caches, state.last_tokens, packed
        )
        state.caches = [*caches, *state.draft_caches]
        if states:
            state.rows, *state.aux = states
            state.hidden = state.rows
        return sampled


@dataclass(frozen=True)
class WholeKey:
    """The model over one whole sequence, without a cache; its hidden states stay on the devices.

    (arrays, token ids i32 [T], number of tokens) -> hidden states [T, E]. All data ranks compute the same. Pipeline
    stages after the first take hidden states [T, E] in the place of token ids.
    """

    num_tokens: int

    runs_on = RunsOn.EVERY_STAGE
    description = "a whole sequence"
    result_tree = None

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        def whole(arrays: list[jax.Array], given: jax.Array, num_tokens: jax.Array) -> jax.Array:
            input_ids = given if context.stage.is_first else jnp.zeros(self.num_tokens, jnp.int32)
            metadata = AttentionMetadata(
                input_positions=jnp.arange(self.num_tokens, dtype=jnp.int32),
                block_tables=None,
                seq_lens=num_tokens[None],
                query_start_loc=jnp.stack([jnp.zeros_like(num_tokens), num_tokens]),
                request_distribution=jnp.asarray([0, 1, 1], jnp.int32),
            )
            _, hidden, _ = context.model.merge(arrays)(None, input_ids, metadata, **_handed_on(context, given))
            return hidden

        given = context.int32(self.num_tokens) if context.stage.is_first else context.hidden_struct(self.num_tokens)
        operands = (context.model.arrays, given, context.int32())
        ranks = context.ranks
        run = ranks.over_ranks(whole, operands, ranks.sharding)
        return jit(run, out_shardings=ranks.sharding).lower(*operands)

    def run(self, program: Compiled, state: DeviceState, input_ids: np.ndarray, num_tokens: int) -> None:
        """Runs the model over `input_ids`, int32 [T], of which all after the first `num_tokens` are padding."""
        state.forget_hidden()
        given = input_ids if state.handed_on is None else state.handed_on
        state.hidden = program(state.context.model.arrays, given, np.int32(num_tokens))


@dataclass(frozen=True)
class LogitsKey:
    """Logits of a chunk of rows of the newest hidden states, or their log-probabilities of given tokens.

    (head arrays, hidden states [T, E], rows, [targets, [packed sampling arrays]][, operand of `head`]) -> float32
    [LOGITS_CHUNK_ROWS, V], or TokenLogprobs. Rows count through the hidden states of all data ranks. With `features`,
    log-probabilities are those that the sampler returns for rows with these parameters. `head` is that of
    `SampleKey`.
    """

    num_tokens: int
    targets: bool
    features: SamplerFeatures | None = None
    head: Any = None

    runs_on = RunsOn.LAST_STAGE
    description = "logits of many rows"

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        ranks = context.ranks

        def logits(head_arrays: list[jax.Array], hidden: jax.Array, rows: jax.Array, *of_head: jax.Array) -> jax.Array:
            model = context.merge_head(head_arrays, self.head, of_head)
            return context.replicate(model.compute_logits(ranks.take(hidden, rows)))

        def logprobs(
            head_arrays: list[jax.Array], hidden: jax.Array, rows: jax.Array, targets: jax.Array, *of_head: jax.Array
        ) -> TokenLogprobs[jax.Array]:
            return token_logprobs(logits(head_arrays, hidden, rows, *of_head), targets, num_logprobs=MAX_LOGPROBS)

        features = self.features

        def scores(
            head_arrays: list[jax.Array],
            hidden: jax.Array,
            rows: jax.Array,
            targets: jax.Array,
            parameters: jax.Array,
            *of_head: jax.Array,
        ) -> TokenLogprobs[jax.Array]:
            assert features is not None
            arrays = SamplingArrays.unpack(parameters, LOGITS_CHUNK_ROWS, features)
            return score(logits(head_arrays, hidden, rows, *of_head), targets, arrays, features=features)

        rows = context.int32(LOGITS_CHUNK_ROWS)
        operands = (
            context.head_arrays_of(self.head),
            context.hidden_struct(self.num_tokens),
            rows,
            *([rows] if self.targets else []),
            *([] if features is None else [context.int32(SamplingArrays.packed_size(LOGITS_CHUNK_ROWS, features))]),
            *([] if self.head is None else [rows]),
        )
        function = logits if not self.targets else logprobs if features is None else scores
        run = ranks.over_ranks(function, operands, context.replicated)
        return jit(run, out_shardings=context.replicated).lower(*operands)

    def run(
        self, program: Compiled, state: DeviceState, rows: np.ndarray, *more: np.ndarray
    ) -> jax.Array | TokenLogprobs[jax.Array]:
        """Returns the logits of `rows`, int32 [LOGITS_CHUNK_ROWS], or their log-probabilities of given tokens.

        `more` begins with these tokens, int32 [LOGITS_CHUNK_ROWS], if log-probabilities are wanted; with `features`,
        the rows' parameters by `SamplingPacker` follow; the operand of `head`, if any, comes last.
        """
        return program(state.context.head_arrays_of(self.head), state.hidden, rows, *more)

    @property
    def result_tree(self) -> Any:
        return _logprobs_tree(self.features) if self.targets else 0


def _logprobs_tree(features: SamplerFeatures | None) -> TokenLogprobs[int]:
    has_mass = features is not None and features.has_logprobs_modes
    return TokenLogprobs(0, 0, 0, 0, 0 if has_mass else None)


def _handed_on(context: ProgramContext, hidden: jax.Array) -> dict[str, JaxIntermediateTensors]:
    """Returns the model's argument for the previous stage's hidden states, if there is a previous stage."""
    return {} if context.stage.is_first else {"intermediate_tensors": JaxIntermediateTensors(hidden_states=hidden)}


def _sample_greedily(
    context: ProgramContext, model: GenerativeModel, rows: jax.Array
) -> tuple[SamplerOutput, jax.Array]:
    """Samples each row's most likely token; devices exchange only the best of their own parts of the vocabulary."""
    arrays = jax.tree.map(jnp.asarray, SamplingArrays.greedy(rows.shape[0], context.vocab_size))
    sampled = sample(context.divide(model.compute_logits(rows)), arrays, features=SamplerFeatures())
    return sampled, _last_tokens(context, sampled)


def _last_tokens(context: ProgramContext, sampled: SamplerOutput) -> jax.Array:
    """Returns the tokens as the next step takes them, i32 [max R]."""
    # More rows than sequences: a step with drafts, whose tokens are known before the next step is dispatched.
    tokens = sampled.token_ids[: context.max_num_seqs]
    return jnp.zeros(context.max_num_seqs, jnp.int32).at[: tokens.shape[0]].set(tokens)


def _start_copy_to_host(context: ProgramContext, sampled: SamplerOutput) -> None:
    if not context.is_on_host:
        for array in jax.tree.leaves(sampled):
            array.copy_to_host_async()

"""The programs that make up a step: what each computes, and for which shapes it is compiled.

Each program takes the flat list of the model's arrays and rebuilds the model inside.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxis.engine.execution.block_drafts import draft_blocks
from jaxis.engine.execution.chain_drafts import draft_by_chain, states_before
from jaxis.engine.execution.compiler_options import compiler_options
from jaxis.engine.execution.draft_program import DraftKey, draft
from jaxis.engine.execution.kv_cache import CacheStruct
from jaxis.engine.execution.model_arrays import GenerativeModel, ModelArrays
from jaxis.engine.execution.rank_programs import RankPrograms
from jaxis.engine.execution.sampler import SamplerOutput, sample, token_logprobs
from jaxis.engine.execution.sampling_batch import SamplerFeatures, SamplingArrays
from jaxis.engine.execution.step_inputs import StepShape, unpack_step
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.kernels.materialize import materialize
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.models.common.interfaces import DraftsBlocks, DraftsByChain, JaxIntermediateTensors, draft_of
from jaxis.parallel.mesh import MODEL_AXIS, automatic_axes, logical_sharding
from jaxis.parallel.stages import WHOLE, Stage
from jaxis.sampling_params import MAX_LOGPROBS

# Rows whose logits are in memory at once when the logits of many rows are wanted.
LOGITS_CHUNK_ROWS = 64


@dataclass(frozen=True)
class ForwardKey:
    """Program: the model over a step.

    (arrays, KV caches, last tokens i32 [max R], packed step) -> (KV caches, hidden states [T, E], those to sample from
    [S, E], auxiliary hidden states of both kinds). The caches are donated; those of layers that draft are not among
    them. Of several data ranks, all but the arrays lie one after the other.

    Of pipeline stages, those after the first take hidden states in the place of the last tokens, and those before the
    last return the hidden states that they hand on, without rows to sample from.
    """

    shape: StepShape


@dataclass(frozen=True)
class SampleKey:
    """Program: logits and sampling of S rows, one for each sequence and one more for each draft.

    (head arrays, hidden states [S, E], packed sampling arrays or None) -> (SamplerOutput, last tokens i32 [max R]). Of
    several data ranks, all but the arrays lie one after the other.
    """

    num_rows: int
    features: SamplerFeatures


@dataclass(frozen=True)
class GreedyStepKey:
    """Program: what those of a ForwardKey and of a greedy SampleKey compute, in one.

    (arrays, KV caches, last tokens i32 [max R], packed step) -> (KV caches, SamplerOutput, last tokens, hidden states
    [1, E] and auxiliary ones). The caches are donated. The states are there where layers draft, which take them.
    """

    shape: StepShape


@dataclass(frozen=True)
class LogitsKey:
    """Program: logits of a chunk of a step's rows (`targets` False), or their log-probabilities of given tokens.

    (head arrays, hidden states [T, E], rows, [targets]) -> float32 [LOGITS_CHUNK_ROWS, V], or TokenLogprobs. Rows count
    through the hidden states of all data ranks.
    """

    num_tokens: int
    targets: bool


@dataclass(frozen=True)
class WholeKey:
    """Program: hidden states of one whole sequence, without a cache.

    (arrays, token ids i32 [T], number of tokens) -> hidden states [T, E]. All data ranks compute the same. Pipeline
    stages after the first take hidden states [T, E] in the place of token ids.
    """

    num_tokens: int


class StepPrograms:
    """Traces and compiles the programs of one model on one mesh.

    Args:
      model: The model.
      mesh: Its devices.
      caches: The shapes and shardings of the layers' caches.
      num_draft_caches: How many of the caches, the last ones, are those of the layers that draft tokens.
      max_num_seqs: Most sequences in a step (max R).
      vocab_size: V.
      stage: What of the model it is.
    """

    def __init__(
        self,
        model: ModelArrays,
        mesh: jax.sharding.Mesh,
        *,
        caches: Sequence[CacheStruct],
        num_draft_caches: int = 0,
        max_num_seqs: int,
        vocab_size: int,
        stage: Stage = WHOLE,
    ) -> None:
        self._model = model
        self._stage = stage
        self._mesh = mesh
        self._ranks = RankPrograms(mesh)
        first_draft_cache = len(caches) - num_draft_caches
        self._own_caches, self._draft_caches = list(caches[:first_draft_cache]), list(caches[first_draft_cache:])
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._replicated = NamedSharding(mesh, PartitionSpec())

    def compile(self, key: Hashable) -> jax.stages.Compiled:
        """The compiled program of a key. May be called from several threads."""
        return self.lower(key).compile()

    def lower(self, key: Hashable) -> jax.stages.Lowered:
        """The program of a key, traced and lowered."""
        with jax.set_mesh(self._mesh):
            if isinstance(key, ForwardKey):
                return self._lower_forward(key)
            if isinstance(key, DraftKey):
                return self._lower_draft(key)
            if isinstance(key, SampleKey):
                return self._lower_sample(key)
            if isinstance(key, GreedyStepKey):
                return self._lower_greedy_step(key)
            if isinstance(key, LogitsKey):
                return self._lower_logits(key)
            if isinstance(key, WholeKey):
                return self._lower_whole(key)
        raise TypeError(f"{key!r} names no program")

    def _lower_forward(self, key: ForwardKey) -> jax.stages.Lowered:
        def forward(
            arrays: list[jax.Array], caches: list[Any], given: jax.Array, packed: jax.Array
        ) -> tuple[list[Any], jax.Array, jax.Array | None, tuple[list[jax.Array], ...]]:
            # All but the first stage take no tokens, in flight or not.
            last_tokens = given if self._stage.is_first else jnp.zeros(self._max_num_seqs, jnp.int32)
            step = unpack_step(packed, key.shape, last_tokens)
            model = self._model.merge(arrays)
            caches, hidden, aux = model(caches, step.input_ids, step.attention_metadata, **self._handed_on(given))
            rows = hidden[step.logits_rows] if self._stage.is_last else None
            if not self._draft_caches:
                aux = []
            before = []
            if isinstance(chain := draft_of(model), DraftsByChain):
                before = states_before(step.logits_rows, chain.num_layers, [hidden, *aux])
            return caches, hidden, rows, (aux, [each[step.logits_rows] for each in aux], before)

        ranks = self._ranks
        operands = (
            self._model.arrays,
            self._own_caches,
            ranks.struct((self._max_num_seqs,), jnp.int32)
            if self._stage.is_first
            else self.hidden_struct(key.shape.num_tokens),
            ranks.struct((key.shape.packed_size,), jnp.int32),
        )
        results = (_shardings(self._own_caches), ranks.sharding, ranks.sharding, ranks.sharding)
        return _jit(ranks.over_ranks(forward, operands, results), donate_argnums=1, out_shardings=results).lower(
            *operands
        )

    def _lower_draft(self, key: DraftKey) -> jax.stages.Lowered:
        def run(
            arrays: list[jax.Array],
            caches: list[Any],
            hidden: jax.Array,
            aux: list[jax.Array],
            packed_step: jax.Array,
            packed: jax.Array,
        ) -> tuple[list[Any], jax.Array]:
            model: Any = self._model.merge(arrays)
            if isinstance(model.draft, DraftsBlocks):
                return draft_blocks(key, model, caches, aux, packed_step, packed)
            program = draft_by_chain if isinstance(model.draft, DraftsByChain) else draft
            return program(key, model, caches, hidden, aux, packed_step, packed)

        num_tokens = key.shape.num_tokens
        decoder = cast(Any, self._model.model).decoder
        jitted = _jit(run, donate_argnums=1, out_shardings=(_shardings(self._draft_caches), self._replicated))
        return jitted.lower(
            self._model.arrays,
            self._draft_caches,
            self.hidden_struct(num_tokens),
            [self.hidden_struct(num_tokens)] * len(decoder.aux_hidden_state_layers),
            self._int32(key.shape.packed_size),
            self._int32(key.packed_size),
        )

    def _lower_greedy_step(self, key: GreedyStepKey) -> jax.stages.Lowered:
        def greedy_step(
            arrays: list[jax.Array], caches: list[Any], last_tokens: jax.Array, packed: jax.Array
        ) -> tuple[list[Any], SamplerOutput, jax.Array, list[jax.Array]]:
            step = unpack_step(packed, key.shape, last_tokens)
            model = self._model.merge(arrays)
            caches, hidden, aux = model(caches, step.input_ids, step.attention_metadata)
            # Rounded as where another program reads them: a sequence's tokens do not depend on what samples them.
            rows = materialize(hidden[step.logits_rows])
            return caches, *self._sample_greedily(model, rows), [rows, *aux] if self._draft_caches else []

        shardings = (_shardings(self._own_caches), self._replicated, self._replicated, self._replicated)
        last_tokens = self._int32(self._max_num_seqs)
        packed = self._int32(key.shape.packed_size)
        jitted = _jit(greedy_step, donate_argnums=1, out_shardings=shardings)
        return jitted.lower(self._model.arrays, self._own_caches, last_tokens, packed)

    def _lower_sample(self, key: SampleKey) -> jax.stages.Lowered:
        num_rows, features = key.num_rows, key.features
        parameters = None
        if features != SamplerFeatures():
            parameters = self._ranks.struct((SamplingArrays.packed_size(num_rows, features),), jnp.int32)

        def run(
            head_arrays: list[jax.Array], rows: jax.Array, parameters: jax.Array | None
        ) -> tuple[SamplerOutput, jax.Array]:
            model = self._model.merge_head(head_arrays)
            if parameters is None:
                return self._sample_greedily(model, rows)
            return self._sample(model, rows, SamplingArrays.unpack(parameters, num_rows, features), features)

        ranks = self._ranks
        operands = (self._model.head_arrays, self.hidden_struct(num_rows), parameters)
        # The tokens of all ranks are read by the host, which has one device of them, or more.
        jitted = _jit(ranks.over_ranks(run, operands, ranks.sharding), out_shardings=(self._replicated, ranks.sharding))
        return jitted.lower(*operands)

    def _sample_greedily(self, model: GenerativeModel, rows: jax.Array) -> tuple[SamplerOutput, jax.Array]:
        """`_sample` where each row takes its most likely token: devices only exchange those of their own logits."""
        arrays = jax.tree.map(jnp.asarray, SamplingArrays.greedy(rows.shape[0], self._vocab_size))
        sampled = sample(self._divide(model.compute_logits(rows)), arrays, features=SamplerFeatures())
        return sampled, self._last_tokens(sampled)

    def _sample(
        self, model: GenerativeModel, rows: jax.Array, arrays: SamplingArrays[jax.Array], features: SamplerFeatures
    ) -> tuple[SamplerOutput, jax.Array]:
        """Samples from hidden states [S, E]; also returns the tokens as the next step takes them, i32 [max R]."""
        sampled = sample(self._replicate(model.compute_logits(rows)), arrays, features=features)
        return sampled, self._last_tokens(sampled)

    def _last_tokens(self, sampled: SamplerOutput) -> jax.Array:
        # More rows than sequences: a step with drafts, which no step is dispatched ahead of.
        tokens = sampled.token_ids[: self._max_num_seqs]
        return jnp.zeros(self._max_num_seqs, jnp.int32).at[: tokens.shape[0]].set(tokens)

    def _lower_logits(self, key: LogitsKey) -> jax.stages.Lowered:
        def logits(head_arrays: list[jax.Array], hidden: jax.Array, rows: jax.Array) -> jax.Array:
            model = self._model.merge_head(head_arrays)
            return self._replicate(model.compute_logits(self._ranks.take(hidden, rows)))

        def logprobs(
            head_arrays: list[jax.Array], hidden: jax.Array, rows: jax.Array, targets: jax.Array
        ) -> TokenLogprobs[jax.Array]:
            return token_logprobs(logits(head_arrays, hidden, rows), targets, num_logprobs=MAX_LOGPROBS)

        rows = self._int32(LOGITS_CHUNK_ROWS)
        operands = (self._model.head_arrays, self.hidden_struct(key.num_tokens), rows, *([rows] if key.targets else []))
        run = self._ranks.over_ranks(logprobs if key.targets else logits, operands, self._replicated)
        return _jit(run, out_shardings=self._replicated).lower(*operands)

    def _lower_whole(self, key: WholeKey) -> jax.stages.Lowered:
        def whole(arrays: list[jax.Array], given: jax.Array, num_tokens: jax.Array) -> jax.Array:
            input_ids = given if self._stage.is_first else jnp.zeros(key.num_tokens, jnp.int32)
            metadata = AttentionMetadata(
                input_positions=jnp.arange(key.num_tokens, dtype=jnp.int32),
                block_tables=None,
                seq_lens=num_tokens[None],
                query_start_loc=jnp.stack([jnp.zeros_like(num_tokens), num_tokens]),
                request_distribution=jnp.asarray([0, 1, 1], jnp.int32),
            )
            _, hidden, _ = self._model.merge(arrays)(None, input_ids, metadata, **self._handed_on(given))
            return hidden

        given = self._int32(key.num_tokens) if self._stage.is_first else self.hidden_struct(key.num_tokens)
        operands = (self._model.arrays, given, self._int32())
        run = self._ranks.over_ranks(whole, operands, self._ranks.sharding)
        return _jit(run, out_shardings=self._ranks.sharding).lower(*operands)

    def _handed_on(self, hidden: jax.Array) -> dict[str, JaxIntermediateTensors]:
        """The model's argument for what the stage before it hands on, if there is one."""
        return {} if self._stage.is_first else {"intermediate_tensors": JaxIntermediateTensors(hidden_states=hidden)}

    def _replicate(self, logits: jax.Array) -> jax.Array:
        """Whole rows of logits on every device, so that all devices sample the same tokens.

        Each device first computes its own part of the vocabulary: told only that the result is whole, XLA would gather
        the head's weight and let every device multiply by all of it.
        """
        return self._constrain(self._divide(logits), self._replicated)

    def _divide(self, logits: jax.Array) -> jax.Array:
        """On each device its own part of the vocabulary, if it can be divided."""
        return self._constrain(logits, logical_sharding(self._mesh, (None, "vocab"), logits.shape))

    def _constrain(self, logits: jax.Array, sharding: NamedSharding) -> jax.Array:
        if MODEL_AXIS not in automatic_axes():
            return logits
        # The spec alone: what XLA divides here may be one rank's part of the mesh.
        return jax.lax.with_sharding_constraint(logits, sharding.spec)

    def _int32(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._replicated)

    def hidden_struct(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        """Hidden states of so many tokens a data rank."""
        one = self._model.hidden_states
        return self._ranks.struct((num_tokens, *one.shape[1:]), one.dtype)


def _shardings(caches: list[CacheStruct]) -> list[Any]:
    return jax.tree.map(lambda struct: struct.sharding, caches)


def _jit(function: Callable[..., Any], **options: Any) -> jax.stages.Wrapped:
    """`jax.jit` with the options of the current mesh's compiler."""
    return jax.jit(function, compiler_options=compiler_options(), **options)

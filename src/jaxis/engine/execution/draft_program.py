"""The program that drafts tokens on the devices: a step's tokens through the draft layers, then draft after draft.

Draft layers see every token that the target computes, in the same places of caches of their own. The first draft
follows from the step's own hidden states. Each later draft follows from the draft before it, whose keys and values are
written where the next step's will be. Some layers draft a block of tokens at once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.device_state import DeviceState
from jaxis.engine.execution.program_context import ProgramContext, jit, shardings_of
from jaxis.engine.execution.program_key import Compiled, RunsOn
from jaxis.engine.execution.step_inputs import unpack_step
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.engine.scheduling.sequence import BlockTable
from jaxis.kernels.sampling import argmax
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.models.common.interfaces import block_size_of

# Of a draft and those before it to be right, by the layers that draft.
_LEAST_CHANCE = 0.1


@dataclass(frozen=True)
class DraftKey:
    """The draft layers over a step, then the drafts of some of its sequences: as many as the packed drafting says.

    (arrays, draft caches, hidden states [T, E], auxiliary hidden states, last tokens i32 [max R], packed step, packed
    drafting) -> (draft caches, drafts i32 [N, num_drafts], negative where they are not worth a try). The caches are
    donated.

    Attributes:
      shape: Shape of the step.
      num_rows: N, at least the number of sequences that draft; 0 if none does.
      num_drafts: Most tokens to draft for each sequence.
    """

    shape: StepShape
    num_rows: int
    num_drafts: int

    runs_on = RunsOn.LAST_STAGE
    description = "drafts"
    result_tree = 0

    @property
    def num_tokens(self) -> int:
        return self.shape.num_tokens

    def lower(self, context: ProgramContext) -> jax.stages.Lowered:
        def run(
            arrays: list[jax.Array],
            caches: list[Any],
            hidden: jax.Array,
            aux: list[jax.Array],
            last_tokens: jax.Array,
            packed_step: jax.Array,
            packed: jax.Array,
        ) -> tuple[list[Any], jax.Array]:
            model = context.model.merge(arrays)
            return draft(self, model, caches, hidden, aux, last_tokens, packed_step, packed)

        decoder = cast(Any, context.model.model).decoder
        hidden = context.hidden_struct(self.num_tokens)
        streams = (decoder.num_streams,) if decoder.num_streams > 1 else ()
        aux = jax.ShapeDtypeStruct((hidden.shape[0], *streams, hidden.shape[1]), hidden.dtype, sharding=hidden.sharding)
        shardings = (shardings_of(context.draft_caches), context.replicated)
        return jit(run, donate_argnums=1, out_shardings=shardings).lower(
            context.model.arrays,
            context.draft_caches,
            hidden,
            [aux] * len(decoder.aux_hidden_state_layers),
            context.int32(context.max_num_seqs),
            context.int32(self.shape.packed_size),
            context.int32(self.packed_size),
        )

    def run(self, program: Compiled, state: DeviceState, packed_step: np.ndarray, packed: np.ndarray) -> jax.Array:
        """Returns the drafts, i32 [N, num_drafts], after the step that was dispatched last.

        `packed_step` is that step, by `pack_step`; `packed` comes from `pack_drafting`.
        """
        given = state.hidden, list(state.aux), state.last_tokens
        model_caches = state.model_caches
        caches, drafts = program(state.context.model.arrays, state.draft_caches, *given, packed_step, packed)
        state.caches = [*model_caches, *caches]
        return drafts

    @functools.cached_property
    def fields(self) -> dict[str, slice]:
        """The slice of each field of a drafting in the packed vector."""
        sizes = {
            "token_ids": self.shape.num_tokens,
            "num_sequences": 1,
            "length": 1,
            "rows": self.num_rows,
            "newest_ids": self.num_rows,
            "positions": self.num_rows,
        }
        for i in range(len(self.shape.spans)):
            sizes[f"block_tables_{i}"] = self.num_rows * self.shape.max_blocks
        stops = itertools.accumulate(sizes.values())
        return {name: slice(stop - size, stop) for (name, size), stop in zip(sizes.items(), stops, strict=True)}

    @property
    def packed_size(self) -> int:
        return max(field.stop for field in self.fields.values())

    def unpack(self, packed_step: jax.Array, packed: jax.Array) -> tuple[AttentionMetadata, dict[str, jax.Array]]:
        """Unpacks, inside a jitted function, the vectors of `pack_step` and `pack_drafting`."""
        no_tokens_in_flight = jnp.zeros(1, jnp.int32)
        step = unpack_step(packed_step, self.shape, no_tokens_in_flight).attention_metadata
        return step, {name: packed[field] for name, field in self.fields.items()}


class DraftedSequence(NamedTuple):
    """A sequence to draft for.

    Attributes:
      row: The step's row of the token before the sequence's newest token.
      newest_id: The newest token.
      position: The position of the newest token.
      block_tables: The sequence's blocks, for its tokens and the drafts, in each group of layers.
    """

    row: int
    newest_id: int
    position: int
    block_tables: Sequence[BlockTable]


def pack_drafting(
    key: DraftKey, token_ids: Sequence[int], sequences: Sequence[DraftedSequence], length: int
) -> np.ndarray:
    """Packs the program's input beside the step into one int32 vector.

    Args:
      key: The program's key.
      token_ids: Tokens that the draft layers read in the step's rows: -1 - i for the i-th token that the step has
        sampled.
      sequences: Sequences to draft for, at most N.
      length: Tokens to draft for each sequence. The program's results beyond them are meaningless.
    """
    packed = np.zeros(key.packed_size, np.int32)
    values = {
        "token_ids": token_ids,
        "num_sequences": [len(sequences)],
        "length": [length],
        "rows": [each.row for each in sequences],
        "newest_ids": [each.newest_id for each in sequences],
        "positions": [each.position for each in sequences],
    }
    for name, field_values in values.items():
        begin = key.fields[name].start
        packed[begin : begin + len(field_values)] = field_values
    for i in range(len(key.shape.spans)):
        tables = packed[key.fields[f"block_tables_{i}"]].reshape(key.num_rows, key.shape.max_blocks)
        for row, each in enumerate(sequences):
            table = each.block_tables[i]
            # Before a window's first block, no entry is used; a kernel that reads them reads the sequence's own values.
            tables[row] = table.block_ids[0]
            block_ids = table.block_ids[: key.shape.max_blocks - table.first]
            tables[row, table.first : table.first + len(block_ids)] = block_ids
    return packed


def draft(
    key: DraftKey,
    model: Any,
    caches: list[Any],
    hidden_states: jax.Array,
    aux_hidden_states: Sequence[jax.Array],
    last_tokens: jax.Array,
    packed_step: jax.Array,
    packed: jax.Array,
) -> tuple[list[Any], jax.Array]:
    """Computes the program of `DraftKey`, inside a jitted function.

    `model` is the target, whose `draft` has the layers. `hidden_states` come after the target's final norm;
    `aux_hidden_states` are those of `DecoderModel.aux_hidden_state_layers`.
    """
    layers = model.draft
    step, fields = key.unpack(packed_step, packed)
    states = layers.first_states(hidden_states, aux_hidden_states)
    read_ids = fields["token_ids"]
    # A token is -1 if the step could not sample it, as with logits that are not finite.
    read_ids = jnp.maximum(jnp.where(read_ids < 0, last_tokens[-1 - read_ids], read_ids), 0)
    caches, states = layers(model, caches, read_ids, states, step)
    drafts = jnp.zeros((key.num_drafts, key.num_rows), jnp.int32)
    if key.num_rows == 0:
        return caches, drafts.T
    if size := block_size_of(layers):
        metadata = tokens_of_each(key, fields, fields["positions"], size)
        caches, block = layers.draft_block(model, caches, fields["newest_ids"], metadata)
        is_likely = jnp.cumprod(block.chances, axis=1) >= _LEAST_CHANCE
        return caches, jnp.where(is_likely, block.drafts, -1)[:, : key.num_drafts]

    def following(states: jax.Array) -> jax.Array:
        """Returns the most likely tokens after the rows of these states."""
        indices, _ = argmax(layers.compute_logits(model, states).astype(jnp.float32))
        # The index is meaningless if logits are not finite.
        return jnp.clip(layers.token_ids(indices), 0, model.vocab_size - 1)

    states, newest_ids = states[fields["rows"]], fields["newest_ids"]
    length = jnp.minimum(fields["length"][0], key.num_drafts)
    first = int(layers.reads_next_token)  # such layers have read the newest token
    if first:
        newest_ids = jax.lax.cond(length > 0, following, lambda _: jnp.zeros_like(newest_ids), states)
        drafts = drafts.at[0].set(newest_ids)

    def one_more(
        number: jax.Array, carry: tuple[list[Any], jax.Array, jax.Array, jax.Array]
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
        caches, states, newest_ids, drafts = carry
        metadata = tokens_of_each(key, fields, fields["positions"] + number - first)
        caches, states = layers(model, caches, newest_ids, states, metadata)
        newest_ids = following(states)
        return caches, states, newest_ids, drafts.at[number].set(newest_ids)

    caches, _, _, drafts = jax.lax.fori_loop(first, length, one_more, (caches, states, newest_ids, drafts))
    return caches, drafts.T


def tokens_of_each(
    key: DraftKey, fields: dict[str, jax.Array], positions: jax.Array, size: int = 1
) -> AttentionMetadata:
    """Returns the metadata of a step of tokens of each sequence that drafts, from these positions i32 [N] on."""
    number, num_spans = fields["num_sequences"][0], len(key.shape.spans)
    num_decodes = number if size == 1 else 0
    tables = tuple(fields[f"block_tables_{i}"].reshape(key.num_rows, -1) for i in range(num_spans))
    return AttentionMetadata(
        input_positions=(positions[:, None] + jnp.arange(size, dtype=jnp.int32)).reshape(-1),
        block_tables=tables[0],
        seq_lens=positions + size,
        query_start_loc=size * jnp.minimum(jnp.arange(key.num_rows + 1, dtype=jnp.int32), number),
        request_distribution=jnp.stack([num_decodes, num_decodes, number]),
        spans=key.shape.spans,
        other_block_tables=tables[1:],
    )

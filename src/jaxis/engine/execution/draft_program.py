"""The program that drafts tokens on the devices: a step's tokens through the draft layers, then draft after draft.

Draft layers see every token that the target computes, in the same places of caches of their own. The first draft
follows from the step's own hidden states; each of the others from the draft before, whose keys and values lie where the
next step's will.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.step_inputs import StepShape, unpack_step
from jaxis.engine.scheduling.sequence import BlockTable
from jaxis.kernels.sampling import argmax
from jaxis.layers.attention_metadata import AttentionMetadata


@dataclass(frozen=True)
class DraftKey:
    """Program: the draft layers over a step, and drafts of some of its sequences, as many as the packed drafting says.

    (arrays, draft caches, hidden states [T, E], auxiliary hidden states, packed step, packed drafting) -> (draft
    caches, drafts i32 [N, num_drafts]). The caches are donated.

    Attributes:
      shape: Of the step.
      num_rows: N, at least as many as sequences that draft; 0 if none does.
      num_drafts: Most tokens to draft for each of them.
      num_layers: Layers of a chain (`DraftsByChain`), each of which reads other tokens in the step's rows.
    """

    shape: StepShape
    num_rows: int
    num_drafts: int
    num_layers: int = 1

    @functools.cached_property
    def fields(self) -> dict[str, slice]:
        """Where each field of a `Drafting` lies in the packed vector."""
        sizes = {
            "token_ids": self.num_layers * self.shape.num_tokens,
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
        """Inside a jitted function: the step by `pack_step`, and the fields by `pack_drafting`."""
        no_tokens_in_flight = jnp.zeros(1, jnp.int32)
        step = unpack_step(packed_step, self.shape, no_tokens_in_flight).attention_metadata
        return step, {name: packed[field] for name, field in self.fields.items()}


class DraftedSequence(NamedTuple):
    """A sequence to draft for.

    Attributes:
      row: Of the step: that of the token before the sequence's newest one.
      newest_id: The newest token.
      position: That of the newest token.
      block_tables: The sequence's blocks, for its tokens and the drafts, in each group of layers.
    """

    row: int
    newest_id: int
    position: int
    block_tables: Sequence[BlockTable]


def pack_drafting(
    key: DraftKey, token_ids: Sequence[int], sequences: Sequence[DraftedSequence] = (), length: int | None = None
) -> np.ndarray:
    """What the program needs beside the packed step, as one int32 vector.

    Args:
      key: The program.
      token_ids: What the draft layers read in the step's rows; of a chain, T for each layer.
      sequences: At most N.
      length: Tokens to draft for each of them, at least 1; None: all. What the program returns for those behind them
        means nothing.
    """
    packed = np.zeros(key.packed_size, np.int32)
    values = {
        "token_ids": token_ids,
        "num_sequences": [len(sequences)],
        "length": [key.num_drafts if length is None else length],
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
    packed_step: jax.Array,
    packed: jax.Array,
) -> tuple[list[Any], jax.Array]:
    """Inside a jitted function: what a `DraftKey` says.

    Args:
      key: The program.
      model: The target, whose `draft` has the layers.
      caches: Theirs.
      hidden_states: [T, E], after the target's final norm.
      aux_hidden_states: Those of `DecoderModel.aux_hidden_state_layers`.
      packed_step: By `pack_step`.
      packed: By `pack_drafting`.
    """
    layers = model.draft
    step, fields = key.unpack(packed_step, packed)
    states = layers.first_states(hidden_states, aux_hidden_states)
    caches, states = layers(model, caches, fields["token_ids"], states, step)
    if key.num_rows == 0:
        return caches, jnp.zeros((0, key.num_drafts), jnp.int32)
    vocab_size = model.decoder.embed_tokens.output_size

    def following(states: jax.Array) -> jax.Array:
        """The most likely tokens after the rows of these states."""
        indices, _ = argmax(layers.compute_logits(model, states).astype(jnp.float32))
        # Of logits that are not finite, the index is meaningless.
        return jnp.clip(layers.token_ids(indices), 0, vocab_size - 1)

    metadata = functools.partial(one_token_each, key, fields)
    states = states[fields["rows"]]
    if layers.reads_next_token:
        first_position = fields["positions"]
    else:
        caches, states = layers(model, caches, fields["newest_ids"], states, metadata(fields["positions"]))
        first_position = fields["positions"] + 1

    def one_more(number: jax.Array, carry: tuple[list[Any], jax.Array, jax.Array]) -> tuple[Any, jax.Array, jax.Array]:
        caches, states, drafts = carry
        caches, states = layers(model, caches, drafts[number - 1], states, metadata(first_position + number - 1))
        return caches, states, drafts.at[number].set(following(states))

    drafts = jnp.zeros((key.num_drafts, key.num_rows), jnp.int32).at[0].set(following(states))
    length = jnp.minimum(fields["length"][0], key.num_drafts)
    caches, _, drafts = jax.lax.fori_loop(1, length, one_more, (caches, states, drafts))
    return caches, drafts.T


def one_token_each(key: DraftKey, fields: dict[str, jax.Array], positions: jax.Array) -> AttentionMetadata:
    """A step of one token of each sequence that drafts, at these positions i32 [N]."""
    number, num_spans = fields["num_sequences"][0], len(key.shape.spans)
    tables = tuple(fields[f"block_tables_{i}"].reshape(key.num_rows, -1) for i in range(num_spans))
    return AttentionMetadata(
        input_positions=positions,
        block_tables=tables[0],
        seq_lens=positions + 1,
        query_start_loc=jnp.minimum(jnp.arange(key.num_rows + 1, dtype=jnp.int32), number),
        request_distribution=jnp.stack([number, number, number]),
        spans=key.shape.spans,
        other_block_tables=tables[1:],
    )

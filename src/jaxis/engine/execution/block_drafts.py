"""The program that drafts a block of tokens for each sequence in one pass (`DraftsBlocks`).

The layers' contexts are made of what the target's layers return for the tokens of a step. The blocks' own keys and
values lie behind them, where those of the next step's tokens will.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxis.engine.execution.draft_program import DraftKey
from jaxis.kernels.sampling import argmax
from jaxis.layers.attention_metadata import AttentionMetadata


def draft_blocks(
    key: DraftKey,
    model: Any,
    caches: list[Any],
    aux_hidden_states: Sequence[jax.Array],
    packed_step: jax.Array,
    packed: jax.Array,
) -> tuple[list[Any], jax.Array]:
    """Inside a jitted function: what a `DraftKey` says.

    Args:
      key: The program.
      model: The target, whose `draft` has the layers.
      caches: Theirs.
      aux_hidden_states: Those of `DecoderModel.aux_hidden_state_layers`.
      packed_step: By `pack_step`.
      packed: By `pack_drafting`; of its token ids, the newest alone are read.
    """
    layers = model.draft
    step, fields = key.unpack(packed_step, packed)
    caches = layers.write_context(caches, aux_hidden_states, step)
    if key.num_rows == 0:
        return caches, jnp.zeros((0, key.num_drafts), jnp.int32)
    caches, logits = layers.draft_blocks(model, caches, fields["newest_ids"], key.num_drafts, _blocks(key, fields))
    # Of logits that are not finite, the index is meaningless.
    drafts = jnp.clip(argmax(logits.astype(jnp.float32))[0], 0, logits.shape[-1] - 1)
    return caches, drafts.reshape(key.num_rows, key.num_drafts)


def _blocks(key: DraftKey, fields: dict[str, jax.Array]) -> AttentionMetadata:
    """A step of the newest token and all drafts of each sequence that drafts."""
    number, num_spans, length = fields["num_sequences"][0], len(key.shape.spans), 1 + key.num_drafts
    tables = tuple(fields[f"block_tables_{i}"].reshape(key.num_rows, -1) for i in range(num_spans))
    positions = fields["positions"][:, None] + jnp.arange(length, dtype=jnp.int32)
    return AttentionMetadata(
        input_positions=positions.reshape(-1),
        block_tables=tables[0],
        seq_lens=fields["positions"] + length,
        query_start_loc=length * jnp.minimum(jnp.arange(key.num_rows + 1, dtype=jnp.int32), number),
        request_distribution=jnp.stack([jnp.zeros_like(number), number, number]),
        spans=key.shape.spans,
        other_block_tables=tables[1:],
    )

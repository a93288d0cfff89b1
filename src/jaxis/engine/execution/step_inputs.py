"""A step's flat batch as one integer vector: packed on the host, unpacked inside the jitted step.

One vector makes one transfer per step instead of one per field. The layout depends on the step's shape alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.config.attention_span import FULL_CONTEXT, AttentionSpan
from jaxis.engine.execution.step_shapes import STATE_FIELDS, StepShape
from jaxis.engine.scheduling.scheduler_output import SchedulerOutput
from jaxis.engine.scheduling.sequence import NO_SLOT, SequenceId
from jaxis.kernels.state_slots import StateSlots
from jaxis.layers.attention_metadata import AttentionMetadata

NOT_IN_FLIGHT = -1
Array = TypeVar("Array", np.ndarray, jax.Array)


@dataclass(frozen=True)
class StepInputs:
    """A step's inputs on the device.

    Attributes:
      input_ids: i32 [T].
      attention_metadata: Metadata for the model.
      logits_rows: i32 [S], the rows of the flat batch whose hidden states are sampled from: each sequence's last row,
        and with drafts, also the row before each of them.
      fields: All fields of the packed vector, by name.
    """

    input_ids: jax.Array
    attention_metadata: AttentionMetadata
    logits_rows: jax.Array
    fields: Mapping[str, jax.Array]


def pack_step(output: SchedulerOutput, shape: StepShape, inflight_rows: Mapping[SequenceId, int]) -> np.ndarray:
    """Packs a step into one int32 vector.

    Args:
      output: The step, decodes first; entries with drafts wait for no token in flight.
      shape: Shape at least as large as the step.
      inflight_rows: For each sequence whose input token the host does not know yet, the row of the previous step that
        sampled it.
    """
    # Lists, not arrays: a step is packed while the devices run the one before, with caches full of weights, and every
    # small NumPy operation then takes some microseconds from the threads of a CPU.
    seq_lens: list[int] = []
    row_stops = [0]
    positions: list[int] = []
    logits_rows: list[int] = []
    for entry in output.scheduled:
        stop = entry.start + entry.num_tokens
        seq_lens.append(stop)
        row_stops.append(row_stops[-1] + entry.num_tokens)
        positions += range(entry.start, stop)
        logits_rows += range(row_stops[-1] - entry.num_rows, row_stops[-1])
    num_seqs = len(seq_lens)
    token_ids, rows = _input_tokens(output, inflight_rows)
    packed = np.zeros(shape.packed_size, np.int32)
    values = {
        "input_ids": token_ids,
        "positions": positions,
        "seq_lens": seq_lens,
        "query_start_loc": row_stops + row_stops[-1:] * (shape.num_seqs - num_seqs),
        "request_distribution": (output.num_decodes, num_seqs, num_seqs),
        "inflight_rows": rows + [NOT_IN_FLIGHT] * (shape.num_seqs - num_seqs),
        "logits_rows": logits_rows,
    }
    for name, field_values in values.items():
        begin = shape.fields[name].start
        packed[begin : begin + len(field_values)] = field_values
    for i, span in enumerate(shape.spans):
        _pack_block_tables(output, shape, i, span, packed)
    if shape.has_states:
        for i, field in enumerate(STATE_FIELDS.values()):
            slots = [entry.state[i] for entry in output.scheduled if entry.state is not None]
            packed[shape.fields[field]] = slots + [NO_SLOT] * (shape.num_seqs - num_seqs)
    for part in shape.parts:
        part.pack(output, shape, packed)
    return packed


def _input_tokens(output: SchedulerOutput, inflight_rows: Mapping[SequenceId, int]) -> tuple[list[int], list[int]]:
    """Returns the step's tokens, 0 for those in flight, and each sequence's row in flight or NOT_IN_FLIGHT."""
    token_ids: list[int] = []
    rows: list[int] = []
    for entry in output.scheduled:
        sequence, stop = entry.sequence, entry.start + entry.num_tokens - entry.num_drafts
        if stop <= sequence.num_tokens:
            token_ids += sequence.token_ids(entry.start, stop)
            token_ids += entry.draft_token_ids
            rows.append(NOT_IN_FLIGHT)
        else:
            token_ids.append(0)
            rows.append(inflight_rows[sequence.seq_id])
    return token_ids, rows


def _pack_block_tables(
    output: SchedulerOutput, shape: StepShape, index: int, span: AttentionSpan, packed: np.ndarray
) -> None:
    packed_ids = packed[shape.fields[f"block_tables_{index}"]].reshape(shape.num_seqs, -1)
    first_blocks = packed[shape.fields[f"first_blocks_{index}"]]
    block_size, sees_all = shape.block_size, span == FULL_CONTEXT
    for i, entry in enumerate(output.scheduled):
        table = entry.sequence.block_tables[index]
        num_blocks = -(-(entry.start + entry.num_tokens) // block_size)
        if sees_all:
            block_ids = table.block_ids[:num_blocks]
        else:
            first = first_blocks[i] = span.first_visible(entry.start) // block_size
            block_ids = table.block_ids[first - table.first : num_blocks - table.first]
        packed_ids[i, : len(block_ids)] = block_ids


def unpack_step(packed: jax.Array, shape: StepShape, last_tokens: jax.Array) -> StepInputs:
    """Unpacks a step, inside a jitted function; input tokens in flight are taken from `last_tokens` [max R]."""
    fields = _split(packed, shape)
    # Only decodes wait for a token in flight, and they come first: sequence i's token is row i.
    rows = min(shape.num_seqs, shape.num_tokens)
    tables = tuple(_block_tables(fields, shape, i) for i in range(len(shape.spans)))
    inflight_rows = fields["inflight_rows"][:rows]
    head = jnp.where(inflight_rows >= 0, last_tokens[inflight_rows], fields["input_ids"][:rows])
    metadata = AttentionMetadata(
        input_positions=fields["positions"],
        block_tables=tables[0] if tables else None,
        seq_lens=fields["seq_lens"],
        query_start_loc=fields["query_start_loc"],
        request_distribution=fields["request_distribution"],
        spans=shape.spans,
        other_block_tables=tables[1:],
        state_slots=StateSlots(**{name: fields[field] for name, field in STATE_FIELDS.items()})
        if shape.has_states
        else None,
    )
    for part in shape.parts:
        metadata = part.metadata(metadata, fields)
    return StepInputs(jnp.concatenate([head, fields["input_ids"][rows:]]), metadata, fields["logits_rows"], fields)


def _block_tables(fields: Mapping[str, jax.Array], shape: StepShape, index: int) -> jax.Array:
    """Returns the tables of a span, i32 [R, max_blocks].

    The entries around the packed ones repeat the first packed block, so a kernel that reads more than it uses reads
    only the sequence's own values.
    """
    packed_ids = fields[f"block_tables_{index}"].reshape(shape.num_seqs, -1)
    if shape.spans[index].reach is None:
        return packed_ids
    whole = jnp.broadcast_to(packed_ids[:, :1], (shape.num_seqs, shape.max_blocks + packed_ids.shape[1]))
    place = jax.vmap(lambda row, block_ids, first: jax.lax.dynamic_update_slice(row, block_ids, (first,)))
    return place(whole, packed_ids, fields[f"first_blocks_{index}"])[:, : shape.max_blocks]


def _split(packed: Array, shape: StepShape) -> dict[str, Array]:
    return {name: packed[field] for name, field in shape.fields.items()}

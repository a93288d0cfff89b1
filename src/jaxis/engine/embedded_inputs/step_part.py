"""The part of a step's programs that reads the embeddings of prompts' inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.embedded_inputs.encoder import InputEncoder
from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.engine.execution.programs import Programs
from jaxis.engine.execution.step_part import StepPart
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.layers.attention_metadata import AttentionMetadata, BidirectionalTokens
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.interfaces import LayerAdditions
from jaxis.prompts import EmbeddedInput, rope_positions

_BIDIRECTIONAL_FIELDS = ("is_bidirectional", "segment_requests", "segment_ends")


@dataclass(frozen=True)
class InputPart(StepPart):
    """Addition of prompts' embedded inputs to a step.

    Attributes:
      embedding_size: Size of a token's embedding, with additions for layers, if an encoder computes some embeddings of
        the step (see `EmbeddedInput`); otherwise 0.
      has_bidirectional: True if tokens see later ones.
      has_rope_positions: True if RoPE counts tokens by more than their position in the sequence.
      encoder: Encoder of the inputs.
      programs: Programs that the encoder runs.
    """

    embedding_size: int
    has_bidirectional: bool
    has_rope_positions: bool
    encoder: InputEncoder = field(compare=False, repr=False)
    programs: Programs = field(compare=False, repr=False)

    @classmethod
    def of(cls, entries: Iterable[ScheduledSequence], encoder: InputEncoder, programs: Programs) -> InputPart | None:
        """Returns the part of a step with these entries; None if no input matters in it."""
        with_inputs = [entry for entry in entries if entry.sequence.spans]
        inside = [span for entry in with_inputs for span in entry.spans]
        part = cls(
            encoder.embedding_size if inside else 0,
            any(span.is_bidirectional for span in inside),
            any(
                item.grid is not None and item.start < entry.start + entry.num_tokens
                for entry in with_inputs
                for item in _inputs(entry.sequence.spans)
            ),
            encoder,
            programs,
        )
        return part if inside or part.has_rope_positions else None

    def sizes(self, shape: StepShape) -> dict[str, int]:
        num_tokens, sizes = shape.num_tokens, dict[str, int]()
        if self.embedding_size:
            sizes |= {"is_embedded": num_tokens, "embeddings": num_tokens * self.embedding_size}
        if self.has_bidirectional:
            sizes |= dict.fromkeys(_BIDIRECTIONAL_FIELDS, num_tokens)
            sizes |= {"segment_starts": num_tokens + 1, "num_segments": 1}
        if self.has_rope_positions:
            sizes["rope_positions"] = 3 * num_tokens
        return sizes

    def pack(self, output: SchedulerOutput, shape: StepShape, packed: np.ndarray) -> None:
        fields = {name: packed[shape.fields[name]] for name in self.sizes(shape)}
        if self.embedding_size:
            self._pack_embeddings(output, fields)
        if self.has_bidirectional:
            _pack_bidirectional(output, fields)
        if self.has_rope_positions:
            _pack_rope_positions(output, fields["rope_positions"].reshape(3, -1))

    def _pack_embeddings(self, output: SchedulerOutput, fields: Mapping[str, np.ndarray]) -> None:
        embeddings = fields["embeddings"].view(np.float32).reshape(-1, self.embedding_size)
        first_row = 0
        for entry in output.scheduled:
            for item in _inputs(entry.spans):
                here = item.rows_between(entry.start, entry.start + entry.num_tokens)
                rows = np.asarray(item.rows[here], np.int64) + (first_row + item.start - entry.start)
                if rows.size:
                    fields["is_embedded"][rows] = 1
                    embeddings[rows] = self.encoder.rows(item, self.programs)[here]
            first_row += entry.num_tokens

    def metadata(self, metadata: AttentionMetadata, fields: Mapping[str, jax.Array]) -> AttentionMetadata:
        if self.has_bidirectional:
            tokens = BidirectionalTokens(
                is_bidirectional=fields["is_bidirectional"] != 0,
                requests=fields["segment_requests"],
                seq_lens=fields["segment_ends"],
                query_start_loc=fields["segment_starts"],
                num_segments=fields["num_segments"][0],
            )
            metadata = dataclasses.replace(metadata, bidirectional=tokens)
        if self.has_rope_positions:
            metadata = dataclasses.replace(metadata, rope_positions=fields["rope_positions"].reshape(3, -1))
        return metadata

    def arguments(
        self, model: GenerativeModel, input_ids: jax.Array, fields: Mapping[str, jax.Array]
    ) -> dict[str, Any]:
        """Returns the embeddings of all tokens, [T, E], and what is added to them after the first layers."""
        if not self.embedding_size:
            return {}
        is_embedded = fields["is_embedded"] != 0
        own = jax.lax.bitcast_convert_type(fields["embeddings"], jnp.float32).reshape(-1, self.embedding_size)
        usual = cast(CausalLM, model).decoder.embed(input_ids)
        hidden_size = usual.shape[-1]
        embeds = jnp.where(is_embedded[:, None], own[:, :hidden_size].astype(usual.dtype), usual)
        if self.embedding_size == hidden_size:
            return {"inputs_embeds": embeds}
        return {"inputs_embeds": embeds, "layer_additions": LayerAdditions(is_embedded, own[:, hidden_size:])}


def _pack_rope_positions(output: SchedulerOutput, positions: np.ndarray) -> None:
    first_row = 0
    for entry in output.scheduled:
        stop, inputs = entry.start + entry.num_tokens, _inputs(entry.sequence.spans)
        positions[:, first_row : first_row + entry.num_tokens] = rope_positions(inputs, entry.start, stop)
        first_row += entry.num_tokens


def _pack_bidirectional(output: SchedulerOutput, fields: Mapping[str, np.ndarray]) -> None:
    """Cuts the rows into segments at the beginning and end of each input whose tokens see each other."""
    requests: list[int] = []
    ends: list[int] = []
    row_stops = [0]
    for request, entry in enumerate(output.scheduled):
        start, stop = entry.start, entry.start + entry.num_tokens
        first_row = row_stops[-1] - start
        cuts = {stop}
        for span in entry.spans:
            if span.is_bidirectional:
                first, last = max(span.start, start), min(span.stop, stop)
                fields["is_bidirectional"][first_row + first : first_row + last] = 1
                cuts |= {first, last} - {start}
        ends += sorted(cuts)
        requests += [request] * len(cuts)
        row_stops += [first_row + cut for cut in sorted(cuts)]
    fields["segment_requests"][: len(ends)] = requests
    fields["segment_ends"][: len(ends)] = ends
    fields["segment_starts"][:] = row_stops[-1]
    fields["segment_starts"][: len(row_stops)] = row_stops
    fields["num_segments"][:] = len(ends)


def _inputs(spans: Iterable[Any]) -> Iterator[EmbeddedInput]:
    """Returns the spans of sequences as what they are: only requests with inputs have spans."""
    return iter(spans)

"""The feature of adapters by request: each sequence may have one, known by the digest of its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxis.engine.execution.executor import DeviceExecutor
from jaxis.engine.execution.feature import RequestFeature
from jaxis.engine.execution.model_arrays import GenerativeModel
from jaxis.engine.execution.step_part import HeadPart, StepPart
from jaxis.engine.execution.step_shapes import StepShape
from jaxis.engine.scheduling import sequence as scheduling
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from jaxis.lora.adapted_model import HEAD
from jaxis.lora.store import AdapterStore


class AdapterFeature(RequestFeature):
    """The adapters of an engine's requests.

    A step with adapters runs a program of its own: the model with places for the changes of several adapters at once.
    Other steps run the same programs as without adapters.

    Attributes:
      store: The adapters that are loaded.
    """

    name = "adapter"
    needs_memory = "an engine with enable_lora cannot sleep: its adapters lie beside its weights"

    def __init__(self, store: AdapterStore) -> None:
        self.store = self.places = store
        self.calls = store.calls

    @property
    def facts(self) -> list[tuple[str, str, bytes, str | None]]:
        """Name, folder, digest and chat template of each adapter that is loaded at the start."""
        return [
            (name, source, digest, self.store.chat_template_of(source)) for name, source, digest in self.store.named
        ]

    def check(self, asked: bytes, num_prompt_tokens: int) -> None:
        del num_prompt_tokens
        self.store.check(asked)

    def mark(self, sequence: scheduling.Sequence, asked: bytes) -> None:
        sequence.identity = sequence.place = asked

    def part(self, entries: Iterable[ScheduledSequence]) -> AdapterPart | None:
        adapters = {entry.sequence.place for entry in entries if entry.sequence.place}
        if not adapters:
            return None
        parts = frozenset[str]().union(*map(self.store.parts_of, adapters))
        return AdapterPart(parts - {HEAD}, self.store, AdapterHead(parts, self.store) if HEAD in parts else None)

    def weights_changed(self, stages: Sequence[DeviceExecutor]) -> None:
        [stage] = stages
        with jax.set_mesh(stage.context.mesh):
            self.store.rebase(stage.context.model)


@dataclass(frozen=True)
class AdapterPart(StepPart):
    """The adapters of a step: its model has those that have a place.

    Attributes:
      parts: Parts of the layers that only some adapters change, see `AdapterStore.parts_of`.
      store: The adapters.
      head: Change of the head, if one of the adapters changes it; programs of layers do not depend on it.
    """

    parts: frozenset[str]
    store: AdapterStore = field(compare=False, repr=False)
    head: AdapterHead | None = field(compare=False)

    @property
    def in_decodes(self) -> AdapterPart:
        return self

    @property
    def arrays(self) -> list[jax.Array]:
        return self.store.arrays

    def sizes(self, shape: StepShape) -> dict[str, int]:
        return {"places": shape.num_seqs}

    def pack(self, output: SchedulerOutput, shape: StepShape, packed: np.ndarray) -> None:
        places = [self.store.place_of(entry.sequence.place) for entry in output.scheduled]
        packed[shape.fields["places"]][: len(places)] = places

    def model(self, arrays: list[jax.Array], fields: Mapping[str, jax.Array], shape: StepShape) -> GenerativeModel:
        return self.store.merge(arrays, _places_of_tokens(fields, shape), self.parts)


@dataclass(frozen=True)
class AdapterHead(HeadPart):
    """The adapters of a step whose head they change.

    Attributes:
      parts: Parts of the model that only some adapters change, HEAD among them.
      store: The adapters.
    """

    parts: frozenset[str]
    store: AdapterStore = field(compare=False, repr=False)

    @property
    def arrays(self) -> list[jax.Array]:
        return self.store.head_arrays

    def rows(self, entries: Iterable[tuple[ScheduledSequence, int]], num_rows: int) -> np.ndarray:
        """Returns the adapters' places: of each entry's sequence as often as it has rows, then 0."""
        rows = np.zeros(num_rows, np.int32)
        places = [place for entry, n in entries for place in [self.store.place_of(entry.sequence.place)] * n]
        rows[: len(places)] = places
        return rows

    def model(self, arrays: list[jax.Array], rows: jax.Array) -> GenerativeModel:
        return self.store.merge_head(arrays, rows, self.parts)


def _places_of_tokens(fields: Mapping[str, jax.Array], shape: StepShape) -> jax.Array:
    """Returns the place of each token's adapter, i32 [T]; 0 for padding."""
    starts, tokens = fields["query_start_loc"], jnp.arange(shape.num_tokens, dtype=jnp.int32)
    sequences = jnp.searchsorted(starts[1:], tokens, side="right")
    return jnp.where(tokens < starts[-1], fields["places"][jnp.minimum(sequences, shape.num_seqs - 1)], 0)

"""Batches of rows that are read as they are needed, from files of any size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxis.errors import ConfigError
from jaxis.parallel.distributed import largest
from jaxis.training.base_model import BaseModel
from jaxis.training.batches import MIN_ROW_TOKENS, TrainingBatch, fill, permutation, rounded_up
from jaxis.training.config import TrainConfig
from jaxis.training.config.training import DPO
from jaxis.training.data import BatchSource, StepContext, encoder_of, training_shape
from jaxis.training.data_files import DataFile, RawRow, files_of, rows_of
from jaxis.training.examples import Encoded, Example, check_kind
from jaxis.training.rows import data_rows, no_rows


class RowReader:
    """Reader of the rows of files, again and again, each time with the files in another order.

    Attributes:
      rows: The rows from a place on, read as they are asked for. They end only if there are none.
      place: Number of times that all files were read, of files read since then, and of rows read of the next file.
    """

    def __init__(self, files: Sequence[DataFile], seed: int, place: Sequence[int]) -> None:
        self._files, self._seed, self.place = files, seed, tuple(place)
        self.rows = self._read()

    def _read(self) -> Iterator[RawRow]:
        epoch, first, start = self.place
        while True:
            order = permutation(len(self._files), self._seed, epoch)
            for number in range(first, len(self._files)):
                for row, raw in enumerate(rows_of(self._files[order[number]].fetch(), start), start + 1):
                    self.place = epoch, number, row
                    yield raw
                start = 0
            if not self.place[2]:
                return
            epoch, first = epoch + 1, 0


class StreamedBatches(BatchSource):
    """Source of batches whose rows are read shortly before their step.

    Rows are shuffled in windows of as many as the shuffle buffer holds, in whole steps. A step's rows depend on the
    files, the seed and the step's number only. A host keeps its own rows alone, and does not parse the others.

    Raises:
      ConfigError: A file cannot be read; or, also when a batch is drawn, a row cannot be learned. It names the row.
    """

    def __init__(self, config: TrainConfig, base: BaseModel) -> None:
        training, data = config.training, config.data.train
        self._base, self._type, self._num_steps = base, training.trainer_type, training.max_steps
        self._num_sides = 2 if training.trainer_type == DPO else 1
        self._encoder, self._max_tokens = encoder_of(config, base, data)
        self._shape = training_shape(config, base, self._max_tokens)
        self._step_rows = self._shape.num_micro_batches * self._shape.num_rows
        self._window_steps = -(-max(each.shuffle_buffer_size for each in data.datasets) // self._step_rows)
        self._seed = training.data_seed if data.seed is None else data.seed
        files = [files_of(each) for each in data.datasets]
        self._shares = [each.mixture_proportion for each in data.datasets if each.mixture_proportion is not None] or [1]
        self._files = files if len(self._shares) == len(files) else [[file for each in files for file in each]]
        self._no_rows = no_rows(data.datasets[0])
        self.digests = dict(file.fingerprint() for each in files for file in each)
        self._encoded, self.num_rows = Encoded([]), 0
        self.go_to({"window": 0, "readers": [[0, 0, 0]] * len(self._files)})
        self._read_window()
        self.examples = [side for row in self._examples(0) for example in row for side in example]

    @property
    def steps_per_epoch(self) -> int:
        return self._num_steps  # nobody knows where an epoch ends

    def draw(self, context: StepContext) -> tuple[TrainingBatch, Mapping[str, float]]:
        window, number = divmod(context.step, self._window_steps)
        while self._window < window:
            self._read_window()
        rows = self._examples(number)
        self.num_rows = (context.step + 1) * self._step_rows
        lengths = [sum(max(len(side.ids) for side in each) for each in row) for row in rows]
        num_tokens = rounded_up(largest(max(lengths)), MIN_ROW_TOKENS, self._max_tokens)
        num_sequences = rounded_up(largest(max(map(len, rows))), 1, self._max_tokens)
        batch = fill(rows, self._shape, self._num_sides, num_tokens, num_sequences)
        return self._base.devices.put_batch(batch, self._num_sides), {}

    def place(self) -> Mapping[str, Any]:
        return {"window": self._window, "readers": self._places}

    def go_to(self, place: Mapping[str, Any]) -> None:
        self._window = place["window"] - 1
        places = zip(self._files, place["readers"], strict=True)
        self._readers = [RowReader(files, self._seed, each) for files, each in places]

    def summary(self) -> Sequence[str]:
        return self._encoded.notes(self._max_tokens)

    def _read_window(self) -> None:
        """Reads the next window; keeps the rows of this host."""
        self._window += 1
        self._places = [reader.place for reader in self._readers]
        size = self._window_steps * self._step_rows
        drawn = np.random.RandomState([self._seed, self._window, 0]).choice(len(self._shares), size, p=self._shares)
        own = self._base.devices.own_rows(self._shape.num_rows)
        self._rows: list[RawRow | None] = [None] * size
        for reader, position in zip(drawn, permutation(size, self._seed, self._window), strict=True):
            row = next(self._readers[reader].rows, None)
            if row is None:
                raise self._no_rows
            if position % self._shape.num_rows in own:
                self._rows[position] = row

    def _examples(self, number: int) -> list[list[tuple[Example, ...]]]:
        """Returns the examples, or pairs of them, of each batch row of a step, by its number in the window."""
        rows = self._rows[number * self._step_rows : (number + 1) * self._step_rows]
        return [[] if raw is None else self._of_row(raw) for raw in rows]

    def _of_row(self, raw: RawRow) -> list[tuple[Example, ...]]:
        rows = data_rows([raw])
        check_kind(rows, self._type, wants_pairs=self._num_sides == 2)
        examples = self._encoder.encode(rows, self._encoded).examples
        found = [tuple(examples[i : i + self._num_sides]) for i in range(0, len(examples), self._num_sides)]
        self._encoded.examples = []
        for example in examples:
            self._base.check_ids(example.ids, example.where)
        if self._num_sides == 1 and (num_tokens := sum(len(each.ids) for each in examples)) > self._max_tokens:
            raise ConfigError(
                f"{raw[0]}: its {len(examples)} turns are an example each, with {num_tokens} tokens together: raise "
                "model.model_max_length, or set data.train.train_target to final_assistant_turn"
            )
        return found

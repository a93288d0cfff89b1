"""The section `data`: data files for training and for the held-out loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jaxis.config.parameter_group import ParameterGroup, Unused, choice, number, whole
from jaxis.errors import ConfigError
from jaxis.training.config.unused import DATASET, SPLIT

DATASET_NAMES = ("text_sft", "text_sft_jsonl")
FIRST_EXHAUSTED, ALL_EXHAUSTED = "first_exhausted", "all_exhausted"
ALL_TURNS, FINAL_TURN = "all_assistant_turns", "final_assistant_turn"


@dataclass(frozen=True, kw_only=True)
class DatasetParams(ParameterGroup):
    """A file or folder of data rows.

    Attributes:
      dataset_path: Path of a JSONL, CSV or parquet file, or of a folder of them.
      dataset_name: Hub id of a data set, in place of a path; or text_sft or text_sft_jsonl, which change nothing.
      subset: Subset of the Hub's data set; None: its default.
      split: Split of the Hub's data set; None: train.
      sample_count: Number of rows to take: random ones with `shuffle`, else the first; None: all.
      shuffle: True to draw rows at random instead of from the beginning.
      shuffle_buffer_size: Number of streamed rows that are shuffled together, and are in memory.
      seed: Seed of `shuffle`; None: `data.train.seed`.
      mixture_proportion: Share of an epoch's examples. Either all files have one or none has; without it, all rows are
        used.
    """

    dataset_path: str | None = None
    dataset_name: str | None = None
    subset: str | None = None
    split: str | None = None
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    sample_count: int | None = whole(None, 1)
    mixture_proportion: float | None = number(None, 1e-6, 1)
    shuffle: bool = False
    shuffle_buffer_size: int = whole(1000, 1)
    seed: int | None = None

    UNUSED: ClassVar[Mapping[str, Unused]] = DATASET

    @classmethod
    def section(cls) -> str:
        return "data.datasets"

    def __post_init__(self) -> None:
        super().__post_init__()
        path = self.dataset_path or self.dataset_kwargs.get("dataset_path")
        if self.dataset_name not in (None, *DATASET_NAMES) and (path or "/" not in str(self.dataset_name)):
            self.refuse("dataset_name", "give either a Hub id owner/name, or dataset_path")
        if unknown := sorted(set(self.dataset_kwargs) - {"dataset_path"}):
            raise ConfigError(f"{self.section()}.dataset_kwargs.{unknown[0]} is not known; known: dataset_path")
        if self.hub_id is not None:
            return
        if not isinstance(path, str):
            raise ConfigError(
                f"{self.section()} needs dataset_path, the path of a JSONL, CSV or parquet file, or of a folder of them"
            )
        for name, accepted in (("subset", None), ("split", "train")):
            if getattr(self, name) not in (None, accepted):
                self.refuse(name, f"a file has no {name}s; give dataset_path of the rows to take")
        object.__setattr__(self, "dataset_path", path)

    @property
    def hub_id(self) -> str | None:
        return None if self.dataset_name in (None, *DATASET_NAMES) else self.dataset_name

    @property
    def path(self) -> Path:
        assert self.dataset_path is not None
        return Path(self.dataset_path)


@dataclass(frozen=True, kw_only=True)
class SplitParams(ParameterGroup):
    """The data of training or of validation.

    Attributes:
      datasets: Data files.
      stream: True to read rows as they are needed, again and again, for data sets larger than memory.
      mixture_strategy: End of an epoch for files with a mixture_proportion: first_exhausted, before one of them would
        begin again; or all_exhausted, when each of their rows was used.
      pack: True if several short examples share a batch row. Attention does not cross from one to another.
      train_target: Assistant's turns that are learned: all_assistant_turns or final_assistant_turn.
      seed: Seed of the order of data rows; None: `training.data_seed`.
    """

    datasets: tuple[DatasetParams, ...] = ()
    stream: bool = False
    pack: bool = False
    train_target: str = choice(ALL_TURNS, (ALL_TURNS, FINAL_TURN))
    seed: int | None = None
    mixture_strategy: str = choice(FIRST_EXHAUSTED, (FIRST_EXHAUSTED, ALL_EXHAUSTED))

    UNUSED: ClassVar[Mapping[str, Unused]] = SPLIT

    @classmethod
    def section(cls) -> str:
        return "data.train"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.datasets, str | Mapping) or not all(
            isinstance(each, Mapping | DatasetParams) for each in self.datasets
        ):
            raise ConfigError(f"{self.section()}.datasets must be a list of mappings, each with dataset_path")
        object.__setattr__(self, "datasets", tuple(DatasetParams.of(each) for each in self.datasets))
        self._check_mixture()
        if self.stream:
            self._check_stream()

    def _check_stream(self) -> None:
        if self.pack:
            self.refuse("stream", "leave pack out, which needs the lengths of all rows")
        if any(each.sample_count is not None for each in self.datasets):
            self.refuse("stream", "leave sample_count of the data sets out, and give training.max_steps")

    def _check_mixture(self) -> None:
        proportions = [each.mixture_proportion for each in self.datasets]
        given = [each for each in proportions if each is not None]
        if not given:
            return
        name = f"{self.section()}.datasets: mixture_proportion"
        if len(given) < len(proportions):
            raise ConfigError(f"{name} is missing for {len(proportions) - len(given)} of {len(proportions)} files")
        if abs(math.fsum(given) - 1) > 1e-6:
            raise ConfigError(f"{name} must add up to 1, not {math.fsum(given):g}")
        if self.pack:
            raise ConfigError(f"{name} cannot be combined with pack: leave one of them out")

    def notes(self) -> list[str]:
        found = super().notes() + [note for each in self.datasets for note in each.notes()]
        if not self.stream and any(each.shuffle_buffer_size != 1000 for each in self.datasets):
            found.append("data.datasets.shuffle_buffer_size has no effect: without stream, all rows are shuffled")
        return found


@dataclass(frozen=True, kw_only=True)
class ValidationParams(SplitParams):
    """The data of the held-out loss; fields as in `SplitParams`."""

    @classmethod
    def section(cls) -> str:
        return "data.validation"

    def _check_stream(self) -> None:
        self.refuse("stream", "all held-out rows are measured; leave it out")

    def _check_mixture(self) -> None:
        if any(each.mixture_proportion is not None for each in self.datasets):
            raise ConfigError(f"{self.section()}.datasets: mixture_proportion is of data.train: all rows are measured")


@dataclass(frozen=True, kw_only=True)
class DataParams(ParameterGroup):
    """The data of training, and of the held-out loss, measured during training; `test` is refused if set."""

    train: SplitParams = field(default_factory=SplitParams)
    validation: ValidationParams = field(default_factory=ValidationParams)
    test: Any = None

    @classmethod
    def section(cls) -> str:
        return "data"

    def __post_init__(self) -> None:
        object.__setattr__(self, "train", SplitParams.of(self.train))
        object.__setattr__(self, "validation", ValidationParams.of(self.validation))
        if self.test and self.test.get("datasets"):
            self.refuse("test", "give data.validation")
        if not self.train.datasets:
            raise ConfigError("data.train.datasets is empty: name a file, such as [{dataset_path: rows.jsonl}]")

    def notes(self) -> list[str]:
        return self.train.notes() + self.validation.notes()

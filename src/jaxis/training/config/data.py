"""The section `data`: which rows are learned, and which the loss is measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from jaxis.errors import ConfigError
from jaxis.training.config.section import TORCH_ONLY, ConfigSection

DATASET_NAMES = ("text_sft", "text_sft_jsonl")
ALL_TURNS, FINAL_TURN = "all_assistant_turns", "final_assistant_turn"


@dataclass(frozen=True, kw_only=True)
class DatasetParams(ConfigSection):
    """A file of rows.

    Attributes:
      dataset_path: A JSONL file.
      dataset_name: text_sft or text_sft_jsonl, which say no more than the path does.
      sample_count: Rows to take, drawn by `seed` with `shuffle`, else the first; None: all.
      shuffle: Whether rows are drawn rather than taken from the beginning.
      seed: For that; None: `data.train.seed`.
    """

    dataset_path: str | None = None
    dataset_name: str | None = None
    subset: str | None = None
    split: str = "train"
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    sample_count: int | None = None
    mixture_proportion: float | None = None
    shuffle: bool = False
    seed: int | None = None
    shuffle_buffer_size: int = 1000
    trust_remote_code: bool = False
    transform_num_workers: Any = None

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "split": "a file has no splits",
        "shuffle_buffer_size": "all rows are shuffled",
        "trust_remote_code": "data is read, never run",
        "transform_num_workers": "rows are tokenized in this process",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        "subset": "a file has no subsets; give dataset_path of the rows to take",
        "mixture_proportion": "give sample_count for each data set",
    }

    @classmethod
    def section(cls) -> str:
        return "data.datasets"

    def __post_init__(self) -> None:
        super().__post_init__()
        path = self.dataset_path or self.dataset_kwargs.get("dataset_path")
        if self.dataset_name not in (None, *DATASET_NAMES):
            self.refuse("dataset_name", "data sets of the Hub are not downloaded: give dataset_path, a JSONL file")
        if unknown := sorted(set(self.dataset_kwargs) - {"dataset_path"}):
            raise ConfigError(f"{self.section()}.dataset_kwargs.{unknown[0]} is not known; known: dataset_path")
        if not isinstance(path, str):
            raise ConfigError(f"{self.section()} needs dataset_path, the path of a JSONL file")
        if path.endswith(".parquet"):
            raise ConfigError(f"{self.section()}.dataset_path={path!r} must be a JSONL file: convert it first")
        object.__setattr__(self, "dataset_path", path)
        if self.sample_count is not None:
            self.check_number("sample_count", 1, whole=True)

    @property
    def path(self) -> Path:
        """The file."""
        assert self.dataset_path is not None
        return Path(self.dataset_path)


@dataclass(frozen=True, kw_only=True)
class SplitParams(ConfigSection):
    """The data of training, or of validation.

    Attributes:
      datasets: Files; an example of each is as likely as it has rows.
      pack: Whether several short examples share a row of the batch, none seeing another.
      train_target: Which of an assistant's turns are learned: all_assistant_turns or final_assistant_turn.
      seed: Of the order of rows; None: `training.data_seed`.
    """

    datasets: tuple[DatasetParams, ...] = ()
    pack: bool = False
    train_target: str = ALL_TURNS
    seed: int | None = None
    target_col: str | None = None
    collator_name: str | None = None
    collator_kwargs: dict[str, Any] = field(default_factory=dict)
    mixture_strategy: str = "first_exhausted"
    stream: bool = False
    use_async_dataset: bool = False
    use_torchdata: bool | None = None

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "target_col": "what is learned is told by the row's keys",
        "collator_name": "batches are made here",
        "mixture_strategy": "each row is taken once an epoch",
        "stream": "files are read before the first step",
        "use_async_dataset": TORCH_ONLY,
        "use_torchdata": TORCH_ONLY,
    }
    REFUSED: ClassVar[Mapping[str, str]] = {"collator_kwargs": "give data.train.train_target"}

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
        self.check("pack", bool, "true or false")
        if self.train_target not in (ALL_TURNS, FINAL_TURN):
            raise ConfigError(
                f"{self.section()}.train_target={self.train_target!r} must be {ALL_TURNS} or {FINAL_TURN}"
            )

    def notes(self) -> list[str]:
        return super().notes() + [note for each in self.datasets for note in each.notes()]


@dataclass(frozen=True, kw_only=True)
class ValidationParams(SplitParams):
    """The data that the loss is measured on during training; fields as in `SplitParams`."""

    @classmethod
    def section(cls) -> str:
        return "data.validation"


@dataclass(frozen=True, kw_only=True)
class DataParams(ConfigSection):
    """The data.

    Attributes:
      train: What is learned.
      validation: What the loss is measured on during training.
      test: Refused.
    """

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

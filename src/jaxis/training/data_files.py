"""Files of data rows: JSONL, CSV and parquet, alone, as a folder, or as a data set of the Hub."""

from __future__ import annotations

import csv
import fnmatch
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from jaxis.errors import ConfigError, RequestError
from jaxis.host.extras import check_extra
from jaxis.jsonl.source import lines_of, parse_row
from jaxis.loading.hub import explain_error
from jaxis.training.config.data import DatasetParams

CSV, PARQUET = ".csv", ".parquet"
SUFFIXES = (".jsonl", CSV, PARQUET)
_SAMPLED_BYTES = 1 << 20
# A row's place in its file, and a function that reads its columns, or raises RequestError if it has none.
RawRow: TypeAlias = tuple[str, Callable[[], Mapping[str, Any]]]


@dataclass(frozen=True)
class DataFile:
    """A file of data rows: `path` on this machine or, with `hub`, in a commit of a Hub's data set, (id, commit)."""

    path: Path
    hub: tuple[str, str] | None = None

    def fetch(self) -> Path:
        """Returns its path on this machine, once it is downloaded. Raises ConfigError, of one line, if that fails."""
        if self.hub is None:
            return self.path
        from huggingface_hub import hf_hub_download

        name, commit = self.hub
        with _download_errors(name):
            return Path(hf_hub_download(name, str(self.path), repo_type="dataset", revision=commit))

    def fingerprint(self) -> tuple[str, str]:
        """Returns its name, and what another content of it would change, without reading all of it.

        Raises ConfigError if the file cannot be read.
        """
        if self.hub is not None:
            return f"{self.hub[0]}/{self.path}", self.hub[1]
        with _opened(self.path) as file:
            return str(
                self.path
            ), f"{os.fstat(file.fileno()).st_size} {hashlib.sha256(file.read(_SAMPLED_BYTES)).hexdigest()}"


def files_of(dataset: DatasetParams) -> list[DataFile]:
    """Returns the files of a data set; those of a folder by name.

    Raises ConfigError, of one line, if a folder has none, or there is no such data set, subset or split of the Hub.
    """
    if dataset.hub_id is not None:
        return _hub_files(dataset.hub_id, dataset.subset, dataset.split or _TRAIN)
    path = dataset.path
    if not path.is_dir():
        return [DataFile(path)]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ConfigError(f"{path} has no data files: a folder needs files that end in {', '.join(SUFFIXES)}")
    return [DataFile(file) for file in files]


def digest_of(path: Path) -> str:
    """Returns the digest of a file's content. Raises ConfigError if it cannot be read."""
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rows_of(path: Path, start: int = 0) -> Iterator[RawRow]:
    """Yields the rows of a file from an index on, read by its suffix as they are asked for.

    Raises ConfigError if the file cannot be read.
    """
    if path.suffix == PARQUET:
        check_extra("parquet", str(path))
        return _parquet_rows(path, start)
    return itertools.islice((_csv_rows if path.suffix == CSV else _json_rows)(path), start, None)


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _json_rows(path: Path) -> Iterator[RawRow]:
    def read(line: bytes) -> Mapping[str, Any]:
        row = parse_row(0, line, None)
        if row.error is not None:
            raise row.error
        return row.value

    for number, line in lines_of(path):
        yield f"{path}, line {number}", functools.partial(read, line)


def _csv_rows(path: Path) -> Iterator[RawRow]:
    """Reads the rows below a line of names. Empty cells are columns that a row does not have."""

    def read(row: Mapping[str | None, Any]) -> Mapping[str, Any]:
        if None in row or None in row.values():
            raise RequestError(f"has another number of cells than the {len(reader.fieldnames or ())} names")
        return {name: cell for name, cell in row.items() if name is not None and cell}

    csv.field_size_limit(1 << 30)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for number, row in enumerate(reader, start=1):
                yield f"{path}, row {number}", functools.partial(read, row)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not CSV in UTF-8: {error}") from None


def _parquet_rows(path: Path, start: int) -> Iterator[RawRow]:
    """Reads the rows. Fields without a value are left out at any depth: all objects of a column have the same ones."""
    import pyarrow
    import pyarrow.parquet

    def read(batch: pyarrow.RecordBatch, index: int) -> Mapping[str, Any]:
        return _without_nulls(batch.slice(index, 1).to_pylist()[0])

    end = 0
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:  # else a group is read at once
            for group in range(file.num_row_groups):
                number, end = end, end + file.metadata.row_group(group).num_rows
                if end <= start:
                    continue
                for batch in file.iter_batches(batch_size=256, row_groups=[group]):
                    for index in range(len(batch)):
                        number += 1
                        if number > start:
                            yield f"{path}, row {number}", functools.partial(read, batch, index)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not parquet that can be read: {str(error).splitlines()[0]}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_README, _TRAIN = "README.md", "train"
_SHARD = re.compile(r"(?:^|/)(\w+)-\d{5}-of-\d{5}(?:-\w+)?\.\w+$")
_WORD = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(test)(?:ing)?|(validation)|(valid|val|dev))(?![a-z])")


def _hub_files(name: str, subset: str | None, split: str) -> list[DataFile]:
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"data set {name} is listed on the Hub: unset HF_HUB_OFFLINE, or give dataset_path")
    with _download_errors(name):
        info = HfApi(library_name="jaxis").dataset_info(name)
        names, hub = [each.rfilename for each in info.siblings or ()], (name, str(info.sha))
        card = DataFile(Path(_README), hub).fetch().read_text("utf-8") if _README in names else ""
        return [DataFile(Path(each), hub) for each in choose_files(name, names, card, subset, split)]


@contextmanager
def _download_errors(name: str) -> Iterator[None]:
    """A context that raises any error of the Hub's client as a ConfigError of one line."""
    from huggingface_hub import constants

    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # errors of its HTTP client and transfer library share no base class
        reason = explain_error(error, name, constants.DEFAULT_REVISION, offline=False)
        raise ConfigError(f"data set {name}: {reason}") from error


def choose_files(name: str, names: Sequence[str], card: str, subset: str | None, split: str) -> list[str]:
    """Returns the names of a split's files, of all in a repository with a README `card`."""
    head = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    try:
        values = yaml.safe_load(head[1]) if head else None
        configs = {each["config_name"]: each for each in (values or {}).get("configs") or () if each.get("data_files")}
    except (yaml.YAMLError, AttributeError, TypeError, KeyError):
        raise ConfigError(f"data set {name}: the configs of its {_README} cannot be read: give dataset_path") from None
    if configs:
        splits = _of_config(_config(name, configs, subset), names)
    elif subset not in (None, "default"):
        raise ConfigError(f"data set {name} has no subset {subset!r}: it has none; leave data.datasets.subset out")
    else:
        splits = _by_name(names)
    files = splits.get(split)
    if not files:
        known = ", ".join(key for key, of_split in splits.items() if of_split) or "none in " + ", ".join(SUFFIXES)
        raise ConfigError(f"data set {name} has no split {split!r}; it has {known}")
    if other := next((file for file in files if not file.endswith(SUFFIXES)), None):
        raise ConfigError(f"data set {name}: {other} must be one of {', '.join(SUFFIXES)}: convert it first")
    return files


def _config(name: str, configs: Mapping[str, Any], subset: str | None) -> Mapping[str, Any]:
    default = [key for key, each in configs.items() if each.get("default") or key == "default" or len(configs) == 1]
    wanted = subset if subset is not None else default[0] if default else None
    if wanted is None or wanted not in configs:
        fault = "needs data.datasets.subset" if wanted is None else f"has no subset {wanted!r}"
        raise ConfigError(f"data set {name} {fault}; it has {', '.join(configs)}")
    return configs[wanted]


def _of_config(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[str]]:
    given, folder = config["data_files"], config.get("data_dir")
    splits: dict[str, list[str]] = {}
    for each in given if isinstance(given, list) else [given]:
        split, paths = (each["split"], each["path"]) if isinstance(each, Mapping) else (_TRAIN, each)
        for pattern in paths if isinstance(paths, list) else [paths]:
            pattern = f"{folder}/{pattern}" if folder else pattern
            splits.setdefault(split, []).extend(sorted(fnmatch.filter(names, pattern)))
    return splits


def _by_name(names: Sequence[str]) -> dict[str, list[str]]:
    """Returns the files whose names have a split's; if none has one, all are of train."""
    splits: dict[str, list[str]] = {}
    data = sorted(name for name in names if name.endswith(SUFFIXES))
    for name in data:
        if found := _SHARD.search(name):
            splits.setdefault(found[1], []).append(name)
        elif found := _WORD.search(name.lower()):
            splits.setdefault(next(word for word in (*found.groups()[:3], "validation") if word), []).append(name)
    return splits or {_TRAIN: data}

"""Files of data rows: JSONL, CSV and parquet, alone, as a folder, or as a data set of the Hub."""

from __future__ import annotations

import csv
import fnmatch
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from jaxis.errors import ConfigError, RequestError
from jaxis.host.extras import check_extra
from jaxis.jsonl.source import JSONLSource
from jaxis.loading.hub import explain_error

CSV, PARQUET = ".csv", ".parquet"
SUFFIXES = (".jsonl", CSV, PARQUET)
# A row's place in its file, and its columns or the reason why it has none.
RawRow: TypeAlias = tuple[str, Mapping[str, Any] | RequestError]


def files_of(path: Path) -> list[Path]:
    """Returns a file, or the data files of a folder by name. Raises ConfigError if a folder has none."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ConfigError(f"{path} has no data files: a folder needs files that end in {', '.join(SUFFIXES)}")
    return files


def read_file(path: Path) -> tuple[Iterator[RawRow], str]:
    """Returns the rows of a file, read by its suffix as they are asked for, and the digest of its content.

    Raises ConfigError, now or when a row is asked for, if the file cannot be read.
    """
    if path.suffix not in (CSV, PARQUET):
        source = JSONLSource(path, None)
        return _json_rows(source), source.digest
    if path.suffix == PARQUET:
        check_extra("parquet", str(path))
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return (_csv_rows if path.suffix == CSV else _parquet_rows)(path), digest


def _json_rows(source: JSONLSource) -> Iterator[RawRow]:
    for row in source.rows(lambda _: True):
        fault = None if row.error is None else RequestError(str(row.error).removeprefix(f"line {row.line}: "))
        yield f"{source.path}, line {row.line}", row.value if fault is None else fault


def _csv_rows(path: Path) -> Iterator[RawRow]:
    """Reads the rows below a line of names. Empty cells are columns that a row does not have."""
    csv.field_size_limit(1 << 30)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for number, row in enumerate(reader, start=1):
                where = f"{path}, row {number}"
                if None in row or None in row.values():
                    yield (
                        where,
                        RequestError(f"has another number of cells than the {len(reader.fieldnames or ())} names"),
                    )
                else:
                    yield where, {name: cell for name, cell in row.items() if cell}
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not CSV in UTF-8: {error}") from None


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    """Reads the rows. Fields without a value are left out at any depth: all objects of a column have the same ones."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", _without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is not parquet that can be read: {str(error).splitlines()[0]}") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_README, _TRAIN = "README.md", "train"
_SHARD = re.compile(r"(?:^|/)(\w+)-\d{5}-of-\d{5}(?:-\w+)?\.\w+$")
_WORD = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(test)(?:ing)?|(validation)|(valid|val|dev))(?![a-z])")


def hub_files(name: str, subset: str | None, split: str) -> list[Path]:
    """Downloads the files of a split that the cache does not have, and returns all of them.

    Raises ConfigError, of one line, if there is no such data set, subset or split, or the download fails.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"data set {name} is listed on the Hub: unset HF_HUB_OFFLINE, or give dataset_path")
    try:
        info = HfApi(library_name="jaxis").dataset_info(name)
        names, commit = [each.rfilename for each in info.siblings or ()], info.sha
        card = ""
        if _README in names:
            card = Path(hf_hub_download(name, _README, repo_type="dataset", revision=commit)).read_text("utf-8")
        chosen = choose_files(name, names, card, subset, split)
        folder = Path(snapshot_download(name, repo_type="dataset", revision=commit, allow_patterns=chosen))
    except ConfigError:
        raise
    except Exception as error:  # errors of its HTTP client and transfer library share no base class
        reason = explain_error(error, name, constants.DEFAULT_REVISION, offline=False)
        raise ConfigError(f"data set {name}: {reason}") from error
    return [folder / each for each in chosen]


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

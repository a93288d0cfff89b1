"""The GGUF files of a model by their names: one file or the shards `NAME-00001-of-00003.gguf`, and its vision part.

The room loading/gguf reads them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from jaxis.errors import CheckpointError

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# Files of a model's repository that are not the model: its vision part, and statistics for quantizing.
_OTHER_FILE = re.compile(r"(?:.*[-_.])?(?:mmproj|imatrix)(?:[-_.].*)?\.gguf", re.IGNORECASE)
_TYPE = re.compile(r"[-_.](?:bf16|f16|f32|i?q\d\w*)(?=[-_.]|$)", re.IGNORECASE)
_BY_TYPE = ("bf16", "f16", "q8_0", "f32")  # in this order, where a model has its file in several types


def is_model_file(name: str) -> bool:
    """Returns whether a file with this name can be a model or a shard of one."""
    return name.endswith(".gguf") and not _OTHER_FILE.fullmatch(name)


def model_name(name: str) -> str:
    """Returns the name that a model's shards share: the file's, without `.gguf` and the shard's number."""
    match = _SHARD.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")


def gguf_file(path: str | os.PathLike[str]) -> Path | None:
    """Returns the GGUF file that a path means: itself, or the first shard of the only model in a folder.

    None for a folder with safetensors or another kind of checkpoint. Raises CheckpointError if the folder has several
    models.
    """
    path = Path(path)
    if not path.is_dir():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").exists() or any(path.glob("*.safetensors")):
        return None
    files = sorted(file for file in path.glob("*.gguf") if is_model_file(file.name))
    models = {model_name(file.name): file for file in reversed(files)}
    if len(models) > 1:
        names = ", ".join(sorted(file.name for file in models.values()))
        raise CheckpointError(f"{path} has {len(models)} models: give the path of one of its files ({names})")
    return next(iter(models.values()), None)


def find_shards(path: Path) -> list[Path]:
    """Returns all files of a model, the first shard first. Raises CheckpointError if one is missing."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(f"{path} has a number that its shards cannot have: download it again")
    shards = [path.with_name(f"{match['stem']}-{number:05}-of-{match['count']}.gguf") for number in range(1, count + 1)]
    if missing := [shard.name for shard in shards if not shard.exists()]:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the {count} files of {match['stem']} "
            f"({missing[0]}{', ...' if len(missing) > 1 else ''}): download them too"
        )
    return shards


def is_mmproj(name: str) -> bool:
    """Returns whether a file with this name can be the vision part of a model."""
    return name.lower().endswith(".gguf") and "mmproj" in name.lower()


def choose_mmproj(names: Sequence[str]) -> str | None:
    """Returns the file of a model's vision part among these names; there may be several types of it.

    Returns None if there is none, or if they are of several models.
    """
    found = sorted(filter(is_mmproj, names))
    if len({_TYPE.sub("", name.removesuffix(".gguf")).lower() for name in found}) != 1:
        return None

    def place(name: str) -> int:
        return next((i for i, each in enumerate(_BY_TYPE) if re.search(rf"[-_.]{each}\b", name.lower())), len(_BY_TYPE))

    return min(found, key=place)


def mmproj_beside(model: Path) -> Path | None:
    """Returns the vision part beside a model's GGUF file; None if there is none, or the choice is not clear."""
    chosen = choose_mmproj([path.name for path in model.parent.glob("*.gguf")])
    return None if chosen is None else model.parent / chosen

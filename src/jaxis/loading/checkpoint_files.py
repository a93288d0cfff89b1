"""Plans and writes a checkpoint folder's files: the shards of the weights, their index, and all other files."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxis.errors import CheckpointError
from jaxis.loading.safetensors_writer import TensorHeader

MAX_SHARD_BYTES = 5 * 10**9
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.msgpack")


def check_destination(destination: Path, kind: str = "path") -> None:
    """Raises CheckpointError if a new path cannot be written: it exists, or its folder does not.

    `kind` is the name of the new file or folder in the error.
    """
    if destination.exists():
        raise CheckpointError(f"{destination} already exists: give a {kind} that does not exist, or remove it")
    if not destination.absolute().parent.is_dir():
        raise CheckpointError(f"{destination.absolute().parent} is not a folder: make it first")


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yields a hidden folder beside the destination, which becomes it when the block ends; after an error it goes.

    Raises CheckpointError if something cannot be written.
    """
    parent = destination.absolute().parent
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=parent))
    except OSError as error:
        raise CheckpointError(f"{parent} cannot be written: {error.strerror}") from error
    try:
        yield partial
        partial.chmod(0o755)
        partial.rename(destination)
    except OSError as error:
        raise CheckpointError(f"{destination} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True)
class Shard:
    name: str
    specs: dict[str, TensorHeader]


def plan_shards(groups: Iterable[Mapping[str, TensorHeader]], max_shard_bytes: int) -> list[Shard]:
    """Assigns groups of tensors, which stay together and in this order, to files.

    A file has at most `max_shard_bytes`, unless one group alone is larger.
    """
    parts: list[dict[str, TensorHeader]] = [{}]
    shard_bytes = 0
    for specs in groups:
        nbytes = sum(spec.nbytes for spec in specs.values())
        if parts[-1] and shard_bytes + nbytes > max_shard_bytes:
            parts.append({})
            shard_bytes = 0
        parts[-1] |= specs
        shard_bytes += nbytes
    if len(parts) == 1:
        return [Shard("model.safetensors", parts[0])]
    return [Shard(f"model-{i:05}-of-{len(parts):05}.safetensors", part) for i, part in enumerate(parts, 1)]


def write_index(folder: Path, shards: list[Shard]) -> None:
    """Writes `model.safetensors.index.json` if there is more than one shard."""
    if len(shards) == 1:
        return
    weight_map = {name: shard.name for shard in shards for name in shard.specs}
    total = sum(spec.nbytes for shard in shards for spec in shard.specs.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_other_files(source: Path, destination: Path) -> None:
    """Copies the tokenizer, the chat templates, the model card: everything but the weights and their index."""
    for path in source.iterdir():
        is_own = path.name.startswith(".") or path.name in ("config.json", "orbax_layout.json")
        if is_own or any(path.match(pattern) for pattern in _WEIGHTS):
            continue
        if path.is_file():
            shutil.copyfile(path, destination / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, destination / path.name, copy_function=shutil.copyfile, dirs_exist_ok=True)

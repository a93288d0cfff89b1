"""A short name for everything that an engine's answers depend on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxis.engine.argument_fields import argument_infos
from jaxis.engine.arguments import EngineArgs
from jaxis.host.machine import cpu_flags, usable_cores
from jaxis.kernels import native
from jaxis.loading.gguf.mmproj import mmproj_beside
from jaxis.loading.gguf.shards import find_shards
from jaxis.version import __version__

# Files that are no larger are read whole. Of others: the beginning, which holds the header, and samples of the rest.
WHOLE_FILE_BYTES = 1 << 20
_HEADER_BYTES = 1 << 20
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
# How a block's bytes are arranged depends on these. How many devices share its heads does not: see `StoredBlockLayout`.
_ARRANGE_BLOCKS = frozenset({"pipeline_parallel_size", "decode_context_parallel_size"})
_IGNORED_SUFFIXES = frozenset({".md", ".png", ".jpg", ".gitattributes"})


def engine_fingerprint(checkpoint: Path, arguments: EngineArgs, max_model_len: int) -> str:
    """A digest of weights, version, kernels and arguments, such as "fp_0123456789abcdef0123".

    Engines with equal fingerprints answer a request that is greedy, or has a seed, with the same bytes. Two checkpoints
    that differ in less than what is sampled of large files could have the same one; trained weights differ everywhere.

    Args:
      checkpoint: A folder, or a GGUF file.
      arguments: The engine's.
      max_model_len: Most tokens of a request, as it has turned out.
    """
    digest = hashlib.sha256()
    facts = [__version__, max_model_len, _arguments(arguments), _kernels(arguments)]
    digest.update(json.dumps(facts, sort_keys=True, default=repr).encode())
    _add_files(digest, checkpoint)
    return f"fp_{digest.hexdigest()[:20]}"


def blocks_fingerprint(checkpoint: Path, arguments: EngineArgs, max_model_len: int) -> str:
    """A digest of what the keys and values of a prompt depend on, for engines of different sizes to compare.

    Unlike `engine_fingerprint`, it leaves out how many sequences, tokens and blocks an engine has room for, how many
    devices share its heads, experts and requests, which all show in the last bits without native kernels, and the
    number of processors where those do not compute. An engine with native kernels has one device, and no engine
    without them has its digest: what they promise holds for what it gets from others, too.

    Args:
      checkpoint: A folder, or a GGUF file.
      arguments: The engine's.
      max_model_len: The context that the model was built for.
    """
    digest = hashlib.sha256()
    infos = argument_infos()
    named = {name for name, info in infos.items() if not info.speed_only or name in _ARRANGE_BLOCKS}
    values = _values(arguments, named - {"max_model_len", "chat_template", "revision"})
    kernels = _kernels(arguments)
    if not _uses_native_kernels(arguments):
        kernels = [jax.__version__, version("jaxlib"), jax.local_devices()[0].device_kind]
    digest.update(json.dumps([__version__, max_model_len, values, kernels], sort_keys=True, default=repr).encode())
    _add_files(digest, checkpoint)
    return digest.hexdigest()


def checkpoint_digest(checkpoint: Path) -> str:
    """A digest of a checkpoint's files, as above; the folder's own name does not count."""
    digest = hashlib.sha256()
    _add_files(digest, checkpoint)
    return digest.hexdigest()[:20]


def arguments_digest(arguments: EngineArgs) -> str:
    """A digest of the arguments that matter for what is computed, and of the files that they name."""
    return hashlib.sha256(json.dumps(_arguments(arguments), sort_keys=True, default=repr).encode()).hexdigest()[:20]


def _add_files(digest: hashlib._Hash, checkpoint: Path) -> None:
    for name, path in _files(checkpoint):
        digest.update(json.dumps([name, path.stat().st_size]).encode())
        for piece in _pieces(path):
            digest.update(piece)


def _arguments(arguments: EngineArgs) -> dict[str, Any]:
    """The arguments that matter; files stand for their contents."""
    # Otherwise how many tokens share a step, and which device sums what, can show in the last bits.
    is_native = _uses_native_kernels(arguments)
    return _values(arguments, {name for name, info in argument_infos().items() if not (info.speed_only and is_native)})


def _values(arguments: EngineArgs, names: set[str]) -> dict[str, Any]:
    """Those of the named arguments that matter; files stand for their contents."""
    # Those of a place, and what the answers to greedy and seeded requests do not depend on.
    left_out = {
        "model",
        "token",
        "cache_dir",
        "fit_memory",
        "master_addr",
        "master_port",
        "distributed_timeout_seconds",
        "kv_offloading_size",
        "kv_offloading_backend",
        "kv_offloading_dir",
        "kv_offloading_disk_size",
        "kv_transfer_config",
        "kv_events_config",
        "enable_lora",
        "lora_modules",
        "lora_root",
    }
    if arguments.load_format != "dummy":
        left_out.add("seed")
    values = {field.name: getattr(arguments, field.name) for field in fields(arguments) if field.name in names}
    return {name: _content(value) for name, value in values.items() if name not in left_out}


def _content(value: Any) -> Any:
    """What a file or a folder holds; other values as they are."""
    if not isinstance(value, str | os.PathLike):
        return value
    if os.path.isfile(value):
        path = Path(value)
        return checkpoint_digest(path) if path.suffix == ".gguf" else path.read_text("utf-8")
    return checkpoint_digest(Path(value)) if os.path.isdir(value) else value


def _uses_native_kernels(arguments: EngineArgs) -> bool:
    """Whether the engine computes with native kernels, which give the same bits in any batch: on one CPU device."""
    return native.usable() and arguments.num_devices == 1


def _kernels(arguments: EngineArgs) -> list[Any]:
    # The devices of the engine's mesh, as `make_mesh` takes them.
    local = jax.local_devices()[: arguments.num_devices]
    devices = sorted({(device.platform, device.device_kind) for device in local})
    kernels: list[Any] = [jax.__version__, version("jaxlib"), devices]
    # XLA compiles for the processor that it finds.
    kernels += [platform.machine(), cpu_flags(), os.environ.get("XLA_FLAGS", "")]
    library = native.library()
    if library is not None and _uses_native_kernels(arguments):
        return [*kernels, native.isa(), hashlib.sha256(Path(library._name).read_bytes()).hexdigest()]
    return [*kernels, usable_cores()]


def _files(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """The checkpoint's files by their names in it, in a fixed order."""
    if checkpoint.is_file():
        beside = mmproj_beside(checkpoint)
        yield from ((path.name, path) for path in (*find_shards(checkpoint), *([beside] if beside else [])))
        return
    for path in sorted(checkpoint.rglob("*")):
        name = path.relative_to(checkpoint).as_posix()
        hidden = any(part.startswith(".") for part in name.split("/"))
        if path.is_file() and not hidden and path.suffix not in _IGNORED_SUFFIXES:
            yield name, path


def _pieces(path: Path) -> Iterator[bytes]:
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        if num_bytes <= WHOLE_FILE_BYTES:
            yield file.read()
            return
        yield file.read(_HEADER_BYTES)
        for i in range(1, _NUM_SAMPLES + 1):
            file.seek((num_bytes - _SAMPLE_BYTES) * i // _NUM_SAMPLES)
            yield file.read(_SAMPLE_BYTES)

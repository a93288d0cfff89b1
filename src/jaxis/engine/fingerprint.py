"""Fingerprints: digests of everything that an engine's answers, or its blocks, depend on."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxis.config.hf_config import HFConfig
from jaxis.engine.argument_groups.fields import argument_infos
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution.trace_inputs import sources
from jaxis.host.cores import usable_cores
from jaxis.host.machine import cpu_flags
from jaxis.kernels import native
from jaxis.loading.gguf_files import find_shards, mmproj_beside
from jaxis.version import __version__

# Largest files that are read whole. Of larger ones, the beginning, which holds the header, and samples are read.
WHOLE_FILE_BYTES = 1 << 20
_HEADER_BYTES = 1 << 20
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096
# Arguments that determine the layout of a block's bytes. The number of devices that share its heads does not affect it:
# see `StoredBlockLayout`.
_ARRANGE_BLOCKS = frozenset({"pipeline_parallel_size", "decode_context_parallel_size"})
_IGNORED_SUFFIXES = frozenset({".md", ".png", ".jpg", ".gitattributes"})


def engine_fingerprint(checkpoint: Path, arguments: EngineArgs, max_model_len: int) -> str:
    """Returns a digest of weights, version, kernels and arguments, such as "fp_0123456789abcdef0123".

    Engines with equal fingerprints answer a request that is greedy, or has a seed, with the same bytes. Large files are
    only sampled: two checkpoints that differ elsewhere could have the same fingerprint, but trained weights differ
    everywhere.

    Args:
      checkpoint: A folder, or a GGUF file.
      arguments: Arguments of the engine.
      max_model_len: Most tokens of a request in the running engine.
    """
    digest = hashlib.sha256()
    facts = [__version__, max_model_len, _arguments(arguments), _kernels(arguments)]
    digest.update(json.dumps(facts, sort_keys=True, default=repr).encode())
    _add_files(digest, checkpoint)
    return f"fp_{digest.hexdigest()[:20]}"


def blocks_fingerprint(checkpoint: Path, arguments: EngineArgs, max_model_len: int) -> str:
    """Returns a digest of all that the keys and values of a prompt depend on. Engines of different sizes compare it.

    Unlike `engine_fingerprint`, it leaves out three facts. They only show in the last bits, and only without native
    kernels: the numbers of sequences, tokens and blocks of the engine; the numbers of devices that share its weights
    and requests; and the number of processors if native kernels do not compute. An engine with native kernels
    has one device, and no engine without them has its digest. So its promise of equal bits includes blocks that it gets
    from others.

    Args:
      checkpoint: A folder, or a GGUF file.
      arguments: Arguments of the engine.
      max_model_len: Context that the model was built for.
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
    """Returns a digest of a checkpoint's files, sampling large ones; the folder's own name does not count."""
    digest = hashlib.sha256()
    _add_files(digest, checkpoint)
    return digest.hexdigest()[:20]


def packing_digest(checkpoint: Path, hf_config: HFConfig, arguments: EngineArgs) -> str | None:
    """Returns a digest of all that weights depend on, as the native kernels read them; None if code is just changing.

    Files, which are not read, count by their size, inode and times.
    """
    if (code := sources()) is None:
        return None
    speculative, adapter = arguments.parsed_speculative_config, arguments.adapter
    files = [*_files(checkpoint), *(() if adapter is None else _files(Path(adapter)))]
    states = [(name, path.stat()) for name, path in files]
    facts = [
        [code, hf_config.to_dict(), arguments.dtype, repr(arguments.requested_quantization)],
        speculative is not None and speculative.method == "mtp",
        [(name, s.st_size, s.st_dev, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in states],
    ]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def arguments_digest(arguments: EngineArgs) -> str:
    """Returns a digest of the arguments that affect results, and of the files that they name."""
    return hashlib.sha256(json.dumps(_arguments(arguments), sort_keys=True, default=repr).encode()).hexdigest()[:20]


def _add_files(digest: hashlib._Hash, checkpoint: Path) -> None:
    for name, path in _files(checkpoint):
        digest.update(json.dumps([name, path.stat().st_size]).encode())
        for piece in _pieces(path):
            digest.update(piece)


def _arguments(arguments: EngineArgs) -> dict[str, Any]:
    # Without native kernels, the tokens that share a step, and the devices that share a sum, affect the last bits.
    is_native = _uses_native_kernels(arguments)
    return _values(arguments, {name for name, info in argument_infos().items() if not (info.speed_only and is_native)})


def _values(arguments: EngineArgs, names: set[str]) -> dict[str, Any]:
    """Returns those of the named arguments that affect answers; files stand for their contents."""
    left_out = {name for name, info in argument_infos().items() if not info.in_fingerprint}
    if arguments.load_format != "dummy":
        left_out.add("seed")
    values = {name: getattr(arguments, name) for name in argument_infos() if name in names - left_out}
    return {name: _content(value) for name, value in values.items()}


def _content(value: Any) -> Any:
    """Replaces a file or a folder by its contents."""
    if not isinstance(value, str | os.PathLike):
        return value
    if os.path.isfile(value):
        path = Path(value)
        return checkpoint_digest(path) if path.suffix == ".gguf" else path.read_text("utf-8")
    return checkpoint_digest(Path(value)) if os.path.isdir(value) else value


def _uses_native_kernels(arguments: EngineArgs) -> bool:
    """Returns whether the engine uses native kernels, which give the same bits in any batch: on one CPU device."""
    return native.usable() and arguments.num_devices == 1


def _kernels(arguments: EngineArgs) -> list[Any]:
    # The devices that `make_mesh` takes for the engine's mesh.
    local = jax.local_devices()[: arguments.num_devices]
    devices = sorted({(device.platform, device.device_kind) for device in local})
    kernels: list[Any] = [jax.__version__, version("jaxlib"), devices]
    # XLA compiles for the processor of the host.
    kernels += [platform.machine(), cpu_flags(), os.environ.get("XLA_FLAGS", "")]
    library = native.library()
    if library is not None and _uses_native_kernels(arguments):
        return [*kernels, native.isa(), hashlib.sha256(Path(library._name).read_bytes()).hexdigest()]
    return [*kernels, usable_cores()]


def _files(checkpoint: Path) -> Iterator[tuple[str, Path]]:
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

"""Compiled programs on disk.

JAX's cache knows a program by its traced form, so tracing and lowering come before each look into it, and take most of
the time to the first token. Here, a program is known by all that its trace reads (`trace_inputs.py`).

These are programs of native kernels, which compile fast. After a change of code they are compiled again, where JAX's
cache may still have those of other kernels.

A file has the program as bytes, the digest of them in front. It appears when complete; one that is damaged is compiled
again; the folder is bounded, and loses first what was not used for longest.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.monitoring
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxis.engine.execution.program_context import ProgramContext
from jaxis.engine.execution.program_key import Compiled, ProgramKey, lower
from jaxis.engine.execution.trace_inputs import ModelInputs, UnknownInputError, digest, held_by_modules, sources
from jaxis.host.cache_folder import cache_folder
from jaxis.kernels import native

logger = logging.getLogger(__name__)

FOLDER = "traced"
MAX_BYTES = 256 << 20
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
LOADED_EVENT = "/jax/compilation_cache/cache_hits"
_ENABLED = "jax_enable_compilation_cache"
_TARGET = re.compile(r"custom_call @([\w.$]+)")


class _OutsideCache:
    """Blocks that do not use JAX's cache: a program that came from there is incomplete when it is written again.

    Attributes:
      count: Threads inside such a block.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    @contextmanager
    def block(self) -> Iterator[None]:
        self._change(1)
        try:
            yield
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        with self._lock:
            self.count += by
            jax.config.update(_ENABLED, self.count == 0)
            reset_cache()  # JAX looks at the setting once


_outside = _OutsideCache()


def default_cache_dir() -> Path:
    """Returns the folder of compiled programs unless JAX_COMPILATION_CACHE_DIR says otherwise."""
    return cache_folder() / "programs"


def enable_disk_cache() -> None:
    """Keeps compiled programs on disk between runs, unless the user has configured JAX's own cache."""
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("compiled programs are not kept: %s cannot be made (%s)", folder, error.strerror)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Programs of a small model compile in a fifth of a second, and the cache still saves most of that.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def can_keep(mesh: jax.sharding.Mesh) -> bool:
    """Returns whether programs of a mesh, which call native kernels, are kept here: in this module's folder alone."""
    is_on = jax.config.values["jax_compilation_cache_dir"] == str(default_cache_dir())
    return is_on and (_outside.count > 0 or jax.config.values[_ENABLED]) and mesh.size == 1


def compiled(key: ProgramKey, context: ProgramContext, inputs: ModelInputs | None) -> Compiled:
    """Returns the program of a key, from disk if it is there; without `inputs`, it is traced and not kept."""
    if inputs is None:
        return lower(key, context).compile()
    try:
        path = default_cache_dir() / FOLDER / digest(inputs, key, context)
    except UnknownInputError as error:
        logger.debug("%s is not kept: %s", key, error)
        return lower(key, context).compile()
    if (program := _read(path, inputs)) is not None:
        return program
    lowered = lower(key, context)
    kernels = {native.kernel_name(target) for target in _TARGET.findall(lowered.as_text())}
    held = _unchanged(inputs)
    if path.exists() or None in kernels or held is None:
        return lowered.compile()  # perhaps from JAX's cache
    with _outside.block():
        program = lowered.compile()
    _write(path, program, sorted(filter(None, kernels)), held)
    return program


def _unchanged(inputs: ModelInputs) -> dict[str, str] | None:
    """Returns what modules hold; None if files or modules have changed since the inputs were read."""
    try:
        held = held_by_modules()
    except UnknownInputError:
        return None
    return held if sources() is not None and inputs.agree_with(held) else None


def _read(path: Path, inputs: ModelInputs) -> jax.stages.Compiled | None:
    start = time.perf_counter()
    try:
        stored = path.read_bytes()
        if hashlib.sha256(stored[32:]).digest() != stored[:32]:
            path.unlink()
            return None
        kernels, held, payload, in_tree, out_tree = pickle.loads(stored[32:])
        if not inputs.agree_with(held):
            return None
        for kernel in kernels:
            native.register(kernel)
        program = deserialize_and_load(payload, in_tree, out_tree)
        os.utime(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever is wrong with a file, its program can be compiled
        logger.debug("%s is not used: %s", path, error)
        return None
    # Recorded as JAX records programs from its own cache.
    jax.monitoring.record_event(LOADED_EVENT)
    jax.monitoring.record_event_duration_secs(COMPILE_EVENT, time.perf_counter() - start)
    return program


def _write(path: Path, program: jax.stages.Compiled, kernels: list[str], held: dict[str, str]) -> None:
    try:
        content = pickle.dumps((kernels, held, *serialize(program)))
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(file.name, path)
        _trim(path.parent)
    except (OSError, ValueError, NotImplementedError) as error:
        logger.debug("a program is not kept: %s", error)


def _trim(folder: Path) -> None:
    """Removes the files that were not used for longest, those that a killed process left among them."""
    files = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in os.scandir(folder))
    excess = sum(size for _, size, _ in files) - MAX_BYTES
    for _, size, path in files:
        if excess <= 0:
            return
        os.unlink(path)
        excess -= size

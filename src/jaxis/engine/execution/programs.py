"""The compiled programs of a model: one for each step shape, compiled once, in parallel, and cached on disk.

Tracing holds the GIL but compiling does not, so programs that are needed soon compile in parallel.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax

logger = logging.getLogger(__name__)

CACHE_FOLDER = "jaxis/programs"
# Programs that compile faster than this are not worth a file on disk.
MIN_COMPILE_SECONDS = 0.2

Program = Callable[..., Any]


def default_cache_dir() -> Path:
    """Where compiled programs are kept unless JAX_COMPILATION_CACHE_DIR says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / CACHE_FOLDER


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
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompileWait(NamedTuple):
    """When a step waited for a program to compile, as `time.monotonic` seconds.

    Attributes:
      started: When it began to wait.
      ended: When it continued; None while it waits.
    """

    started: float
    ended: float | None = None


class ProgramCache:
    """Compiled programs by key.

    Attributes:
      last_wait: The last wait for a program, if there was one. Other threads may read it at any time.

    Args:
      build: `build(key)` traces and compiles the program of a key. Runs on a worker thread.
      on_wait: `on_wait(key)` is a context manager entered while a step waits for its program to compile.
    """

    def __init__(
        self, build: Callable[[Hashable], Program], on_wait: Callable[[Hashable], AbstractContextManager[None]]
    ) -> None:
        self._build = build
        self._on_wait = on_wait
        self._programs: dict[Hashable, Future[Program]] = {}
        self._lock = threading.Lock()
        self.last_wait: CompileWait | None = None
        self._executor = ThreadPoolExecutor(max_workers=2, thread_name_prefix="jaxis-compile")

    def precompile(self, key: Hashable) -> Future[Program]:
        """Starts compiling the program of a key, unless that was already started."""
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._executor.submit(self._timed_build, key)
            return self._programs[key]

    def has(self, key: Hashable) -> bool:
        """Whether the program of a key was compiled, or failed to be."""
        future = self._programs.get(key)
        return future is not None and future.done()

    def get(self, key: Hashable) -> Program:
        """The program of a key; waits until it is compiled."""
        future = self.precompile(key)
        if not future.done():
            self.last_wait = wait = CompileWait(time.monotonic())
            with self._on_wait(key):
                future.exception()
            self.last_wait = wait._replace(ended=time.monotonic())
        try:
            return future.result()
        except Exception:
            with self._lock:
                self._programs.pop(key, None)
            raise

    def close(self) -> None:
        """Drops the programs, after waiting for those that are compiling."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._programs.clear()

    def _timed_build(self, key: Hashable) -> Program:
        start = time.perf_counter()
        program = self._build(key)
        logger.debug("compiled %s in %.1f s", key, time.perf_counter() - start)
        return program

"""Blocks in files of a folder, which outlive the process and may be shared by several.

A file consists of a header that names the block, the block's bytes, and a checksum of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import queue
import shutil
import stat
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxis.engine.kv_connector import TierStats
from jaxis.engine.kv_store.host_tier import BlockKey
from jaxis.errors import ConfigError
from jaxis.host.byte_size import human_bytes

# Largest size of the blocks that wait to be written; beyond it, new ones are not written.
MAX_QUEUED_BYTES = 1 << 30
CLOSE_SECONDS = 5.0
# Shortest time between two updates of a file's time of use.
TOUCH_SECONDS = 600.0
# Share of the budget to which a removal of old files shrinks the folder.
ROOM_SHARE = 0.9
# Share of the budget that is written between two scans of the folder.
SCAN_SHARE = 0.05
_SUFFIX = ".kv"
_logger = logging.getLogger(__name__)
_MAGIC = b"JAXISKV1"
_HEADER = struct.Struct("<8sI32sQ")  # magic, group, digest, bytes of the block
_CHECKSUM_BYTES = hashlib.sha256().digest_size
OVERHEAD_BYTES = _HEADER.size + _CHECKSUM_BYTES


class DiskTier:
    """One file per block, in a folder per namespace, which only this user can read.

    An error of the disk is never an error of a request: blocks that cannot be written or read are computed anew, and
    counted. The folder is the only index, so several processes may share it. Each keeps the files of all namespaces
    within its own budget by removing the least recently used ones.

    Args:
      folder: Folder of all namespaces.
      namespace: Folder name that stands for all that this engine's blocks depend on.
      max_bytes: Largest size of all files together.

    Raises:
      ConfigError: The folder cannot be made or written to.
    """

    def __init__(self, folder: Path, namespace: str, max_bytes: int) -> None:
        self._root, self._folder, self._max_bytes = folder, folder / namespace, max_bytes
        self._stats = TierStats()
        self._lock = threading.Lock()
        self._epoch = 0
        self._queued_bytes = 0
        self._unscanned_bytes = 0
        self._has_warned = False
        self._queue: queue.SimpleQueue[tuple[BlockKey, np.ndarray, int] | None] = queue.SimpleQueue()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_folder()
            aside = self._folder / f".{os.getpid()}.tmp"
            aside.touch(mode=0o600)
            aside.unlink()
            self._scan()
        except OSError as error:
            raise ConfigError(
                f"kv_offloading_dir={str(folder)!r} cannot be used ({error.strerror}): give a folder of your own"
            ) from None
        num_blocks = sum(1 for _ in self._folder.glob(f"*{_SUFFIX}"))
        _logger.info(
            "KV cache on disk: %s holds %s of at most %s, %d blocks of it of this model with these settings",
            folder,
            human_bytes(self._stats.used_bytes),
            human_bytes(max_bytes),
            num_blocks,
        )
        self._writer = threading.Thread(target=self._write_all, name="jaxis-kv-disk", daemon=True)
        self._writer.start()

    @property
    def stats(self) -> TierStats:
        """Counters since the start, as a copy."""
        with self._lock:
            return dataclasses.replace(self._stats)

    def has(self, key: BlockKey) -> bool:
        """Returns whether there is a file for a block; it may turn out to be damaged."""
        return os.path.exists(self._path(key))

    def read(self, key: BlockKey, num_bytes: int) -> np.ndarray | None:
        """Returns the block, uint8 [N], in memory of its own; None if it is not there or its file is damaged."""
        path = self._path(key)
        try:
            block = read_block(path, *key, num_bytes)
        except FileNotFoundError:
            with self._lock:
                self._stats.missed_blocks += 1
            return None
        except (OSError, DamagedFileError) as error:
            self._fail(error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with self._lock:
            self._stats.loaded_blocks += 1
            self._stats.loaded_bytes += num_bytes
        return block

    def write(self, key: BlockKey, block: np.ndarray) -> None:
        """Queues a block, uint8 [N], for the writing thread, unless the queue is full."""
        with self._lock:
            if self._queued_bytes + block.nbytes > MAX_QUEUED_BYTES:
                self._stats.failed_blocks += 1
                return
            self._queued_bytes += block.nbytes
            self._queue.put((key, block, self._epoch))

    def touch(self, keys: Iterable[BlockKey]) -> None:
        """Records that these blocks, as far as they are here, were used in this order."""
        now = time.time()
        for key in keys:
            path = self._path(key)
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > TOUCH_SECONDS:
                    os.utime(path)

    def remove(self, keys: Iterable[BlockKey]) -> None:
        """Removes blocks. Blocks that wait to be written are dropped, too."""
        with self._lock:
            self._epoch += 1
            for key in keys:
                with contextlib.suppress(OSError):
                    self._path(key).unlink()

    def clear(self) -> None:
        """Removes all blocks of the namespace. Blocks that wait to be written are dropped, too."""
        with self._lock:
            self._epoch += 1
            aside = self._folder.with_name(f".{self._folder.name}.{os.getpid()}.{self._epoch}.tmp")
            try:
                os.rename(self._folder, aside)
                self._make_folder()
            except OSError as error:
                _logger.warning("the blocks on disk could not be removed: %s", error)
                shutil.rmtree(self._folder, ignore_errors=True)
                return
        threading.Thread(target=shutil.rmtree, args=(aside, True), name="jaxis-kv-remove", daemon=True).start()

    def close(self) -> None:
        """Ends the writing thread once its queue is empty, or after `CLOSE_SECONDS`."""
        self._queue.put(None)
        self._writer.join(CLOSE_SECONDS)

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.chmod(self._folder, 0o700)  # raises an error if the folder is another user's

    def _path(self, key: BlockKey) -> Path:
        group, digest = key
        return self._folder / f"{group}-{digest.hex()}{_SUFFIX}"

    def _write_all(self) -> None:
        while (item := self._queue.get()) is not None:
            key, block, epoch = item
            try:
                self._write(key, block, epoch)
            except OSError as error:
                self._fail(error)
            with self._lock:
                self._queued_bytes -= block.nbytes
            del item, block

    def _write(self, key: BlockKey, block: np.ndarray, epoch: int) -> None:
        path, num_bytes = self._path(key), block.nbytes + OVERHEAD_BYTES
        if epoch != self._epoch or num_bytes > self._max_bytes or path.exists():
            return
        if self._unscanned_bytes > SCAN_SHARE * self._max_bytes:
            self._scan()
        if self._stats.used_bytes + num_bytes > self._max_bytes:
            self._scan(num_bytes)
        write_block(path, *key, block)
        with self._lock:
            if epoch != self._epoch:  # removed while it was written
                with contextlib.suppress(OSError):
                    path.unlink()
                return
            self._stats.saved_blocks += 1
            self._stats.saved_bytes += block.nbytes
            self._stats.used_bytes += num_bytes
        self._unscanned_bytes += num_bytes

    def _scan(self, num_bytes: int = 0) -> None:
        """Measures the size of all files. If `num_bytes` more do not fit, it removes the least recently used files."""
        files, used = [], 0
        for path in self._root.glob(f"*/*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
                used += status.st_size
        for path in self._root.glob("*/.*.tmp"):  # of processes that were killed
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > TOUCH_SECONDS:
                    path.unlink()
        self._unscanned_bytes = 0
        if used + num_bytes > self._max_bytes:
            for _, size, path in sorted(files):
                if used + num_bytes <= ROOM_SHARE * self._max_bytes:
                    break
                with contextlib.suppress(OSError):
                    path.unlink()
                used -= size
        with self._lock:
            self._stats.used_bytes = used

    def _fail(self, error: Exception) -> None:
        with self._lock:
            self._stats.failed_blocks += 1
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("KV blocks on disk cannot be read or written, and are computed anew: %s", error)


class DamagedFileError(Exception):
    """A file is incomplete, or is not the block that its name says."""


def write_block(path: Path, group: int, digest: bytes, block: np.ndarray) -> None:
    """Writes a block, uint8 [N], under a temporary name and renames it, so that nobody finds a part of a file.

    Raises:
      OSError: The file cannot be written.
    """
    header = _HEADER.pack(_MAGIC, group, digest, block.nbytes)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "xb", opener=_private) as file:
            file.write(header)
            file.write(block.data)
            file.write(_checksum(header, block))
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


def read_block(path: Path, group: int, digest: bytes, num_bytes: int) -> np.ndarray:
    """Reads a block, uint8 [num_bytes], into memory of its own.

    Raises:
      OSError: The file cannot be read; FileNotFoundError if it is not there.
      DamagedFileError: The file is not this block.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes + OVERHEAD_BYTES:
            raise DamagedFileError(f"{path.name} is not a block of {num_bytes} bytes")
        header, block = file.read(_HEADER.size), np.empty(num_bytes, np.uint8)
        if file.readinto(block.data) != num_bytes:
            raise DamagedFileError(f"{path.name} was cut off while it was read")
        checksum = file.read(_CHECKSUM_BYTES)
    if header != _HEADER.pack(_MAGIC, group, digest, num_bytes) or checksum != _checksum(header, block):
        raise DamagedFileError(f"{path.name} is damaged")
    return block


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _checksum(header: bytes, block: np.ndarray) -> bytes:
    checksum = hashlib.sha256(header)
    checksum.update(block.data)
    return checksum.digest()

"""Git LFS pointers: small text files that stand for large ones until `git lfs pull` fetches these."""

from __future__ import annotations

from pathlib import Path

from jaxis.errors import CheckpointError

_START = b"version https://git-lfs"


def check_not_lfs_pointer(path: Path, start: bytes | None = None) -> None:
    """Raises CheckpointError if a file is a Git LFS pointer; `start` has its first bytes, at least eight, if read."""
    if start is None:
        try:
            with path.open("rb") as file:
                start = file.read(len(_START))
        except OSError:  # the next reader of the file reports it
            return
    if len(start) >= 8 and _START.startswith(start[: len(_START)]):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull` in {path.parent}")

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from jaxis.errors import CheckpointError, ConfigError
from jaxis.lora.adapter import WEIGHTS_FILE
from jaxis.lora.peft_config import CONFIG_FILE

_MAX_NAME_CHARACTERS = 4096


def find_adapter(source: str | os.PathLike[str], root: Path | None, *, most_bytes: int) -> Path:
    """Returns the folder of an adapter as a path without links; with a root, `source` is relative to it.

    Args:
      source: The folder.
      root: Folder outside of which nothing is read, even through links or `..`; None: any folder.
      most_bytes: Limit of a file's size.

    Raises:
      ConfigError: The folder, or a file in it, is outside of the root.
      CheckpointError: The path is not a folder, or one of its files is not a file or is too large.
    """
    name = os.fspath(source)
    if not name or len(name) > _MAX_NAME_CHARACTERS or any(ord(character) < ord(" ") for character in name):
        raise CheckpointError("the path of an adapter is empty, too long or has a control character: give its folder")
    asked = Path(name).expanduser()
    if root is None:
        folder = asked
    else:
        root = Path(os.path.realpath(root))
        folder = Path(os.path.realpath(root / asked))
        _check_inside(folder, root, name)
    for file in (folder / CONFIG_FILE, folder / WEIGHTS_FILE):
        if root is not None:
            _check_inside(Path(os.path.realpath(file)), root, f"{name}/{file.name}")
        try:
            found = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue  # what is missing is for the reader to say
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"{file} is not a file: give the folder of an adapter that PEFT saved")
        if found.st_size > most_bytes:
            raise CheckpointError(
                f"{file} has {found.st_size} bytes, more than an adapter of this model within max_lora_rank: at most "
                f"{most_bytes}"
            )
    return folder


def check_files_inside(folder: Path, root: Path, names: Iterable[str]) -> None:
    """Raises ConfigError if a file, given by name or pattern, is a link to a place outside of the root."""
    for path in (path for name in names for path in folder.glob(name)):
        _check_inside(Path(os.path.realpath(path)), Path(os.path.realpath(root)), str(path.relative_to(folder)))


def _check_inside(path: Path, root: Path, name: str) -> None:
    if path != root and root not in path.parents:
        raise ConfigError(f"{name} is outside of the folder that adapters are loaded from (--lora-root)")

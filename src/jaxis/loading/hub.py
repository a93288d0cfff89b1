"""Resolves the user's model argument to a local folder: an existing folder, or a download from the Hub."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from jaxis.config.quantization_files import QUANTIZATION_FILES
from jaxis.errors import CheckpointError

# fnmatch patterns: a `*` also crosses `/`, so subfolders (onnx/, original/, ...) must be excluded explicitly.
_ALLOW = [
    "config.json",
    *QUANTIZATION_FILES,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "*.safetensors",
    "*.safetensors.index.json",
]
_IGNORE = ["*/*", "consolidated*"]


def resolve_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool | None = None,
) -> Path:
    """Returns the local folder of a model, downloading it if need be.

    Downloads go to huggingface_hub's cache: cached files are not downloaded again, and are used if the Hub cannot be
    reached. HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and its other variables apply.

    Args:
      model: A folder, or a Hub id such as `Qwen/Qwen3-0.6B`.
      revision: Branch, tag or commit of the repository; None means its main branch.
      token: Access token; None means the one that `hf auth login` or HF_TOKEN set.
      cache_dir: Folder of the cache; None means huggingface_hub's own.
      local_files_only: Use only what is in the cache; None asks HF_HUB_OFFLINE.

    Raises:
      CheckpointError: If there is no such folder or repository, access is refused, or the download fails.
    """
    name = os.fspath(model)
    # os.path treats impossible names (too long, an unknown user's home) as missing files instead of raising.
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        if revision is not None:
            raise CheckpointError(f"revision={revision!r} applies to a Hub id, but {model} is a local folder: drop it")
        return path
    if name and os.path.exists(path):
        raise CheckpointError(f"{model} is a file: give the folder that holds config.json and the weights")
    if not name or name.startswith((".", "~")) or path.is_absolute() or "\\" in name or name.count("/") > 1:
        raise CheckpointError(
            f"there is no folder {name!r}: give an existing folder or a Hub id such as Qwen/Qwen3-0.6B"
        )

    # Imported here because it takes a good part of a second, and local folders do not need it.
    from huggingface_hub import constants, snapshot_download

    offline = constants.HF_HUB_OFFLINE if local_files_only is None else local_files_only
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=None if cache_dir is None else os.fspath(cache_dir),
            local_files_only=offline,
            allow_patterns=_ALLOW,
            ignore_patterns=_IGNORE,
            library_name="jaxis",
        )
    except Exception as error:  # errors of its HTTP client and transfer library share no base class
        reason = explain_error(error, name, revision or constants.DEFAULT_REVISION, offline=offline)
        raise CheckpointError(reason) from error
    return Path(folder)


def explain_error(error: Exception, model: str, revision: str, *, offline: bool) -> str:
    """One line for what went wrong in a download, and what to do about it."""
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return f"there is no folder {model!r}, and it is not a Hub id such as Qwen/Qwen3-0.6B either"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{model} is gated: accept its terms on {constants.ENDPOINT}/{model}, "
            "then run `hf auth login` or give token="
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder {model} and no repository of that id on {constants.ENDPOINT}: check the name, or, "
            "if it is private, run `hf auth login` or give token="
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model} has no revision {revision!r}: give a branch, tag or commit that it has"
    if status in (401, 403):
        return f"access to {model} was refused (HTTP {status}): run `hf auth login` or give a valid token="
    if offline:
        return (
            f"{model} (revision {revision}) is not, or not completely, in the local cache, and downloads are switched "
            "off: download it once with HF_HUB_OFFLINE=0 and local_files_only=False"
        )
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in str(error):
        return (
            f"the disk is full while downloading {model}: free space, or give cache_dir= or HF_HOME on another disk; "
            "finished files are kept"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{constants.ENDPOINT} cannot be reached ({_first_line(error)}) and {model} is not completely in the local "
            "cache: run again when it can"
        )
    if isinstance(error, PermissionError):
        return f"{error.filename} cannot be written while downloading {model}: give cache_dir= or HF_HOME elsewhere"
    return f"downloading {model} failed ({_first_line(error)}): run again, finished files are kept"


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error
    text = str(cause).strip()
    return text.splitlines()[0] if text else type(cause).__name__

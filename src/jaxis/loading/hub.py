"""Resolves the user's model argument to a local folder or GGUF file: an existing one, or a download from the Hub."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TypeVar

from jaxis.config.mistral_params import PARAMS, is_mistral_format
from jaxis.config.quantization_files import QUANTIZATION_FILES
from jaxis.errors import CheckpointError
from jaxis.loading.gguf_files import choose_mmproj, find_shards, gguf_file
from jaxis.loading.hub_name import HubName, choose_gguf, parse_hub_name

Result = TypeVar("Result")

_MODULES = "modules.json"  # of sentence-transformers
# fnmatch patterns: a `*` also crosses `/`, so what they match in subfolders (onnx/, ...) must be excluded explicitly.
_ALLOW = [
    "config.json",
    PARAMS,
    "adapter_config.json",
    *QUANTIZATION_FILES,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    _MODULES,
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "*.safetensors",
    "*.safetensors.index.json",
]
_IN_SUBFOLDERS = ["*/*.safetensors*", "tokenizer*/*"]
_IGNORE = [*_IN_SUBFOLDERS, "consolidated*"]
# Files of the modules after a repository's model, which are in folders.
_OF_MODULES = ["*_Pooling/config.json", "*_Dense/config.json", "*_Dense/model.safetensors"]
# Files of a repository in Mistral's own format alone.
_MISTRAL = ["consolidated*.safetensors", "consolidated*.safetensors.index.json"]


def resolve_model(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool | None = None,
    with_weights: bool = True,
) -> Path:
    """Returns the local folder of a model, or the first file of one in GGUF, downloading it if need be.

    Downloads go to huggingface_hub's cache: cached files are not downloaded again, and are used if the Hub cannot be
    reached. HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE and its other variables apply.

    Args:
      model: A folder, a GGUF file, or a Hub id such as `Qwen/Qwen3-0.6B`. One of several GGUF files of a repository is
        chosen by its quantization, `org/name:Q4_K_M`, or by its path, `org/name/file.gguf`.
      revision: Branch, tag or commit of the repository; None means its main branch.
      token: Access token; None means the one that `hf auth login` or HF_TOKEN set.
      cache_dir: Folder of the cache; None means huggingface_hub's own.
      local_files_only: Use only what is in the cache; None asks HF_HUB_OFFLINE.
      with_weights: True also downloads weights; False allows a folder without them.

    Raises:
      CheckpointError: There is no such folder, file or repository, access is refused, or the download fails.
    """
    name = os.fspath(model)
    # os.path treats impossible names (too long, an unknown user's home) as missing files instead of raising.
    path = Path(os.path.expanduser(name))
    if name and os.path.exists(path):
        if revision is not None:
            raise CheckpointError(f"revision={revision!r} applies to a Hub id, but {model} is a local path: drop it")
        return _local_model(path)
    wanted = parse_hub_name(name)
    if wanted is None or name.startswith((".", "~")) or path.is_absolute() or "\\" in name:
        raise CheckpointError(
            f"there is no folder or file {name!r}: give one that exists or a Hub id such as Qwen/Qwen3-0.6B"
        )
    download = _Download(wanted.repository, revision, token, cache_dir, local_files_only)
    if wanted.chooses_file:
        return download.gguf(wanted)
    if not with_weights:
        return download.snapshot([name for name in _ALLOW if "safetensors" not in name], _IGNORE)
    folder = download.snapshot(_ALLOW, _IGNORE)
    if (folder / _MODULES).is_file():
        folder = download.snapshot(_OF_MODULES, [])
    if is_mistral_format(folder):
        folder = download.snapshot([*_ALLOW, *_MISTRAL], _IN_SUBFOLDERS)
    has_weights = any(folder.glob("*.safetensors")) or (folder / "config.json").exists()
    return folder if has_weights else download.gguf(wanted)


def _local_model(path: Path) -> Path:
    """Returns the folder, or the first GGUF file; CheckpointError for another kind of file or a missing shard."""
    if (file := gguf_file(path)) is not None:
        return find_shards(file)[0]
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is a file: give a GGUF file, or the folder that holds config.json and the weights"
        )
    return path


class _Download:
    """Downloads from a repository, with errors of one line."""

    def __init__(
        self,
        repository: str,
        revision: str | None,
        token: str | None,
        cache_dir: str | os.PathLike[str] | None,
        local_files_only: bool | None,
    ) -> None:
        # Imported here because it takes a good part of a second, and local folders do not need it.
        from huggingface_hub import constants

        self._repository, self._token = repository, token
        self._revision = revision or constants.DEFAULT_REVISION
        self._cache_dir = None if cache_dir is None else os.fspath(cache_dir)
        self._offline = constants.HF_HUB_OFFLINE if local_files_only is None else local_files_only

    def snapshot(self, allow: list[str], ignore: list[str]) -> Path:
        """Returns the local folder with the files that match the patterns."""
        from huggingface_hub import snapshot_download

        return Path(
            self._checked(
                lambda: snapshot_download(
                    self._repository,
                    revision=self._revision,
                    token=self._token,
                    cache_dir=self._cache_dir,
                    local_files_only=self._offline,
                    allow_patterns=allow,
                    ignore_patterns=ignore,
                    library_name="jaxis",
                )
            )
        )

    def gguf(self, wanted: HubName) -> Path:
        """Downloads the chosen GGUF files and the vision part beside them, and returns the first file."""
        if self._offline:
            return self._cached_gguf(wanted)
        try:
            names = self._file_names()
        except CheckpointError:
            with contextlib.suppress(CheckpointError):
                return self._cached_gguf(wanted)
            raise
        files = choose_gguf(wanted, names)
        parent = PurePosixPath(files[0]).parent
        beside = choose_mmproj([name for name in names if PurePosixPath(name).parent == parent])
        return find_shards(self.snapshot([*files, *([beside] if beside else [])], []) / files[0])[0]

    def _cached_gguf(self, wanted: HubName) -> Path:
        # No pattern: what matters is not whether all files of the repository are there.
        folder = self.snapshot([], [])
        files = choose_gguf(wanted, [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")])
        return find_shards(folder / files[0])[0]

    def _file_names(self) -> list[str]:
        from huggingface_hub import HfApi

        return self._checked(
            lambda: HfApi(library_name="jaxis").list_repo_files(
                self._repository, revision=self._revision, token=self._token
            )
        )

    def _checked(self, download: Callable[[], Result]) -> Result:
        try:
            return download()
        except Exception as error:  # errors of its HTTP client and transfer library share no base class
            reason = explain_error(error, self._repository, self._revision, offline=self._offline)
            raise CheckpointError(reason) from error


def explain_error(error: Exception, model: str, revision: str, *, offline: bool) -> str:
    """Returns one line about the failure of a download, and what to do."""
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
            f"off: unset HF_HUB_OFFLINE and run `jaxis pull {model}` once"
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

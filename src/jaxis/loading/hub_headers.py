"""Reads a model's metadata from the Hub without its weights: its configuration and its safetensors files' headers."""

from __future__ import annotations

from pathlib import Path

from jaxis.config.mistral_params import PARAMS
from jaxis.config.quantization_files import CONFIG, QUANTIZATION_FILES
from jaxis.errors import CheckpointError
from jaxis.loading.hub import explain_error
from jaxis.loading.mlx_names import hugging_face_name, is_mlx
from jaxis.loading.safetensors import DTYPES, TensorInfo, TensorInfos


def download_config(model: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Downloads a repository's config.json, and the files beside it that describe the quantization of the weights.

    They go into huggingface_hub's cache. Returns the path of config.json, or of Mistral's params.json in its place; the
    other files are beside it.

    Args:
      model: A Hub id.
      revision: Branch, tag or commit; None means the main branch.
      token: Access token; None means the one that `hf auth login` or HF_TOKEN set.

    Raises:
      CheckpointError: There is no such repository or config.json, access is refused, or the download fails.
    """
    fault = _connection_fault()
    path = _download(model, CONFIG, revision, token, fault) or _download(model, PARAMS, revision, token, fault)
    if path is None:
        raise CheckpointError(f"{model} has no {CONFIG}: give a model in Hugging Face format")
    for name in QUANTIZATION_FILES:
        _download(model, name, revision, token, fault)
    return path


def _connection_fault() -> Exception | None:
    """Returns why the Hub cannot be reached, after one attempt; None if it can be reached, or offline is set."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # errors of its HTTP client share no base class with its own
        return error
    return None


def _download(model: str, name: str, revision: str | None, token: str | None, fault: Exception | None) -> Path | None:
    """Returns a file in the cache; None if the repository does not have it. With a fault, only cached files count."""
    from huggingface_hub import constants, errors, hf_hub_download

    offline = constants.HF_HUB_OFFLINE or fault is not None
    try:
        return Path(
            hf_hub_download(model, name, revision=revision, token=token, library_name="jaxis", local_files_only=offline)
        )
    except errors.EntryNotFoundError as error:
        if isinstance(error, errors.LocalEntryNotFoundError):  # also raised if the Hub cannot be reached
            if name != CONFIG and offline:
                return None
            error.__cause__ = error.__cause__ or fault
            raise _checkpoint_error(error, model, revision) from error
        return None
    except Exception as error:  # errors of its HTTP client share no base class with its own
        raise _checkpoint_error(error, model, revision or constants.DEFAULT_REVISION) from error


def hub_tensor_infos(model: str, *, revision: str | None = None, token: str | None = None) -> TensorInfos | None:
    """Reads type, shape and size of a repository's tensors, from its files' headers alone, concurrently.

    The result is in the order of the files and of the bytes in each; `offset` counts within the file's data. None if
    the repository has no safetensors weights. Raises CheckpointError if a header cannot be read, or has an unknown
    type.
    """
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if (fault := _connection_fault()) is not None:
        raise _checkpoint_error(errors.LocalEntryNotFoundError(str(fault)), model, revision)
    shown = not are_progress_bars_disabled()
    disable_progress_bars()  # keep stderr for errors
    try:
        metadata = HfApi(library_name="jaxis").get_safetensors_metadata(model, revision=revision, token=token)
    except errors.NotASafetensorsRepoError:
        return None
    except Exception as error:
        raise _checkpoint_error(error, model, revision) from error
    finally:
        if shown:
            enable_progress_bars()
    infos = TensorInfos({}, {})
    for file_name, file in sorted(metadata.files_metadata.items()):
        metadata_of_file = file.metadata or {}
        infos.metadata |= metadata_of_file
        for stored_name, tensor in sorted(file.tensors.items(), key=lambda item: item[1].data_offsets):
            name = hugging_face_name(stored_name) if is_mlx(metadata_of_file) else stored_name
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{model}: tensor {name!r} in {file_name} has the unknown dtype {tensor.dtype!r}")
            begin, end = tensor.data_offsets
            infos[name] = TensorInfo(DTYPES[tensor.dtype][0], tuple(tensor.shape), end - begin, begin)
    return infos


def _checkpoint_error(error: Exception, model: str, revision: str | None) -> CheckpointError:
    from huggingface_hub import constants

    reason = explain_error(error, model, revision or constants.DEFAULT_REVISION, offline=constants.HF_HUB_OFFLINE)
    return CheckpointError(reason)

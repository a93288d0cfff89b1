"""Pooling settings, read from the files of a sentence-transformers checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError
from jaxis.loading.gguf_config_keys import DENSE_SIZES, POOLING_MODE

Mode = Literal["cls", "last", "mean"]
_MODES: Mapping[str, Mode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
DenseActivation = Literal["Identity", "Tanh", "ReLU", "GELU"]
_ACTIVATIONS: Mapping[str, DenseActivation] = {name: name for name in get_args(DenseActivation)}
_DENSE_KEYS = {
    *("in_features", "out_features", "bias", "activation_function"),
    *("module_input_name", "module_output_name"),
}
# Settings files are small; a larger file is something else.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class DenseSettings:
    """A linear layer between pooling and normalization.

    Attributes:
      folder: Folder or file with the weights.
      input_size, output_size: Sizes of the input and output.
      use_bias: True if the layer has a bias.
      activation: Activation function, by its name in torch.
      name: Prefix of the tensors' names.
    """

    folder: str
    input_size: int
    output_size: int
    use_bias: bool
    activation: DenseActivation
    name: str = "linear"


@dataclass(frozen=True)
class PoolingSettings:
    """Conversion of hidden states to vectors.

    Attributes:
      mode: Pooling: the first token's hidden state, the last token's, or the mean of all.
      normalize: True to normalize vectors to length 1.
      max_tokens: Limit of an input's tokens; None: the model's limit.
      prompts: Texts to put before inputs, by the name of their kind, such as "query".
      default_prompt: Kind of inputs for which none is named; None: no prompt.
      dense: Layers between pooling and normalization.
      passed_over: Token that mode "last" ignores at the end of an input; None: no such token.
    """

    mode: Mode
    normalize: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    dense: tuple[DenseSettings, ...] = ()
    passed_over: int | None = None

    def vector_size(self, hidden_size: int) -> int:
        """Returns the size of a vector for a model of hidden size E.

        Raises:
          CheckpointError: The layers' sizes do not match.
        """
        for layer in self.dense:
            if layer.input_size != hidden_size:
                raise CheckpointError(
                    f"{layer.folder} takes vectors of {layer.input_size} elements and gets {hidden_size}: restore it"
                )
            hidden_size = layer.output_size
        return hidden_size


def has_pooling_files(path: Path) -> bool:
    """Returns whether a checkpoint's folder has pooling settings."""
    return (path / "modules.json").is_file()


def read_pooling_settings(path: Path, default_mode: Mode) -> PoolingSettings:
    """Reads sentence-transformers' files in a checkpoint's folder.

    Args:
      path: Folder, or file of a checkpoint in one file.
      default_mode: Mode of a checkpoint without such files; its vectors are then normalized.

    Raises:
      CheckpointError: A file is broken, or has an unsupported setting.
    """
    if not has_pooling_files(path):
        return PoolingSettings(default_mode, normalize=True)
    mode, normalize, dense = None, False, list[DenseSettings]()
    for module in _read_list(path / "modules.json"):
        kind, folder = str(module.get("type", "")).rpartition(".")[2], path / str(module.get("path", ""))
        if kind == "Pooling":
            mode = _read_mode(folder / "config.json")
        elif kind == "Dense" and mode is not None and not normalize:
            dense.append(read_dense(folder))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise CheckpointError(
                f"{path / 'modules.json'} has a module {kind!r} in this place; Transformer, Pooling, Dense and "
                "Normalize, in this order, are supported"
            )
    if mode is None:
        raise CheckpointError(f"{path / 'modules.json'} has no module of type Pooling: add one, or remove the file")
    sentence, prompts = (
        _read_object(path / name) if (path / name).is_file() else {}
        for name in ("sentence_bert_config.json", "config_sentence_transformers.json")
    )
    return PoolingSettings(
        mode,
        normalize,
        sentence.get("max_seq_length"),
        prompts.get("prompts") or {},
        prompts.get("default_prompt_name"),
        tuple(dense),
    )


def gguf_pooling_settings(path: Path, config: HFConfig, default_mode: Mode) -> PoolingSettings:
    """Reads the settings of a GGUF file. Vectors are normalized, as in llama.cpp.

    Args:
      path: The file.
      config: Configuration from the file.
      default_mode: Mode if the file has none.
    """
    dense = [
        DenseSettings(str(path), *sizes, use_bias=False, activation="Identity", name=name)
        for name, sizes in (config.get(DENSE_SIZES) or {}).items()
    ]
    return PoolingSettings(config.get(POOLING_MODE, default_mode), normalize=True, dense=tuple(dense))


def trained_dimensions(config: HFConfig) -> tuple[bool, tuple[int, ...]]:
    """Returns the sizes that vectors may be cut to, as (any size, list of sizes), by vLLM's keys of config.json.

    Raises:
      CheckpointError: A key has a wrong type.
    """
    is_any, some = config.get("is_matryoshka", False), config.get("matryoshka_dimensions") or []
    if not isinstance(is_any, bool) or not isinstance(some, list) or not all(type(size) is int for size in some):
        raise CheckpointError(
            f"{config.source}: is_matryoshka must be true or false, matryoshka_dimensions a list of numbers: correct it"
        )
    return is_any and not some, tuple(some)


def _read_mode(path: Path) -> Mode:
    settings = HFConfig(_read_object(path), source=str(path))
    chosen = sorted(key for key in settings.to_dict() if key.startswith("pooling_mode_") and settings.get(key))
    if len(chosen) == 1 and chosen[0] in _MODES:
        if _MODES[chosen[0]] == "mean":
            settings.expect("include_prompt", True)
        return _MODES[chosen[0]]
    raise CheckpointError(f"{path} chooses {', '.join(chosen) or 'no mode'}; one of {', '.join(_MODES)} is supported")


def read_dense(folder: Path) -> DenseSettings:
    """Reads the settings in a Dense module's folder.

    Raises:
      CheckpointError, ConfigError: Its config.json is broken, or has an unsupported setting.
    """
    path = folder / "config.json"
    values = HFConfig(_read_object(path), source=str(path))
    for key in ("module_input_name", "module_output_name"):
        values.expect(key, "sentence_embedding", None)
    sizes = (values["in_features"], values["out_features"])
    # Defaults of sentence-transformers.
    activation, use_bias = values.get("activation_function", "Tanh"), values.get("bias", True)
    name = str(activation).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"{path} has activation_function={activation!r}; {', '.join(_ACTIVATIONS)} are supported")
    if not all(type(size) is int and size > 0 for size in sizes) or not isinstance(use_bias, bool):
        raise CheckpointError(f"{path}: in_features and out_features must be sizes, bias true or false: restore it")
    if unknown := sorted(set(values.to_dict()) - _DENSE_KEYS):
        raise CheckpointError(f"{path} has {', '.join(unknown)}, which is not supported")
    return DenseSettings(str(folder), *sizes, use_bias, _ACTIVATIONS[name])


def _read_object(path: Path) -> dict[str, Any]:
    value = _read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} has no object: restore the file")
    return value


def _read_list(path: Path) -> list[dict[str, Any]]:
    value = _read_json(path)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise CheckpointError(f"{path} has no list of objects: restore the file")
    return value


def _read_json(path: Path) -> Any:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path} has more than {_MAX_BYTES} bytes, so it has no settings: restore the file")
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): restore the file") from None

"""How hidden states become an input's vector, as the files of a sentence-transformers checkpoint say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from jaxis.config.hf_config import HFConfig
from jaxis.errors import CheckpointError
from jaxis.loading.gguf.encoder_config import DENSE_SIZES, POOLING_MODE

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
# Files of settings are small; what is larger is none.
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class DenseSettings:
    """A linear layer between pooling and normalization.

    Attributes:
      folder: Where its weights are.
      input_size, output_size: The features of its input and output.
      use_bias: Whether it has a bias.
      activation: What follows it, by torch's name.
      name: What its tensors' names begin with.
    """

    folder: str
    input_size: int
    output_size: int
    use_bias: bool
    activation: DenseActivation
    name: str = "linear"


@dataclass(frozen=True)
class PoolingSettings:
    """What follows the model.

    Attributes:
      mode: Which hidden states count: the first token's, the last one's, or the mean of all.
      normalize: Whether vectors have length 1.
      max_tokens: Most tokens of an input; None: as many as the model takes.
      prompts: What texts begin with, by the name of their kind, such as "query".
      default_prompt: The kind of an input for which none is named; None: it begins with nothing.
      dense: What vectors go through before they are normalized.
      passed_over: A token that "last" passes over at the end of an input; None: it passes over none.
    """

    mode: Mode
    normalize: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str | None = None
    dense: tuple[DenseSettings, ...] = ()
    passed_over: int | None = None

    def vector_size(self, hidden_size: int) -> int:
        """The elements of a vector.

        Args:
          hidden_size: E of the model.

        Raises:
          CheckpointError: The layers do not take what they get.
        """
        for layer in self.dense:
            if layer.input_size != hidden_size:
                raise CheckpointError(
                    f"{layer.folder} takes vectors of {layer.input_size} elements and gets {hidden_size}: restore it"
                )
            hidden_size = layer.output_size
        return hidden_size


def has_pooling_files(path: Path) -> bool:
    """Whether a checkpoint's folder says how its hidden states become vectors."""
    return (path / "modules.json").is_file()


def read_pooling_settings(path: Path, default_mode: Mode) -> PoolingSettings:
    """Reads the files of sentence-transformers in a checkpoint's folder.

    Args:
      path: The folder, or the file of a checkpoint that is one file.
      default_mode: Of a checkpoint without such files, whose vectors then have length 1.

    Raises:
      CheckpointError: A file is broken, or asks for something that is not supported.
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
    """What a GGUF file says. Its vectors have length 1, as llama.cpp makes them.

    Args:
      path: The file.
      config: What it has in place of a config.json.
      default_mode: Of a file that does not say.
    """
    dense = [
        DenseSettings(str(path), *sizes, use_bias=False, activation="Identity", name=name)
        for name, sizes in (config.get(DENSE_SIZES) or {}).items()
    ]
    return PoolingSettings(config.get(POOLING_MODE, default_mode), normalize=True, dense=tuple(dense))


def trained_dimensions(config: HFConfig) -> tuple[bool, tuple[int, ...]]:
    """To how many elements a model's vectors may be cut: any number, or some; by vLLM's keys of config.json.

    Raises:
      CheckpointError: The keys do not hold what they should.
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
    """What a Dense module's folder says.

    Raises:
      CheckpointError, ConfigError: Its config.json is broken, or asks for something that is not supported.
    """
    path = folder / "config.json"
    values = HFConfig(_read_object(path), source=str(path))
    for key in ("module_input_name", "module_output_name"):
        values.expect(key, "sentence_embedding", None)
    sizes = (values["in_features"], values["out_features"])
    # The defaults of sentence-transformers.
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

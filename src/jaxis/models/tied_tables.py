"""Embeddings and head of a checkpoint: one table or two. Its tensors decide if they can, otherwise its config."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from jaxis.config import ModelConfig, VllmConfig
from jaxis.config.hf_config import HFConfig
from jaxis.config.vllm_config import TensorChanges
from jaxis.errors import ConfigError
from jaxis.loading.open_checkpoint import OpenCheckpoint, open_checkpoint, read_hf_config
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.interfaces import has_tied_head
from jaxis.models.common.tables import EMBEDDINGS, HEAD, same_bytes
from jaxis.models.common.text_part import TextPart
from jaxis.models.model_loader import construct_abstractly
from jaxis.models.registry import model_class_of

_KEYS = ("tie_word_embeddings", "tie_embedding")  # the second is LFM's


@dataclass(frozen=True)
class Tables:
    """Embeddings and head of a model.

    `config` says whether they are one table. `are_split` is True if the model has two that differ, and the checkpoint
    one.
    """

    config: HFConfig
    are_split: bool = False


def tables_of(
    config: HFConfig, path: str | os.PathLike[str], changes: TensorChanges | None = None, *, has_weights: bool = True
) -> Tables:
    """Returns embeddings and head of a checkpoint's model, after its tensors are changed.

    As in transformers, a head that differs from the embeddings is not tied, whatever the config says.

    Args:
      config: Config of the checkpoint.
      path: Path of the checkpoint, as for `open_checkpoint`.
      changes: Changes of the tensors; None for none.
      has_weights: True if the weights are those of the checkpoint.

    Raises:
      ConfigError, CheckpointError: The checkpoint or its changes cannot be read.
    """
    try:
        model_class = model_class_of(config)
    except ConfigError:  # for the caller to say
        return Tables(config)
    if not has_weights or not issubclass(model_class, CausalLM):
        return Tables(config)
    config = _as_stored(config, path, model_class)
    names = model_class.names_of(config.get_text_config())
    if changes is None or not changes.splits_tied(names.name_here) or not _is_tied(config, path):
        return Tables(config)
    return Tables(_with_tie(config, is_tied=False), are_split=True)


def config_as_stored(path: str | os.PathLike[str]) -> HFConfig:
    """Returns a checkpoint's config, corrected to say whether the tensors are tied; raises as `tables_of` does."""
    return tables_of(read_hf_config(path), path).config


def _as_stored(config: HFConfig, path: str | os.PathLike[str], model_class: type[CausalLM]) -> HFConfig:
    said = tie_keys(config)
    ties_outside = (
        issubclass(model_class, TextPart) and model_class.is_tied_outside and "tie_word_embeddings" not in config
    )
    if not ties_outside and not (any(said.values()) if said else model_class.tied_by_default):
        return config
    with open_checkpoint(path) as checkpoint:
        name_here = model_class.names_of(config.get_text_config()).name_here
        head, embeddings = (_tensors_of(weight, checkpoint, name_here) for weight in (HEAD, EMBEDDINGS))
        if ties_outside and not (head and embeddings):
            return _with_tie(config, is_tied=True)
        if head and embeddings and not _are_same(head, embeddings, checkpoint):
            return _with_tie(config, is_tied=False)
    return config


def _tensors_of(weight: str, checkpoint: OpenCheckpoint, name_here: Callable[[str], str]) -> dict[str, str]:
    """Returns the tensors of the module with this weight: suffix of the name here -> name in the checkpoint."""
    module = weight.removesuffix(".weight")
    named = ((name_here(name), name) for name in checkpoint.names())
    return {here.removeprefix(f"{module}."): name for here, name in named if here.startswith(f"{module}.")}


def _are_same(head: dict[str, str], embeddings: dict[str, str], checkpoint: OpenCheckpoint) -> bool:
    return all(
        part in embeddings and same_bytes(checkpoint.tensor(name), checkpoint.tensor(embeddings[part]))
        for part, name in head.items()
    )


def _is_tied(config: HFConfig, path: str | os.PathLike[str]) -> bool:
    return has_tied_head(construct_abstractly(VllmConfig(ModelConfig(str(path), config)), check_config=False))


def tie_keys(config: HFConfig) -> dict[str, bool]:
    """Returns the keys that say whether the head is tied; dots separate those in `text_config`."""
    values = config.to_dict()
    inner = values.get("text_config")
    places = {"": values} | ({"text_config.": inner} if isinstance(inner, dict) else {})
    return {
        f"{place}{key}": bool(section[key])
        for place, section in places.items()
        for key in _KEYS
        if section.get(key) is not None
    }


def _with_tie(config: HFConfig, *, is_tied: bool) -> HFConfig:
    keys = dict.fromkeys(("tie_word_embeddings", *tie_keys(config)), is_tied)
    return config.with_values(keys)

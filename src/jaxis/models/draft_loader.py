"""Loads an EAGLE-3 head or another model, from its own checkpoint, to draft tokens for a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxis.config.architecture import architectures_of
from jaxis.errors import ConfigError
from jaxis.layers.module import JaxModule
from jaxis.models import eagle3
from jaxis.models.common.decoder import CausalLM
from jaxis.models.draft_model import DraftModel
from jaxis.models.eagle3 import Eagle3Head
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig


def load_eagle3(
    model: JaxModule,
    head_config: VllmConfig,
    mesh: jax.sharding.Mesh,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Loads an EAGLE-3 head into the `draft` of a loaded model, on its mesh; `on_progress` as in `load_model`.

    Raises ConfigError if the checkpoint has no EAGLE-3 head, or one for another model, and CheckpointError if the
    tensors do not match the head's parameters.
    """
    target, hf_config = _checked_target(model), head_config.model_config.hf_config
    if target.decoder.num_streams > 1:
        raise ConfigError(
            f"an EAGLE-3 head reads one state of a token, and layers of {type(target).__name__} pass on several: draft "
            "with another method"
        )
    _check_architecture(hf_config)
    head: Any = load_model(head_config, mesh, on_progress, model_class=Eagle3Head)
    size, head_size = target.decoder.embed_tokens.input_size, head.midlayer.input_layernorm.num_features
    if head.target_size != size or (head.embed_tokens is None and head_size != size):
        raise ConfigError(
            f"the EAGLE-3 head in {hf_config.source} reads states of {head.target_size} features, and the model's have "
            f"{size}: it was not trained for this model"
        )
    target.decoder.aux_hidden_state_layers = head.target_layers(len(target.decoder.layers))
    target.draft = head


def load_draft_model(
    model: JaxModule,
    draft_config: VllmConfig,
    mesh: jax.sharding.Mesh,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Loads another model into the `draft` of a loaded model, on its mesh, as `load_model` does, with its errors.

    `check_same_vocabulary` has compared their vocabularies.
    """
    target = _checked_target(model)
    target.draft = DraftModel(load_model(draft_config, mesh, on_progress), target.vocab_size)


def construct_draft(draft_config: VllmConfig, method: str) -> JaxModule:
    """Constructs the module that drafts, by "eagle3" or "draft_model": parameters have shapes and types only.

    Raises ConfigError if the checkpoint has no EAGLE-3 head, or its model is not supported.
    """
    if method == "draft_model":
        return construct_abstractly(draft_config, check_config=False)
    _check_architecture(draft_config.model_config.hf_config)
    return construct_abstractly(draft_config, check_config=False, model_class=Eagle3Head)


def check_same_vocabulary(target_config: VllmConfig, draft_config: VllmConfig) -> None:
    """Raises a ConfigError if token ids of two checkpoints have different meanings.

    Unless both have tokenizers to compare, their numbers of ids must be equal.
    """
    configs = target_config.model_config, draft_config.model_config
    target, draft = (Tokenizer.from_path(each.model) for each in configs)
    if target is not None and draft is not None:
        if target.vocabulary == draft.vocabulary:
            return
        reason = "their tokenizers differ"
    else:
        sizes = [each.hf_config.get_text_config()["vocab_size"] for each in configs]
        if sizes[0] == sizes[1]:
            return
        reason = f"they have {sizes[0]} and {sizes[1]} tokens"
    raise ConfigError(
        f"{configs[1].model} has another vocabulary than {configs[0].model}, for which it was to draft: {reason}. "
        "Draft with a model of the same family"
    )


def _check_architecture(hf_config: HFConfig) -> None:
    if not set(architectures_of(hf_config)) & set(eagle3.ARCHITECTURES):
        raise ConfigError(
            f"architectures={architectures_of(hf_config)} in {hf_config.source} is not of an EAGLE-3 head, which is "
            f"one of: {', '.join(eagle3.ARCHITECTURES)}; for a model of its own, the method is draft_model"
        )


def _checked_target(model: JaxModule) -> CausalLM:
    if not isinstance(model, CausalLM):
        raise ConfigError(
            f"{type(model).__name__} is not a CausalLM of jaxis, whose embeddings and layers drafts are made from: "
            "draft with method ngram"
        )
    return model

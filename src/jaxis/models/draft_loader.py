"""Loads what drafts tokens for a model, from a checkpoint of its own: an EAGLE-3 or DFlash head, or another model."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxis.config.architecture import architectures_of
from jaxis.errors import ConfigError
from jaxis.models import dflash, eagle3
from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.draft_model import DraftModel
from jaxis.models.dflash import DFlashHead
from jaxis.models.eagle3 import Eagle3Head
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jax

    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig
    from jaxis.layers.module import JaxModule


class _HeadKind(NamedTuple):
    """A kind of heads.

    Attributes:
      name: As errors say it.
      architectures: What checkpoints call it.
      model_class: Its class.
    """

    name: str
    architectures: Collection[str]
    model_class: type[Any]


_HEADS = {
    "eagle3": _HeadKind("an EAGLE-3", eagle3.ARCHITECTURES, Eagle3Head),
    "dflash": _HeadKind("a DFlash", dflash.ARCHITECTURES, DFlashHead),
}


def load_eagle3(
    model: JaxModule,
    head_config: VllmConfig,
    mesh: jax.sharding.Mesh,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Gives a loaded model an EAGLE-3 head to draft with.

    Args:
      model: The model.
      head_config: Of the head.
      mesh: Where the model is.
      on_progress: See `load_model`.

    Raises:
      ConfigError: The checkpoint is of something else, or of a head for another model.
      CheckpointError: The tensors do not match the head's parameters.
    """
    target, hf_config = _checked_target(model), head_config.model_config.hf_config
    head = _load_head("eagle3", head_config, mesh, on_progress)
    size, head_size = target.decoder.embed_tokens.input_size, head.midlayer.input_layernorm.num_features
    if head.target_size != size or (head.embed_tokens is None and head_size != size):
        raise ConfigError(
            f"the EAGLE-3 head in {hf_config.source} reads states of {head.target_size} features, and the model's have "
            f"{size}: it was not trained for this model"
        )
    target.decoder.aux_hidden_state_layers = head.target_layers(len(target.decoder.layers))
    target.draft = head


def load_dflash(
    model: JaxModule,
    head_config: VllmConfig,
    mesh: jax.sharding.Mesh,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Gives a loaded model a DFlash head to draft with.

    Args:
      model: The model.
      head_config: Of the head.
      mesh: Where the model is.
      on_progress: See `load_model`.

    Raises:
      ConfigError, CheckpointError: See `load_eagle3`.
    """
    target, hf_config = _checked_target(model), head_config.model_config.hf_config
    head = _load_head("dflash", head_config, mesh, on_progress)
    layers, embeddings = head.target_layers(len(target.decoder.layers)), target.decoder.embed_tokens
    vocab_size, mask_token_id = head.settings.vocab_size, head.settings.mask_token_id
    for what, of_head, of_model in (
        ("features", head.norm.num_features, embeddings.input_size),
        ("tokens", vocab_size or embeddings.output_size, embeddings.output_size),
    ):
        if of_head != of_model:
            raise ConfigError(
                f"the DFlash head in {hf_config.source} is for a model of {of_head} {what}, and the model has "
                f"{of_model}: it was not trained for this model"
            )
    if mask_token_id >= embeddings.output_size:
        raise ConfigError(
            f"{hf_config.source} has mask_token_id={mask_token_id}, and the model has {embeddings.output_size} tokens: "
            "the head was not trained for this model"
        )
    target.decoder.aux_hidden_state_layers = layers
    target.draft = head


def load_draft_model(
    model: JaxModule,
    draft_config: VllmConfig,
    mesh: jax.sharding.Mesh,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Gives a loaded model another one to draft with.

    Args:
      model: The model.
      draft_config: Of the other one; `check_same_vocabulary` checks that its token ids mean the same.
      mesh: Where the model is.
      on_progress: See `load_model`.

    Raises:
      ConfigError, CheckpointError: See `load_model`.
    """
    target = _checked_target(model)
    vocab_size = target.decoder.embed_tokens.output_size
    target.draft = DraftModel(load_model(draft_config, mesh, on_progress), vocab_size)


def construct_draft(draft_config: VllmConfig, method: str) -> JaxModule:
    """What drafts, without any weights: parameters that have shapes and types only.

    Args:
      draft_config: Of its checkpoint.
      method: "eagle3", "dflash" or "draft_model".

    Raises:
      ConfigError: The checkpoint is of something else, or of what is not supported.
    """
    if method == "draft_model":
        return construct_abstractly(draft_config, check_config=False)
    _check_architecture(draft_config.model_config.hf_config, method)
    return construct_abstractly(draft_config, check_config=False, model_class=_HEADS[method].model_class)


def check_same_vocabulary(target_config: VllmConfig, draft_config: VllmConfig) -> None:
    """Raises a ConfigError if token ids of two checkpoints do not mean the same.

    Without a tokenizer in both, their numbers of ids must be equal.
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


def _load_head(
    method: str, head_config: VllmConfig, mesh: jax.sharding.Mesh, on_progress: Callable[[int, int], None] | None
) -> Any:
    _check_architecture(head_config.model_config.hf_config, method)
    return load_model(head_config, mesh, on_progress, model_class=_HEADS[method].model_class)


def _check_architecture(hf_config: HFConfig, method: str) -> None:
    kind = _HEADS[method]
    if not set(architectures_of(hf_config)) & set(kind.architectures):
        raise ConfigError(
            f"architectures={architectures_of(hf_config)} in {hf_config.source} is not of {kind.name} head, which is "
            f"one of: {', '.join(kind.architectures)}; for a model of its own, the method is draft_model"
        )


def _checked_target(model: JaxModule) -> CausalLM:
    if not isinstance(model, CausalLM):
        raise ConfigError(
            f"{type(model).__name__} is not a CausalLM of jaxis, whose embeddings and layers drafts are made from: "
            "draft with method ngram"
        )
    return model

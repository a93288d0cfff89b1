"""Loads what drafts tokens for a model, from a checkpoint of its own: an EAGLE-3 head, or another model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxis.config.architecture import architectures_of
from jaxis.errors import ConfigError
from jaxis.layers.attention_metadata import AttentionMetadata
from jaxis.layers.module import JaxModule
from jaxis.models import eagle3
from jaxis.models.common.decoder import CausalLM
from jaxis.models.eagle3 import Eagle3Head
from jaxis.models.model_loader import construct_abstractly, load_model
from jaxis.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.hf_config import HFConfig


# A whole model that drafts tokens for another one of the same vocabulary (arXiv:2211.17192).


class DraftModel(JaxModule):
    """What `PredictionLayer` is, of a model that reads tokens alone.

    Args:
      model: The model that drafts.
      vocab_size: Token ids of the target; those past them are never drafted.

    Attributes:
      reads_next_token: The row of a token takes this token itself.
    """

    reads_next_token = False

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size

    def first_states(self, hidden_states: jax.Array, aux_hidden_states: Sequence[jax.Array]) -> jax.Array:
        """The target's hidden states, which are not used."""
        del aux_hidden_states
        return hidden_states

    def __call__(
        self,
        target: Any,
        kv_caches: list[Any] | None,
        input_ids: jax.Array,
        states: jax.Array,
        attention_metadata: AttentionMetadata,
    ) -> tuple[list[Any] | None, jax.Array]:
        """Runs the model over a flat batch; see `CausalLM`. Returns the updated caches and its hidden states [T, E]."""
        del target, states
        kv_caches, hidden_states, _ = self.model(kv_caches, input_ids, attention_metadata)
        return kv_caches, hidden_states

    def compute_logits(self, target: Any, states: jax.Array) -> jax.Array:
        """Hidden states [T, E] -> float32 logits [T, V]."""
        del target
        return self.model.compute_logits(states)[:, : self.vocab_size]

    def token_ids(self, indices: jax.Array) -> jax.Array:
        """Indices into the logits -> token ids, which are the same."""
        return indices


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
      method: "eagle3" or "draft_model".

    Raises:
      ConfigError: The checkpoint is of something else, or of what is not supported.
    """
    if method == "draft_model":
        return construct_abstractly(draft_config, check_config=False)
    _check_architecture(draft_config.model_config.hf_config)
    return construct_abstractly(draft_config, check_config=False, model_class=Eagle3Head)


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

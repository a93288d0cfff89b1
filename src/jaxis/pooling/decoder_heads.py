"""Decoders without their output heads, as embedding checkpoints have them, or with a classifier's head instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError
from jaxis.kernels import native
from jaxis.kernels.weights import lookup, pack
from jaxis.layers.linear import JaxLinear
from jaxis.layers.scope import LayerScope
from jaxis.models.common.base_model import name_with_prefix
from jaxis.pooling.classifier_settings import num_labels
from jaxis.pooling.score_head import ScoreHead, linear_head

if TYPE_CHECKING:
    from jaxis.config import VllmConfig
    from jaxis.config.quantization import QuantizationConfig


def with_head_tokens(model_class: type[Any], *, is_difference: bool) -> type[Any]:
    """Makes the class of a decoder whose scores are the logits of some tokens.

    Args:
      model_class: A `CausalLM`.
      is_difference: True if there are two tokens, and the score is the second's logit minus the first's.
    """

    class ScoringByTokens(model_class):
        def take_rows(self, token_ids: Sequence[int]) -> None:
            """Keeps only these tokens' rows of the loaded head.

            Raises:
              ConfigError: The logits are more than a product with the head.
            """
            head = self.model.embed_tokens if self.lm_head is None else self.lm_head
            has_bias = self.lm_head is not None and self.lm_head.bias is not None
            if has_bias or self.logits_multiplier != 1 or self.logits_soft_cap is not None:
                raise ConfigError(
                    f"classifier_from_token: {model_class.__name__} changes its logits, which is not supported here"
                )
            ids = jnp.array(token_ids, jnp.int32)
            rows = np.asarray(lookup(ids, head.weight.get_value(), jnp.float32, axes=head.kernel_axes))
            rows = rows[1:] - rows[:1] if is_difference else rows
            self.lm_head = None
            self.score = JaxLinear(rows.shape[1], len(rows), nnx.Rngs(0), use_bias=False)
            self.score.weight.set_value(pack(rows) if native.usable() else jnp.asarray(rows))

    ScoringByTokens.__name__ = ScoringByTokens.__qualname__ = model_class.__name__
    return ScoringByTokens


def without_head(model_class: type[Any]) -> type[Any]:
    """Makes the class of a decoder (a `CausalLM`) without a head. The checkpoint may also lack the decoder's prefix."""

    class Headless(model_class):
        def is_tied(self, config: HFConfig, default: bool) -> bool:
            super().is_tied(config, default)  # reads the key
            return True

        def parameter_name(self, name_in_file: str) -> str:
            return name_with_prefix(super().parameter_name, name_in_file)

        def without_redundant_tensors(
            self, weights: Iterable[tuple[str, np.ndarray]]
        ) -> Iterable[tuple[str, np.ndarray]]:
            kept = ((name, tensor) for name, tensor in weights if not name.startswith("lm_head."))
            return super().without_redundant_tensors(kept)

    Headless.__name__ = Headless.__qualname__ = model_class.__name__
    return Headless


def with_score(model_class: type[Any], *, is_reward_model: bool) -> type[Any]:
    """Makes the class of a decoder with a classifier's head.

    Args:
      model_class: A `CausalLM`.
      is_reward_model: True if the head has two layers with a ReLU between them, as Qwen's reward models have; False for
        one layer.
    """

    class Scoring(without_head(model_class)):
        def __init__(
            self, vllm_config: VllmConfig, rng: nnx.Rngs, quant_config: QuantizationConfig | None = None
        ) -> None:
            super().__init__(vllm_config, rng, quant_config)
            scope = LayerScope(vllm_config, rng, quant_config, names=self.checkpoint_names) / "score"
            labels = num_labels(scope.config)
            self.score = (
                ScoreHead(scope, labels, activation=jax.nn.relu) if is_reward_model else linear_head(scope, labels)
            )

        def parameter_name(self, name_in_file: str) -> str:
            name = super().parameter_name(name_in_file)
            return name.replace("score.0.", "score.dense.").replace("score.2.", "score.out_proj.")

    Scoring.__name__ = Scoring.__qualname__ = model_class.__name__
    return Scoring

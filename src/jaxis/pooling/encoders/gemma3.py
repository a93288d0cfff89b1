"""EmbeddingGemma (arXiv:2509.20354): Gemma 3 with attention in both directions."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxis.config.attention_span import WHOLE_SEQUENCE, AttentionSpan
from jaxis.config.hf_config import HFConfig
from jaxis.config.layer_types import FULL_ATTENTION
from jaxis.models.gemma3 import Gemma3DecoderLayer, Gemma3ForCausalLM
from jaxis.pooling.decoder_heads import without_head

_DENSE = ("dense_2.", "dense_3.")


class Gemma3TextLayer(Gemma3DecoderLayer):
    @classmethod
    def span(cls, config: HFConfig, kind: str) -> AttentionSpan:
        if not config.get("use_bidirectional_attention", False):
            return super().span(config, kind)
        if kind == FULL_ATTENTION:
            config.ignore("sliding_window", because="this layer sees everything")
            return WHOLE_SEQUENCE
        half = config.get("sliding_window", 4096) // 2
        return AttentionSpan(sliding_window=half + 1, lookahead=half)


class Gemma3TextModel(without_head(Gemma3ForCausalLM)):
    """Gemma 3 without a head; with attention in both directions for EmbeddingGemma."""

    layer_class = Gemma3TextLayer

    @classmethod
    def check_config(cls, config: HFConfig) -> None:
        # The reference has the key but does not use it.
        config.expect("attn_logit_softcapping", None)

    def without_redundant_tensors(self, weights: Iterable[tuple[str, np.ndarray]]) -> Iterable[tuple[str, np.ndarray]]:
        # A GGUF file also has sentence-transformers' Dense modules.
        kept = ((name, tensor) for name, tensor in weights if not name.removeprefix("model.").startswith(_DENSE))
        return super().without_redundant_tensors(kept)

    @classmethod
    def first_position(cls, config: HFConfig) -> int:
        del config
        return 0

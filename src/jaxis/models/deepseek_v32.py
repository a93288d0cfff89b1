"""DeepSeek V3.2: DeepSeek V3 with attention limited to tokens that an indexer selects."""

from __future__ import annotations

from jaxis.layers.scope import LayerScope
from jaxis.models.common.family import Family
from jaxis.models.common.sparse_latent import TINY_INDEXER, SparseLatentCausalLM, SparseLatentDecoderLayer


class DeepseekV32DecoderLayer(SparseLatentDecoderLayer):
    def __init__(self, scope: LayerScope) -> None:
        # The indexer's rope pairs halves, unlike attention's own.
        super().__init__(scope, interleaved_index_rope=scope.config.get("indexer_rope_interleave", False))


class DeepseekV32ForCausalLM(SparseLatentCausalLM):
    layer_class = DeepseekV32DecoderLayer


FAMILY = Family(
    "DeepSeek V3.2",
    (DeepseekV32ForCausalLM,),
    "as DeepSeek V3; an indexer selects the 2048 tokens that a token attends to",
    formats=("fp8",),
    tiny=TINY_INDEXER,
    gguf=("deepseek32",),
)

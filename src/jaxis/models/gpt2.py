"""GPT-2: learned positions, layer norms, biases, no gate, and weights that its checkpoints have transposed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxis.models.common.family import Family
from jaxis.models.common.gpt2 import Gpt2CausalLM, Gpt2DecoderLayer

_TRANSPOSED = (".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight")


class GPT2LMHeadModel(Gpt2CausalLM):
    """Its own checkpoints have weights [in, out] under GPT-2's names; what jaxis writes has its own, and [out, in]."""

    layer_class = Gpt2DecoderLayer
    renames = ()
    # The first checkpoints have no prefix.
    other_names = (
        *((f"transformer.{module}", module) for module in ("wte", "wpe", "h", "ln_f")),
        *((old.removeprefix("transformer."), new) for old, new in Gpt2CausalLM.renames),
    )

    def load_weights(self, weights: Iterable[tuple[str, np.ndarray]]) -> set[str]:
        return super().load_weights(
            (name, tensor.T if name.endswith(_TRANSPOSED) else tensor) for name, tensor in weights
        )


FAMILY = Family("GPT-2", (GPT2LMHeadModel,), "learned positions, LayerNorm, plain feed-forward, biases")

"""GPT-2: learned positions, layer norms, biases, no gate, and weights that its checkpoints have transposed."""

from __future__ import annotations

from jaxis.models.common.family import GPT2_NAMES, Family
from jaxis.models.common.gpt2 import Gpt2CausalLM, Gpt2DecoderLayer


class GPT2LMHeadModel(Gpt2CausalLM):
    """GPT-2. Its own checkpoints have weights [in, out] and GPT-2's names; jaxis writes [out, in] and its names."""

    layer_class = Gpt2DecoderLayer
    renames = ()
    module_renames = Gpt2CausalLM.renames
    # The first checkpoints have no prefix.
    other_names = (
        *((f"transformer.{module}", module) for module in ("wte", "wpe", "h", "ln_f")),
        *((old.removeprefix("transformer."), new) for old, new in Gpt2CausalLM.renames),
    )
    transposed = (".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight")


FAMILY = Family(
    "GPT-2",
    (GPT2LMHeadModel,),
    "learned positions, LayerNorm, plain feed-forward, biases",
    gguf=("gpt2",),
    names={"gpt2": GPT2_NAMES},
)

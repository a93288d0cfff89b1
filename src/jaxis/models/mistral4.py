"""Mistral 4 (Small 4): DeepSeek V3's latent attention and experts, with Ministral 3's scaled queries and a softmax."""

from __future__ import annotations

from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mistral import Mistral4DecoderLayer


class Mistral4ForCausalLM(CausalLM):
    layer_class = Mistral4DecoderLayer


FAMILY = Family(
    "Mistral Small 4 (text)",
    (Mistral4ForCausalLM,),
    "latent attention, queries scaled by position, 128 experts by softmax and a shared one",
    formats=("fp8",),
    gguf=("mistral4",),
)

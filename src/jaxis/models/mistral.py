"""Mistral: the Llama layer, with a sliding window in all layers if config.json has one."""

from __future__ import annotations

from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.mistral import MistralDecoderLayer


class MistralForCausalLM(CausalLM):
    layer_class = MistralDecoderLayer


FAMILY = Family("Mistral", (MistralForCausalLM,), "sliding window", gguf=("llama",))

"""Llama 2 to 3.3 (text), InternLM3, IQuest-Coder, TeleChat 3: grouped-query attention, gated MLP, RMS norms before."""

from __future__ import annotations

from jaxis.models.common.decoder import CausalLM
from jaxis.models.common.family import Family
from jaxis.models.common.llama import LlamaDecoderLayer


class LlamaForCausalLM(CausalLM):
    layer_class = LlamaDecoderLayer


FAMILY = Family(
    "Llama 2, 3, 3.1, 3.2 (text), 3.3; InternLM3; IQuest-Coder; TeleChat 3 (dense)",
    (LlamaForCausalLM,),
    "grouped-query attention, llama3 RoPE scaling",
    gguf=("llama",),
    same_code=dict.fromkeys(("internlm3", "iquestcoder", "telechat3"), "llama"),
    other_names={
        "IQuestCoderForCausalLM": LlamaForCausalLM,
        "InternLM3ForCausalLM": LlamaForCausalLM,
        "Telechat3ForCausalLM": LlamaForCausalLM,
        "TeleChat3ForCausalLM": LlamaForCausalLM,
    },
)

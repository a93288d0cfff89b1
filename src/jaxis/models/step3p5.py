"""Step 3.5 and 3.7 Flash: windows with more heads and ropes of their own, gated heads, clamped experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxis.models.common.family import Family
from jaxis.models.common.step import StepCausalLM
from jaxis.models.common.text_part import TextPart


class Step3p5ForCausalLM(StepCausalLM):
    """The text model."""


class Step3p7ForConditionalGeneration(TextPart, Step3p5ForCausalLM):
    """The multimodal checkpoints; images are not supported."""

    text_renames = ()
    text_model_types = ("step3p5",)
    other_parts = ("vision_model", "vit_large_projector", "model.vision_model", "model.vit_large_projector")
    other_keys = ("projector_bias", "understand_projector_stride", "image_token_len", "patch_token_len")


def _tiny_other_setting(twin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of layers with windows, which have more heads."""
    other, head_dim = twin["attention_other_setting"], twin.get("head_dim")
    sizes = {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": head_dim, "true_head_dim": head_dim}
    return other | {key: size for key, size in sizes.items() if key in other}


FAMILY = Family(
    "Step 3.5 Flash; Step 3.7 Flash (text)",
    (Step3p5ForCausalLM, Step3p7ForConditionalGeneration),
    "a window with more heads and another RoPE in three of four layers, a gate on each head, 288 experts by "
    "sigmoid and a shared one, clamped in the last layers",
    tiny={"share_expert_dim": 80, "num_attention_groups": 2, "attention_other_setting": _tiny_other_setting},
)

"""The data type that a config.json gives its weights, in any spelling in use."""

from __future__ import annotations

from jaxis.config.hf_config import HFConfig

_SPELLINGS = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def checkpoint_dtype(config: HFConfig) -> str | None:
    """The name of the type, such as "bfloat16"; None if config.json has none. The text part's goes first."""
    for part in (config.get_text_config(), config):
        if dtype := part.get("dtype", part.get("torch_dtype")):
            name = str(dtype).removeprefix("torch.").lower()
            return None if name == "auto" else _SPELLINGS.get(name, name)
    return None

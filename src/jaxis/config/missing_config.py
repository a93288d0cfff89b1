"""Error messages for folders without config.json."""

from __future__ import annotations

from pathlib import Path

ADAPTER_HINT = (
    "an adapter (LoRA), not a model: give its base model, and this folder as the adapter (--adapter FOLDER --merge)"
)
_HUGGING_FACE = "give the folder of a checkpoint in Hugging Face format"
# A file's name -> what the folder is, and what to do.
_KINDS = {
    "adapter_config.json": ADAPTER_HINT,
    "model_index.json": "a pipeline for images (diffusers), not a language model: give a language model",
    "genai_config.json": f"a model for ONNX Runtime: {_HUGGING_FACE}",
    "mlc-chat-config.json": f"a model compiled by MLC: {_HUGGING_FACE}",
}


def explain_missing_config(folder: Path) -> str:
    """Returns why a folder without config.json cannot be loaded, and what to do."""
    for name, explanation in _KINDS.items():
        if (folder / name).exists():
            return f"{folder} has no config.json: it is {explanation}"
    return f"{folder} has no config.json: {_HUGGING_FACE}"

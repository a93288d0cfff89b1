"""jaxis: LLMs in JAX, brought up, served and trained.

`LLM` runs a model, from a Hugging Face checkpoint or a GGUF file, and `SamplingParams` says how it answers. The `jaxis`
command does the rest: serving, fine-tuning, quantization, and the comparison of a model with `transformers`.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from jaxis.host.cores import limit_threads
from jaxis.host.garbage import nothing_collected
from jaxis.version import __version__

if TYPE_CHECKING:
    from jaxis.llm import LLM, RenderedChat
    from jaxis.lora import LoRARequest
    from jaxis.models.registry import register_model
    from jaxis.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
        StreamOutput,
    )
    from jaxis.prompt_extension import PromptExtension
    from jaxis.sampling_params import SamplingParams
    from jaxis.structured_outputs import StructuredOutputs

# XLA logs alarming but meaningless lines when it reloads a program from its disk cache. Set before JAX is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
limit_threads()

_EXPORTS = {
    "LLM": "jaxis.llm",
    "StreamOutput": "jaxis.outputs",
    "RenderedChat": "jaxis.llm",
    "LoRARequest": "jaxis.lora",
    "PromptExtension": "jaxis.prompt_extension",
    "SamplingParams": "jaxis.sampling_params",
    "StructuredOutputs": "jaxis.structured_outputs",
    "RequestOutput": "jaxis.outputs",
    "CompletionOutput": "jaxis.outputs",
    "EmbeddingOutput": "jaxis.outputs",
    "EmbeddingRequestOutput": "jaxis.outputs",
    "ClassificationOutput": "jaxis.outputs",
    "ClassificationRequestOutput": "jaxis.outputs",
    "ScoringOutput": "jaxis.outputs",
    "ScoringRequestOutput": "jaxis.outputs",
    "Logprob": "jaxis.outputs",
    "register_model": "jaxis.models.registry",
}

__all__ = [
    "LLM",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "Logprob",
    "PromptExtension",
    "RenderedChat",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StreamOutput",
    "StructuredOutputs",
    "__version__",
    "register_model",
]


def __getattr__(name: str) -> Any:
    """Imports names on first use, so that `jaxis --help` does not wait for JAX."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxis' has no attribute {name!r}")
    with nothing_collected():
        return getattr(importlib.import_module(_EXPORTS[name]), name)

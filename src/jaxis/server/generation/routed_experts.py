"""The experts of an answer's tokens, as text in JSON."""

from __future__ import annotations

import base64
import io

import numpy as np

from jaxis.outputs import CompletionOutput


def routed_experts_npy(completion: CompletionOutput) -> str | None:
    """vLLM's form: base64 of a .npy file; see `CompletionOutput.routed_experts`."""
    if completion.routed_experts is None:
        return None
    file = io.BytesIO()
    np.save(file, completion.routed_experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def routed_experts_int32(completion: CompletionOutput) -> str | None:
    """SGLang's form: base64 of the ids as int32, little-endian, one after the other."""
    if completion.routed_experts is None:
        return None
    return base64.b64encode(completion.routed_experts.astype("<i4").tobytes()).decode()

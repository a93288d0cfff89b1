"""Routed experts of an answer's tokens, encoded as text for JSON."""

from __future__ import annotations

import base64
import io

import numpy as np

from jaxis.outputs import CompletionOutput


def routed_experts_npy(completion: CompletionOutput) -> str | None:
    """Returns `CompletionOutput.routed_experts` as base64 of a .npy file, as vLLM does."""
    if completion.routed_experts is None:
        return None
    file = io.BytesIO()
    np.save(file, completion.routed_experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()

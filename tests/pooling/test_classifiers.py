"""Classifiers and cross-encoders against transformers, in float32: scores, alone and in batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from jaxis import LLM
from jaxis.config.hf_config import HFConfig
from jaxis.errors import ConfigError, RequestError
from jaxis.kernels import native
from jaxis.pooling.classifier_settings import read_classifier_settings
from tests.support.encoder_checkpoints import (
    CLASSIFIERS,
    NTK,
    SIZES,
    save_as_published,
    save_classifier,
    save_tokenizer,
    slowed,
    texts,
    texts_with_padding,
)
from tests.support.quick_rows import quick_rows

BOUND = 1e-5


def logits_of(model, token_ids, second_start=None):
    types = {}
    if second_start is not None:
        types["token_type_ids"] = (torch.arange(len(token_ids)) >= second_start).int()[None]
    with torch.no_grad():
        return model(torch.tensor([token_ids]), **types).logits[0].double().numpy()


def softmax(x):
    powers = np.exp(x - x.max())
    return powers / powers.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def probabilities(llm, prompts, **arguments):
    return np.array([output.outputs.probs for output in llm.classify(prompts, **arguments)], np.float32)


def scores(llm, *sides, **arguments):
    return np.array([output.outputs.score for output in llm.score(*sides, **arguments)], np.float32)


QUICK = ["XLMRobertaForSequenceClassification", "Qwen3ForSequenceClassification"]


@pytest.mark.parametrize("family", quick_rows(CLASSIFIERS, QUICK))
def test_classes_are_the_references(family, tmp_path):
    model = save_classifier(tmp_path, family, num_labels=3)
    with LLM(tmp_path, show_progress=False, dtype="float32") as llm:
        expected = [logits_of(model, token_ids) for token_ids in texts(8)]
        found = probabilities(llm, texts(8), use_activation=False)
        np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND * np.abs(expected).max())
        np.testing.assert_allclose(probabilities(llm, texts(8)), list(map(softmax, expected)), rtol=0, atol=BOUND)


@pytest.mark.parametrize("family", quick_rows(CLASSIFIERS, QUICK))
def test_padding_in_a_prompt_is_counted_as_in_the_reference(family, tmp_path):
    """Positions of RoBERTa's kind, and the token that a decoder's head sees."""
    model = save_classifier(tmp_path, family, num_labels=3)
    prompts = texts_with_padding(model.config.pad_token_id)
    expected = [logits_of(model, token_ids) for token_ids in prompts]
    with LLM(tmp_path, show_progress=False, dtype="float32") as llm:
        found = probabilities(llm, prompts, use_activation=False)
        np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND * np.abs(expected).max())


def test_a_reward_model_has_two_layers_and_no_activation(tmp_path):
    """As Qwen2.5-Math-RM is published; transformers has the decoder, and the head is two products."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes)).eval()
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    tensors = model.state_dict() | {f"score.{name}": tensor for name, tensor in head.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=tensors)
    save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    changed = config | {"architectures": ["Qwen2ForRewardModel"], "num_labels": 1, "id2label": {"0": "reward"}}
    (tmp_path / "config.json").write_text(json.dumps(changed))
    with LLM(tmp_path, show_progress=False, dtype="float32") as llm, torch.no_grad():
        hidden = [model.model(torch.tensor([token_ids])).last_hidden_state[0, -1] for token_ids in texts(8)]
        np.testing.assert_allclose(probabilities(llm, texts(8)), [head(row) for row in hidden], rtol=0, atol=BOUND)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    """(folder, the model in the reference) of a cross-encoder."""
    folder = tmp_path_factory.mktemp("reranker")
    return folder, save_classifier(folder, num_labels=1)


@pytest.fixture(scope="module")
def llm(reranker):
    with LLM(reranker[0], show_progress=False) as llm:
        yield llm


def test_gtes_own_format_says_the_same(tmp_path):
    model = save_classifier(tmp_path, "GteForSequenceClassification", num_labels=3)
    save_as_published(tmp_path, ["NewForSequenceClassification"], 20_000.0, NTK)
    slowed(model.gte, 20_000.0, 4.0)
    with LLM(tmp_path, show_progress=False, dtype="float32") as llm:
        expected = [logits_of(model, token_ids) for token_ids in texts(8)]
        found = probabilities(llm, texts(8), use_activation=False)
        np.testing.assert_allclose(found, expected, rtol=0, atol=BOUND * np.abs(expected).max())


QUERIES = ["w1 w2 w3", "w9", "w4 w4 w4 w4"]
DOCUMENTS = ["w7 w8 w9 w10", "w3 w2", "w1 w2 w3 w4 w5 w6"]


def pair_of(query, document):
    ids = [[int(word[1:]) + 5 for word in text.split()] for text in (query, document)]
    return [2, *ids[0], 3, *ids[1], 3], len(ids[0]) + 2


def test_scores_of_pairs_are_the_references(reranker, llm):
    expected = [sigmoid(logits_of(reranker[1], *pair_of(*pair))[0]) for pair in zip(QUERIES, DOCUMENTS, strict=True)]
    np.testing.assert_allclose(scores(llm, QUERIES, DOCUMENTS), expected, rtol=0, atol=BOUND)
    # The types of tokens count: without them, the scores are others.
    without = sigmoid(logits_of(reranker[1], pair_of(QUERIES[0], DOCUMENTS[0])[0])[0])
    assert abs(expected[0] - without) > 100 * BOUND
    one_to_many = llm.score(QUERIES[0], [{"text": text} for text in DOCUMENTS], use_activation=False)
    expected = [logits_of(reranker[1], *pair_of(QUERIES[0], text))[0] for text in DOCUMENTS]
    np.testing.assert_allclose([each.outputs.score for each in one_to_many], expected, rtol=0, atol=BOUND)
    assert one_to_many[1].prompt_token_ids == pair_of(QUERIES[0], DOCUMENTS[1])[0]


@pytest.mark.sampled
@pytest.mark.skipif(not native.usable(), reason="XLA does not promise it")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_score_does_not_depend_on_other_pairs(reranker, quantization):
    documents = [" ".join(f"w{token_id - 5}" for token_id in ids[1:-1]) for ids in texts()]
    with LLM(reranker[0], show_progress=False, quantization=quantization, max_num_batched_tokens=256) as llm:
        together = scores(llm, QUERIES[0], documents)
        for number in (0, 7, 23, 39):
            np.testing.assert_array_equal(scores(llm, QUERIES[0], documents[number])[0], together[number])
        np.testing.assert_array_equal(scores(llm, QUERIES[0], documents[::-1])[::-1], together)


def test_of_a_pair_that_is_too_long_the_second_text_is_cut(llm):
    [cut] = llm.score("w1 w2", "w3 " * 100, truncate_prompt_tokens=10)
    assert cut.prompt_token_ids == [2, 6, 7, 3, *[8] * 5, 3]
    with pytest.raises(RequestError, match="the first text leaves no room for the second text in 10 tokens"):
        llm.score("w1 " * 8, "w3 " * 100, truncate_prompt_tokens=10)


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (("w1", "w1 " * 80), "the second text has 84 tokens, more than the 80"),
        (("w1", ["w1", ""]), "the second text of pair 1 of 2 is empty"),
        ((["w1", "w2"], ["w1"]), "data_1 has 2 texts and data_2 has 1"),
        (("w1", [[2, 6, 3]]), r"data_2\[0\] must be a string"),
        (("w1", []), "data_2 is empty"),
    ],
)
def test_pairs_that_cannot_be_scored_are_one_clear_error(llm, sides, message):
    with pytest.raises(RequestError, match=message):
        llm.score(*sides)


def test_models_of_one_kind_do_not_do_what_the_others_do(llm):
    with pytest.raises(RequestError, match="makes scores and no vectors"):
        llm.embed("w1")
    with LLM(show_progress=False, runner="pooling") as embedder, pytest.raises(RequestError, match="has no labels"):
        embedder.classify("w1")
    assert probabilities(llm, "w1").shape == (1, 1)


@pytest.mark.parametrize(
    ("config", "activation", "labels"),
    [
        ({}, "softmax", ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, "sigmoid", ("LABEL_0",)),
        ({"id2label": {"0": "no", "1": "yes"}}, "softmax", ("no", "yes")),
        ({"id2label": {"0": "a"}, "problem_type": "regression"}, "identity", ("a",)),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, "sigmoid", ("LABEL_0", "LABEL_1")),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "identity",
            ("LABEL_0",),
        ),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "identity",
            ("LABEL_0",),
        ),
    ],
)
def test_what_follows_the_logits(config, activation, labels):
    settings = read_classifier_settings(HFConfig(config), ["BertForSequenceClassification"], Path("bert"))
    assert (settings.activation, settings.labels) == (activation, labels)
    logits = np.float32([[-2.0, 10.0][: len(labels)]])
    expected = {"identity": lambda x: x, "sigmoid": sigmoid, "softmax": softmax}[activation](logits[0].astype(float))
    np.testing.assert_allclose(settings.scores(logits)[0], expected, rtol=1e-6)


def test_labels_and_activations_that_make_no_sense_are_refused():
    for config, message in (
        ({"id2label": {"0": "a", "2": "b"}}, "name no labels from 0"),
        ({"num_labels": 1, "sbert_ce_default_activation_function": "os.system"}, "asks for the activation 'os.system'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_classifier_settings(HFConfig(config), ["BertForSequenceClassification"], Path("bert"))

"""Rerankers whose scores are the logits of words: Qwen3-Reranker, with its card's recipe in torch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from jaxis import LLM
from jaxis.errors import ConfigError, RequestError
from tests.support.encoder_checkpoints import SIZES

# As the card has it.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
QUERY, DOCUMENTS = "a b c", ["c b a", "d", "e f g h a b c d e f g h", "d"]
OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(folder, model, tokenizer) of a Qwen3-Reranker as small as can be."""
    folder = tmp_path_factory.mktemp("hub") / "Qwen3-Reranker-tiny"
    folder.mkdir()
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    letters = ["no", "yes", *"abcdefgh", *(PREFIX + SUFFIX + TASK).split(), "<Instruct>:", "<Query>:", "<Document>:"]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(["[UNK]", *special, *letters]))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    backend.save(str(folder / "tokenizer.json"))
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**sizes, tie_word_embeddings=True)
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + ("norm" in name))
    model.save_pretrained(folder)
    return folder, model, backend


def recipe(checkpoint, query, document, task=TASK):
    """(the score, the token ids) by the card."""
    _, model, backend = checkpoint
    body = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    ids = [token for text in (PREFIX, body, SUFFIX) for token in backend.encode(text, add_special_tokens=False).ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    pair = torch.stack([logits[backend.token_to_id("no")], logits[backend.token_to_id("yes")]])
    return torch.nn.functional.log_softmax(pair, dim=0)[1].exp().item(), ids


def scores(outputs):
    return [output.outputs.score for output in outputs]


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint[0], show_progress=False, dtype="float32") as llm:
        yield llm


def test_scores_are_the_cards(checkpoint, llm):
    found = llm.score(QUERY, DOCUMENTS)
    expected = [recipe(checkpoint, QUERY, document) for document in DOCUMENTS]
    np.testing.assert_allclose(scores(found), [score for score, _ in expected], rtol=0, atol=1e-6)
    assert [each.prompt_token_ids for each in found] == [ids for _, ids in expected]
    assert found[1].outputs.score == found[3].outputs.score == llm.score(QUERY, "d")[0].outputs.score
    [other] = llm.score(QUERY, "d", instruction="retrieve")
    assert other.outputs.score == pytest.approx(recipe(checkpoint, QUERY, "d", "retrieve")[0], abs=1e-6)


def test_pairs_that_the_caller_wrote_out_are_taken_as_they_are(checkpoint, llm):
    query = f"{PREFIX}<Instruct>: {TASK}\n<Query>: {QUERY}\n"
    assert scores(llm.score(query, f"<Document>: d{SUFFIX}")) == scores(llm.score(QUERY, "d"))


def test_a_long_document_is_cut_before_the_template_ends(checkpoint, llm):
    size = len(recipe(checkpoint, QUERY, "d")[1])
    [cut] = llm.score(QUERY, "d " * 200, truncate_prompt_tokens=size + 2)
    assert cut.outputs.score == pytest.approx(recipe(checkpoint, QUERY, "d d d")[0], abs=1e-6)
    with pytest.raises(RequestError, match=r"the second text has \d+ tokens, more than the 128"):
        llm.score(QUERY, "d " * 200)
    with pytest.raises(RequestError, match="leaves no room for the second text"):
        llm.score("d " * 50, "d " * 200, truncate_prompt_tokens=size)


def test_vllms_overrides_say_the_same(checkpoint, llm, tmp_path):
    (tmp_path / "elsewhere").symlink_to(checkpoint[0])
    with LLM(tmp_path / "elsewhere", show_progress=False, dtype="float32", hf_overrides=OVERRIDES) as other:
        assert scores(other.score(QUERY, DOCUMENTS)) == scores(llm.score(QUERY, DOCUMENTS))


def test_overrides_that_make_no_sense_are_refused(checkpoint):
    for change, message in (
        ({"classifier_from_token": ["no", "yes", "a"], "method": "from_2_way_softmax"}, "from_2_way_softmax takes two"),
        ({"classifier_from_token": "yes"}, "must be a list of words"),
        ({"classifier_from_token": ["a b"]}, "'a b' has 2 tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(checkpoint[0], show_progress=False, hf_overrides=OVERRIDES | change)


def test_a_card_names_the_model(checkpoint, tmp_path):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).symlink_to(checkpoint[0] / name)
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Qwen3-Reranker-0.6B\n")
    with LLM(tmp_path, show_progress=False, load_format="dummy") as llm:
        assert len(llm.score(QUERY, DOCUMENTS)) == 4
    with (
        pytest.raises(RequestError, match="instruction is for rerankers"),
        LLM(show_progress=False, runner="pooling") as embedder,
    ):
        embedder.score("a", "b", instruction="c")
    assert "Qwen3ForCausalLM" in json.loads((tmp_path / "config.json").read_text())["architectures"]

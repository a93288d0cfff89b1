"""The embedded model's corpus, tokenizer and evaluation file."""

import itertools
import json
import random
import re
from collections import Counter

import pytest
import tiny_data
from tiny import relations, skills, tables
from tiny.corpus import Conversation, draw, evaluation_rows, vary
from tiny.frames import framed_templates
from tiny.scores import exact
from tiny.tokenizer import VOCAB_SIZE, render, sample_text, train_tokenizer
from tokenizers import Tokenizer

from tests.support.places import REPOSITORY

ASSET = REPOSITORY / "src" / "jaxis" / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ASSET / "tokenizer.json"))


@pytest.fixture(scope="module")
def evaluation_file():
    lines = (REPOSITORY / "tests" / "data" / "tiny_eval.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def samples(count, seed=0):
    rng = random.Random(seed)
    return [draw(rng) for _ in range(count)]


def normalised(text):
    return re.sub(r"[^a-z0-9+*/{}-]+", " ", text.lower()).strip()


def question(row):
    return next(message["content"] for message in reversed(row["messages"]) if message["role"] == "user")


def test_the_same_seed_draws_the_same_corpus_and_another_seed_another():
    assert samples(200) == samples(200)
    assert samples(200) != samples(200, seed=1)


def test_the_evaluation_file_is_what_the_generator_writes(evaluation_file):
    assert evaluation_file == json.loads(json.dumps(list(evaluation_rows())))
    assert len(evaluation_file) >= 300


@pytest.mark.parametrize("relation", relations.RELATIONS, ids=lambda relation: relation.category)
def test_held_out_phrasings_of_a_relation_are_not_among_those_trained_on(relation):
    trained = {*relation.train, *framed_templates(relation.category)}
    assert not {normalised(t) for t in trained} & {normalised(t) for t in relation.held_out}
    assert len(set(relation.train)) == len(relation.train) >= 10


def test_no_evaluation_question_is_drawn_for_training(evaluation_file):
    drawn = {
        normalised(message["content"])
        for sample in samples(20_000)
        if isinstance(sample, Conversation)
        for message in sample.messages
        if message["role"] == "user"
    }
    asked = {normalised(question(row)) for row in evaluation_file}
    assert len(drawn) > 10_000
    assert not drawn & asked


def test_varying_a_question_leaves_its_facts_in_place():
    rng = random.Random(0)
    for _ in range(500):
        assert "capital of france" in vary(rng, "What is the capital of France?").lower()


def test_sums_in_the_corpus_are_right():
    checked = 0
    for sample in samples(3000):
        text = sample if isinstance(sample, str) else "\n".join(m["content"] for m in sample.messages)
        for a, operator, b, result in re.findall(r"\b(\d+) ([-+*]) (\d+) = (\d+)", text):
            a, b = int(a), int(b)
            assert int(result) == {"+": a + b, "-": a - b, "*": a * b}[operator]
            checked += 1
    assert checked > 500


@pytest.mark.parametrize(
    ("rows", "key"),
    [
        ("countries", "country"),
        ("countries", "capital"),
        ("elements", "element"),
        ("elements", "symbol"),
        ("coloured_things", "thing"),
        ("plurals", "singular"),
    ],
)
def test_a_question_has_one_answer(rows, key):
    assert max(Counter(row[key] for row in tables.TABLES[rows]).values()) == 1


def test_no_word_has_two_opposites():
    words = [word for row in tables.TABLES["opposites"] for word in row.values()]
    assert len(set(words)) == len(words)


def test_json_answers_parse_and_hold_the_values_asked_for():
    rng = random.Random(0)
    for _ in range(200):
        exchange = skills.json_object(rng)
        asked, answer = (message["content"] for message in exchange.messages)
        for key, value in json.loads(answer).items():
            assert f"{key} {value}" in asked


def test_tool_calls_in_the_evaluation_name_a_tool_they_were_given(evaluation_file):
    calls = [row for row in evaluation_file if row["answer"].startswith("<tool_call>")]
    assert len(calls) >= 5
    for row in calls:
        call = json.loads(row["answer"].removeprefix("<tool_call>").removesuffix("</tool_call>"))
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in row["tools"]}
        assert set(call["arguments"]) == set(schemas[call["name"]]["required"])


def test_training_the_tokenizer_is_deterministic_and_fills_the_vocabulary():
    first, again = (train_tokenizer(samples=1500) for _ in range(2))
    assert first.to_str() == again.to_str()
    assert train_tokenizer(seed=1, samples=1500).to_str() != first.to_str()


def test_the_committed_tokenizer_has_the_size_the_model_is_built_for(tokenizer):
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


def test_digits_are_tokens_of_their_own(tokenizer):
    assert tokenizer.encode("x1234").tokens[-4:] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    "text", ["Zażółć gęślą jaźń", "日本語 🙂\n\n  tabs\t", "a\u00a0b", "<tool_call>\n{}</tool_call>"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_transformers_renders_and_tokenizes_conversations_alike(tokenizer):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(ASSET)
    for sample in samples(300):
        if isinstance(sample, str):
            assert reference(sample)["input_ids"] == tokenizer.encode(sample).ids
            continue
        rendered = render(sample.messages, sample.tools, add_generation_prompt=True)
        assert rendered == reference.apply_chat_template(
            sample.messages, tools=sample.tools, add_generation_prompt=True, tokenize=False
        )
        assert reference(rendered)["input_ids"] == tokenizer.encode(rendered).ids


def test_a_tool_call_given_as_text_renders_like_one_given_as_an_object():
    function = {"name": "get_time", "arguments": {"city": "Paris"}}
    as_text = function | {"arguments": json.dumps(function["arguments"])}
    texts = {
        render([skills.user("What time is it in Paris?"), {"role": "assistant", "content": None, "tool_calls": [call]}])
        for call in ({"type": "function", "function": function}, {"type": "function", "function": as_text})
    }
    assert len(texts) == 1
    assert '<tool_call>\n{"name": "get_time", "arguments": {"city": "Paris"}}\n</tool_call>' in texts.pop()


def test_rows_are_the_same_for_the_same_seed_and_short_enough(tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_data, "LONG_CHATS", 0.1)  # so that few rows hold some
    for samples_of, longest in (
        (tiny_data.facts, tiny_data.MAX_FACT_TOKENS),
        (tiny_data.chats, tiny_data.MAX_CHAT_TOKENS),
    ):
        first, again = (list(itertools.islice(samples_of(random.Random(1), tokenizer), 300)) for _ in range(2))
        assert first == again
        lengths = [tiny_data.num_tokens(tokenizer, sample) for sample in first]
        assert longest / 3 < max(lengths) <= longest


def test_rows_are_messages_with_their_tools_or_whole_texts(tokenizer):
    samples = list(itertools.islice(tiny_data.chats(random.Random(1), tokenizer), 1000))
    rows = list(tiny_data.rows_of(samples, random.Random(2)))
    whole = []
    for sample, row in zip(samples, rows, strict=True):
        if isinstance(sample, Conversation):
            whole.append("text" in row)
        if "text" in row:
            assert row == {"text": sample_text(sample)}
        else:
            assert (row["messages"], row.get("tools")) == (sample.messages, sample.tools or None)
    assert any("tools" in row for row in rows)
    assert sum(whole) / len(whole) == pytest.approx(tiny_data.WHOLE_CHATS, rel=0.3)


def test_only_an_answer_that_is_right_word_for_word_scores():
    answers = [[skills.assistant(text)] for text in ("Rome.", "Rome", "Paris.")]
    assert exact(completions=answers, reference=["Rome."] * 3) == [1.0, 0.0, 0.0]


def test_held_out_rows_are_the_evaluation_with_its_answers(evaluation_file):
    rows = list(tiny_data.held_out())
    assert [(row["messages"][:-1], row["messages"][-1]["content"]) for row in rows] == [
        (row["messages"], row["answer"]) for row in evaluation_file
    ]
    assert [row.get("tools") for row in rows] == [row.get("tools") for row in evaluation_file]

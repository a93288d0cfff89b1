"""Rows, masks, packs and batches, as pure functions."""

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxis.errors import ConfigError
from jaxis.host import extras
from jaxis.training.batches import Batches, BatchShape, Mixture, pack
from jaxis.training.config.data import DatasetParams
from jaxis.training.examples import Example, ExampleEncoder, shown
from jaxis.training.rows import DataRow, Dialogue, Preference, Text, read_content, read_rows
from tests.support.training import dialogue, write_rows

CALL = {"id": "abcde1234", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [ASKED, ANSWERED], "source": "web"}, Dialogue([ASKED, ANSWERED])),
        ({"messages": [ASKED, ANSWERED], "tools": [TOOL]}, Dialogue([ASKED, ANSWERED], [TOOL])),
        ({"conversation": {"messages": [ASKED, ANSWERED]}}, Dialogue([ASKED, ANSWERED])),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "c"},
            Dialogue([{"role": "system", "content": "c"}, ASKED, ANSWERED]),
        ),
        ({"conversations": [ASKED, ANSWERED]}, Dialogue([ASKED, ANSWERED])),
        (
            {"messages": [ASKED, {**ANSWERED, "weight": 0}, ASKED, {**ANSWERED, "weight": 1}]},
            Dialogue([ASKED, ANSWERED, ASKED, ANSWERED], skipped=frozenset({1})),
        ),
        ({"prompt": "a", "completion": "b"}, Text("a", "b")),
        ({"prompt": [ASKED], "completion": [ANSWERED]}, Dialogue([ASKED, ANSWERED], None, 1)),
        ({"instruction": "a", "input": "", "output": "b"}, Dialogue([ASKED, ANSWERED])),
        (
            {"instruction": "a", "input": "c", "output": "b"},
            Dialogue([{"role": "user", "content": "a\n\nc"}, ANSWERED]),
        ),
        ({"text": "a b"}, Text(None, "a b")),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, Preference(Text("a", "b"), Text("a", "c"))),
        (
            {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, {**ANSWERED, "content": "c"}]},
            Preference(Dialogue([ASKED, ANSWERED], None, 1), Dialogue([ASKED, {**ANSWERED, "content": "c"}], None, 1)),
        ),
    ],
)
def test_every_shape_of_a_row_is_read(row, expected):
    assert read_content(row) == expected


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no message of the assistant"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "role='robot'"),
        ('{"question": "a", "answer": "b"}', "has the keys 'answer', 'question'; expected messages;"),
        ('{"conversations": [{"from": "cat", "value": "a"}]}', r"conversations\[0\] needs .*, not 'cat'"),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "has no message of the assistant"),
        ('{"messages": [{"role": "user", "content": "a", "weight": 1}]}', r"messages\[0\].weight=1 must be 0 or 1"),
        ('{"text": ""}', "text is empty"),
        ('{"text": 3}', "text must be a string"),
        ("[1]", "not a JSON object"),
        ("{", "not JSON"),
        ('{"chosen": "a", "rejected": "b"}', "there is no prompt"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, line, named):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(dialogue("a", "b")) + "\n\n" + line + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=named) as caught:
        read_rows(DatasetParams(dataset_path=str(path)), 0)
    assert f"{path}, line 3: " in str(caught.value)
    assert "(and 1 more such rows)" in str(caught.value)


def columns_and_texts(path):
    rows, digests = read_rows(DatasetParams(dataset_path=str(path)), 0)
    return [(row.content, dict(row.columns)) for row in rows], [row.where for row in rows], digests


def test_csv_and_parquet_have_the_rows_of_jsonl(tmp_path):
    plain = [{"prompt": 'a, "b"\nc', "completion": "é", "topic": "x"}, {"prompt": "d", "completion": "e"}]
    chat = [{**dialogue("a", "b"), "topic": "x"}, {"messages": [ASKED, {**ANSWERED, "tool_calls": [CALL]}]}]
    for name, rows in (("plain", plain), ("chat", chat)):
        expected, _, _ = columns_and_texts(write_rows(tmp_path / f"{name}.jsonl", rows))
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{name}.parquet", row_group_size=1)
        found, where, _ = columns_and_texts(tmp_path / f"{name}.parquet")
        assert found == expected
        assert where == [f"{tmp_path}/{name}.parquet, row {i}" for i in (1, 2)]
    with (tmp_path / "plain.csv").open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.DictWriter(file, list(plain[0]))
        writer.writeheader()
        writer.writerows(plain)
    found, where, _ = columns_and_texts(tmp_path / "plain.csv")
    assert found == columns_and_texts(tmp_path / "plain.jsonl")[0]
    assert where == [f"{tmp_path}/plain.csv, row {i}" for i in (1, 2)]


def test_a_folder_is_its_files_by_name_each_with_a_digest(tmp_path):
    (tmp_path / "README.md").write_text("a card")
    for i, text in enumerate("ba"):
        parquet.write_table(pyarrow.Table.from_pylist([{"text": text}]), tmp_path / f"{i}.parquet")
    write_rows(tmp_path / "2.jsonl", [{"text": "c"}])
    found, _, digests = columns_and_texts(tmp_path)
    assert [content.completion for content, _ in found] == ["b", "a", "c"]
    assert [Path(path).name for path in digests] == ["0.parquet", "1.parquet", "2.jsonl"]
    write_rows(tmp_path / "2.jsonl", [{"text": "d"}])
    changed = columns_and_texts(tmp_path)[2]
    assert [changed[path] == digests[path] for path in digests] == [True, True, False]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.parquet", b"not parquet", r"a\.parquet is not parquet that can be read: "),
        ("a.csv", b"text\n\xff\n", r"a\.csv is not CSV in UTF-8: "),
        ("a.csv", b"prompt,completion\na,b\na\n", r"a\.csv, row 2: has another number of cells than the 2 names"),
        ("a.csv", b"question,answer\na,b\n", r"a\.csv, row 1: has the keys 'answer', 'question'; expected"),
        ("a.csv", b"text\n", "a.csv has no rows"),
        ("folder/a.txt", b"a", r"folder has no data files"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content, named):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=named) as caught:
        read_rows(DatasetParams(dataset_path=str(path if path.parent == tmp_path else path.parent)), 0)
    assert "\n" not in str(caught.value)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "_is_installed", lambda _: False)
    with pytest.raises(ConfigError, match=r"a\.parquet needs pyarrow: pip install 'jaxis\[parquet\]'"):
        read_rows(DatasetParams(dataset_path=str(tmp_path / "a.parquet")), 0)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from jaxis.tokenizer import Tokenizer

    return Tokenizer.from_path(checkpoint("qwen3"))


def learned_texts(tokenizer, messages, template, target="all_assistant_turns", max_tokens=4096, tools=None):
    """The learned parts of a conversation, in «», one string for each example."""
    variables = {"chat_template": template, "bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    encoder = ExampleEncoder(tokenizer, variables, target, max_tokens)
    examples = encoder.encode([DataRow(Dialogue(messages, tools), "row")]).examples
    return [shown(example, tokenizer) for example in examples]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen 3's: reasoning is left out of answers before the last question.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_each_answer_and_the_token_that_ends_it_are_learned(tokenizer):
    messages = dialogue("one", "two", "three", "four")["messages"]
    begin, end = "<|im_start|>", "<|im_end|>"
    assert learned_texts(tokenizer, messages, CHATML) == [
        f"{begin}user\none{end}\n{begin}assistant\n«two{end}»\n{begin}user\nthree{end}\n{begin}assistant\n«four{end}»"
    ]
    assert learned_texts(tokenizer, messages, CHATML, "final_assistant_turn") == [
        f"{begin}user\none{end}\n{begin}assistant\ntwo{end}\n{begin}user\nthree{end}\n{begin}assistant\n«four{end}»"
    ]


def test_an_answer_that_begins_a_conversation_is_learned_and_one_of_weight_0_is_not(tokenizer):
    messages = [ANSWERED, ASKED, ANSWERED, ASKED, ANSWERED]
    row = read_content({"messages": [ANSWERED, ASKED, {**ANSWERED, "weight": 0}, ASKED, {**ANSWERED, "weight": 1}]})
    assert isinstance(row, Dialogue)
    begin, end = "<|im_start|>", "<|im_end|>"
    skipped, asked = f"{begin}assistant\nb{end}\n", f"{begin}user\na{end}\n"
    answer = f"{begin}assistant\n«b{end}»"
    assert learned_texts(tokenizer, messages[:1], CHATML) == [answer]
    variables = {"chat_template": CHATML, "bos_token": "<|endoftext|>", "eos_token": end}
    encoder = ExampleEncoder(tokenizer, variables, "all_assistant_turns", 4096)
    [example] = encoder.encode([DataRow(row, "row")]).examples
    assert shown(example, tokenizer) == f"{answer}\n{asked}{skipped}{asked}{answer}"


def test_a_template_that_changes_earlier_turns_makes_an_example_of_each(tokenizer):
    messages = dialogue("one", "two", "three", "four")["messages"]
    messages[1]["reasoning_content"] = messages[3]["reasoning_content"] = "hm"
    begin, end = "<|im_start|>", "<|im_end|>"
    thought = "<think>\nhm\n</think>\n"
    assert learned_texts(tokenizer, messages, THINKING) == [
        f"{begin}user\none{end}\n{begin}assistant\n«{thought}two{end}»",
        f"{begin}user\none{end}\n{begin}assistant\ntwo{end}\n{begin}user\nthree{end}\n{begin}assistant\n"
        f"«{thought}four{end}»",
    ]


def test_an_example_of_which_nothing_is_learned_is_named(tokenizer):
    rows = [DataRow(Dialogue(dialogue("one two three", "four")["messages"]), "rows.jsonl, line 7")]
    with pytest.raises(ConfigError, match=r"rows\.jsonl, line 7: no token of it is learned: its first 4 tokens"):
        ExampleEncoder(tokenizer, {"chat_template": CHATML}, "all_assistant_turns", 4).encode(rows)


@pytest.mark.parametrize("seed", range(5))
def test_packs_hold_every_example_once_and_are_as_many_for_any_order(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 65, 200).tolist()
    packs = [pack(lengths, 64, rng.permutation(200).tolist()) for _ in range(3)]
    for rows in packs:
        assert sorted(i for row in rows for i in row) == list(range(200))
        assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    assert len({len(rows) for rows in packs}) == 1
    assert len(packs[0]) <= 1.1 * sum(lengths) / 64 + 1


def example(ids):
    return Example(np.asarray(ids, np.int32), np.asarray([False, *[True] * (len(ids) - 1)]), "")


@pytest.mark.parametrize("packs", [False, True])
def test_an_epoch_has_every_learned_token_once_and_depends_on_its_number_alone(packs):
    items = [(example(np.arange(100 * n, 100 * n + n % 7 + 2)),) for n in range(23)]
    batches = Batches(items, BatchShape(2, 2, 16), seed=3, packs=packs)

    def learned(step):
        batch = batches.batch(step)
        return np.sort(batch.targets[batch.learned]).tolist()

    steps = batches.steps_per_epoch
    expected = sorted(int(i) for (each,) in items for i in each.ids[1:])
    epochs = [[learned(step) for step in range(n * steps, (n + 1) * steps)] for n in (0, 1)]
    assert [sorted(itertools.chain.from_iterable(epoch)) for epoch in epochs] == [expected, expected]
    assert epochs[0] != epochs[1]
    again = Batches(items, BatchShape(2, 2, 16), seed=3, packs=packs)
    np.testing.assert_array_equal(again.batch(steps + 1).ids, batches.batch(steps + 1).ids)


@pytest.mark.parametrize(("stops_at_first", "counts"), [(True, [10, 4]), (False, [24, 10])])
def test_a_mixture_has_its_proportions_in_every_epoch_and_repeats_no_row_before_all_have_come(stops_at_first, counts):
    mixture = Mixture([10, 10], [0.7, 0.3], stops_at_first=stops_at_first, seed=5)
    assert mixture.counts == counts
    epochs = [mixture.epoch(number).tolist() for number in range(7)]
    assert [[sum(i < 10 for i in epoch), sum(i >= 10 for i in epoch)] for epoch in epochs] == [counts] * 7
    for rows in (range(10), range(10, 20)):
        times = np.bincount([i for epoch in epochs for i in epoch if i in rows], minlength=20)[list(rows)]
        assert max(times) - min(times) <= 1
    assert Mixture([10, 10], [0.7, 0.3], stops_at_first=stops_at_first, seed=5).epoch(4).tolist() == epochs[4]
    assert epochs[0] != epochs[1]
    batches = Batches([(example([n, n]),) for n in range(20)], BatchShape(1, 2, 64), seed=5, mixture=mixture)
    ids = [i for step in range(batches.steps_per_epoch) for i in batches.batch(step).ids[0, :, 0].tolist()]
    assert ids == epochs[0]

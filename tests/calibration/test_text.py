"""Texts become windows of token ids, or errors of one line that say where."""

import json

import pytest
import tokenizers

from jaxis.calibration.text import read_documents, read_windows
from jaxis.errors import RequestError
from jaxis.tokenizer import Tokenizer
from tests.support.cli_model import write_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token a byte, a chat template, and no beginning of sequence."""
    return Tokenizer.from_path(write_checkpoint(tmp_path_factory.mktemp("text") / "model"))


@pytest.fixture(scope="module")
def tokenizer_with_bos(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("text") / "model")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = backend.token_to_id("<|im_start|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|im_start|>"}))
    return Tokenizer.from_path(folder)


def test_a_text_file_is_one_document_in_consecutive_windows(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("0123456789")
    windows = read_windows(tmp_path / "a.txt", tokenizer, 4)
    assert [tokenizer.decode(window) for window in windows] == ["0123", "4567", "89"]


def test_a_window_of_one_token_predicts_nothing_and_is_left_out(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("01234")
    assert len(read_windows(tmp_path / "a.txt", tokenizer, 4)) == 1


def test_every_window_begins_as_the_tokenizer_begins_a_string(tokenizer_with_bos, tmp_path):
    (tmp_path / "a.txt").write_text("0123456789")
    windows = read_windows(tmp_path / "a.txt", tokenizer_with_bos, 4)
    assert {window[0] for window in windows} == {tokenizer_with_bos.bos_token_id}
    assert [tokenizer_with_bos.decode(window) for window in windows] == ["012", "345", "678", "9"]


def test_each_line_of_a_jsonl_file_is_a_document(tokenizer, tmp_path):
    rows = [{"text": "a\u2028b", "id": 1}, {"messages": [{"role": "user", "content": "hi"}]}]
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in read_documents(path, tokenizer)]
    assert texts == ["a\u2028b", "<|im_start|>user\nhi<|im_end|>\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is list; expected an object"),
        ("{}", "line 2 needs exactly one of 'text' and 'messages'"),
        ('{"text": "a", "messages": []}', "line 2 needs exactly one"),
        ('{"text": 1}', "line 2: 'text' is int; expected a string"),
        ('{"messages": "hi"}', "line 2: 'messages' is str; expected a list of messages"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}', "line 2: .*odd role"),
    ],
)
def test_a_wrong_line_is_named(tokenizer, tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(RequestError, match=message) as raised:
        list(read_documents(tmp_path / "a.jsonl", tokenizer))
    assert "\n" not in str(raised.value)


def test_files_that_hold_no_text(tokenizer, tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text("a")
    with pytest.raises(RequestError, match=r"latin.txt is not UTF-8 text \(byte 3\)"):
        read_windows(tmp_path / "latin.txt", tokenizer)
    with pytest.raises(RequestError, match=r"none.txt cannot be read: No such file"):
        read_windows(tmp_path / "none.txt", tokenizer)
    with pytest.raises(RequestError, match="no text of at least 2 tokens"):
        read_windows(tmp_path / "short.txt", tokenizer)


def test_text_needs_a_tokenizer(tmp_path):
    with pytest.raises(RequestError, match="has no tokenizer"):
        read_windows(tmp_path / "a.txt", None)

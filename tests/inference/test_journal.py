"""The scratch file: what was appended is there after any cut, and the output appears whole."""

import errno
import json
import os

import pytest

from jaxis.errors import ConfigError, EngineError
from jaxis.inference.journal import Journal, RowResult, dump_line, run_key

RESULTS = [RowResult(i, "completed", {"row": i, "text": "é\n" * i}) for i in range(5)]


def opened(tmp_path, key="key", num_rows=5):
    return Journal(tmp_path / "out.jsonl", key, num_rows)


def test_output_stands_in_the_order_of_the_input_and_nothing_else_remains(tmp_path):
    journal = opened(tmp_path)
    for result in reversed(RESULTS):
        journal.append([result])
    journal.finish()
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").open()] == [result.value for result in RESULTS]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_file_cut_anywhere_keeps_every_whole_line(tmp_path):
    journal = opened(tmp_path)
    journal.append(RESULTS)
    journal.close()
    data = journal.path.read_bytes()
    for length in range(len(data) + 1):
        journal.path.write_bytes(data[:length])
        again = opened(tmp_path)
        num_whole = data[:length].count(b"\n")
        assert [again.is_done(i) for i in range(5)] == [i < num_whole for i in range(5)]
        assert again.num_completed == num_whole
        again.append(RESULTS[num_whole:])
        assert [json.loads(line) for line in again.lines_from(0)] == [result.value for result in RESULTS]
        again.close()


def test_a_damaged_line_is_computed_again_and_no_other(tmp_path):
    journal = opened(tmp_path)
    journal.append(RESULTS)
    journal.close()
    data = bytearray(journal.path.read_bytes())
    data[data.index(b'"row": 2') + 7] ^= 1
    journal.path.write_bytes(data)
    again = opened(tmp_path)
    assert [i for i in range(5) if not again.is_done(i)] == [2]
    again.close()


def test_a_failure_that_may_go_away_is_tried_again_by_the_next_process(tmp_path):
    journal = opened(tmp_path, num_rows=3)
    journal.append([RowResult(0, "retry", {"error": 1}), RowResult(1, "failed", {"error": 2}), RESULTS[2]])
    assert (journal.num_completed, journal.num_failed) == (1, 2)
    assert len(list(journal.lines_from(0))) == 3
    journal.close()
    again = opened(tmp_path, num_rows=3)
    assert [again.is_done(i) for i in range(3)] == [False, True, True]
    assert (again.num_completed, again.num_failed) == (1, 1)
    again.append([RowResult(0, "completed", {"text": "now"})])
    assert (again.num_completed, again.num_failed) == (2, 1)
    again.finish()
    assert json.loads((tmp_path / "out.jsonl").open().readline()) == {"text": "now"}


def test_a_full_disk_loses_only_what_did_not_fit(tmp_path, monkeypatch):
    journal = opened(tmp_path)
    journal.append(RESULTS[:2])
    write = os.write

    def write_half(file, data):
        if len(data) < 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr("jaxis.inference.journal.os.write", write_half)
        with pytest.raises(EngineError, match="No space left"):
            journal.append(RESULTS[2:4])
    journal.close()
    again = opened(tmp_path)
    num_kept = again.num_completed
    assert num_kept in (2, 3)  # the third may have fitted whole
    again.append(RESULTS[num_kept:])
    again.finish()
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").open()] == [result.value for result in RESULTS]


def test_other_settings_have_another_file(tmp_path):
    assert len({run_key("a", {"temperature": 0.1}), run_key("a", {"temperature": 0.2}), run_key("b")}) == 3
    first = opened(tmp_path, "one")
    first.append(RESULTS[:1])
    first.close()
    second = opened(tmp_path, "two")
    assert not second.is_done(0)
    assert second.other_runs() == [first.path]
    second.close()


def test_a_second_process_at_the_same_run_is_refused(tmp_path):
    first = opened(tmp_path)
    with pytest.raises(ConfigError, match="in use"):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


def test_outputs_that_cannot_be_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a regular file"):
        Journal(tmp_path, "key", 1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        Journal(tmp_path / "file" / "out.jsonl", "key", 1)


def test_half_a_surrogate_pair_is_written_as_an_escape():
    assert json.loads(dump_line({"a": "\ud800"})) == {"a": "\ud800"}
    assert dump_line({"a": "é"}) == '{"a": "é"}'.encode()

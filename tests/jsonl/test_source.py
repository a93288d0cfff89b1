"""Rows of a file and of a list: counted, named, checked, and read one at a time."""

import json
import tracemalloc

import pytest

from jaxis.errors import ConfigError
from jaxis.jsonl.source import JSONLSource, ListSource

KEY = "conversation_id"


def write(path, *lines):
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return path


def rows(source):
    return list(source.rows(lambda index: True))


def test_rows_are_numbered_without_blank_lines_and_errors_name_the_line(tmp_path):
    source = JSONLSource(write(tmp_path / "in", {KEY: "a"}, b"", b"{", b"[1]", b"\xff", b'{"a": NaN}', {"b": 1}), KEY)
    found = rows(source)
    assert source.num_rows == len(found) == 6
    assert [row.index for row in found] == list(range(6))
    errors = [str(row.error) if row.error else None for row in found]
    assert errors[0] is None
    assert errors[1].startswith("line 3: the row is not JSON")
    assert errors[2] == "line 4: the row is not a JSON object but list"
    assert errors[3] == "line 5: the row is not UTF-8 text"
    assert "NaN" in errors[4]
    assert found[5].value == {"b": 1}


def test_deep_nesting_fails_its_row_alone(tmp_path):
    source = JSONLSource(write(tmp_path / "in", b"[" * 100_000, {"b": 1}), KEY)
    first, second = rows(source)
    assert first.error is not None
    assert second.error is None


def test_missing_ids_are_the_same_each_time_and_all_different(tmp_path):
    path = write(tmp_path / "in", {"a": 1}, {"a": 1}, {KEY: "own"}, b"{")
    ids = [row.id for row in rows(JSONLSource(path, KEY))]
    assert ids == [row.id for row in rows(JSONLSource(path, KEY))]
    assert len(set(ids)) == 4
    assert ids[2] == "own"


def test_only_wanted_rows_are_read(tmp_path):
    source = JSONLSource(write(tmp_path / "in", *({"a": i} for i in range(5))), KEY)
    assert [row.value["a"] for row in source.rows(lambda index: index in (1, 4))] == [1, 4]


def test_repeated_ids_are_refused_by_line(tmp_path):
    path = write(tmp_path / "in", {KEY: "a"}, b"", {KEY: "b"}, {KEY: "a"})
    with pytest.raises(ConfigError, match=r"lines 1 and 4 have the same conversation_id 'a'"):
        JSONLSource(path, KEY)
    with pytest.raises(ConfigError, match="rows 0 and 2 have the same"):
        ListSource([{KEY: "a"}, {KEY: "b"}, {KEY: "a"}], KEY)


def test_the_digest_follows_the_data(tmp_path):
    digests = {
        JSONLSource(write(tmp_path / "in", *lines), KEY).digest
        for lines in ([{"a": 1}], [{"a": 2}], [{"a": 1}, {"a": 2}], [{"a": 2}, {"a": 1}])
    }
    assert len(digests) == 4
    assert ListSource([{"a": 1, "b": 2}], KEY).digest == ListSource([{"b": 2, "a": 1}], KEY).digest


def test_a_file_that_is_not_there_or_is_the_output_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        JSONLSource(tmp_path / "none", KEY)
    path = write(tmp_path / "in", {"a": 1})
    with pytest.raises(ConfigError, match="is the input"):
        JSONLSource(path, KEY, output=path)


def test_a_large_file_is_never_held(tmp_path):
    path = tmp_path / "in"
    with path.open("w") as file:
        for i in range(5000):
            file.write(json.dumps({KEY: f"row {i}", "text": "x" * 1000}) + "\n")
    tracemalloc.start()
    source = JSONLSource(path, KEY)
    assert sum(1 for _ in source.rows(lambda index: True)) == source.num_rows == 5000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 10

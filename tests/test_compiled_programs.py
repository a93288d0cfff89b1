"""The appendix of compiled programs, and the file of rows that it is made of."""

from __future__ import annotations

from tests.support.places import REPOSITORY
from tools.compiled_programs.page import with_appendix
from tools.compiled_programs.rows import Row, Step, merge_rows, read_rows

PAGE = REPOSITORY / "docs" / "accelerators.md"


def test_the_appendix_is_made_of_the_rows():
    text = PAGE.read_text()
    assert with_appendix(text, read_rows(PAGE.with_name("compiled-programs.json"))) == text


def test_rows_of_several_runs_are_kept_and_newer_ones_take_the_place_of_older(tmp_path):
    rows = [Row("qwen3-8b", "v6e-1", width, {"1": Step(True, 1.5, {})}, 1.01) for width in ("bfloat16", "int8")]
    newer = Row("qwen3-8b", "v6e-1", "int8", error="T=1: refused")
    merge_rows(tmp_path / "rows.json", rows[:1])
    merge_rows(tmp_path / "rows.json", rows[1:])
    assert merge_rows(tmp_path / "rows.json", [newer]) == [rows[0], newer] == read_rows(tmp_path / "rows.json")


def test_what_is_not_as_it_should_be_stands_out():
    rows = [
        Row("a", "v6e-1", "bfloat16", {"1": Step(True, 1, {})}, 1.004, 0.0),
        Row("b", "v6e-1", "bfloat16", {"1": Step(False, 1, {})}, 1.2, 0.0),
        Row("c", "v6e-1", "bfloat16", error="model: refused"),
        Row("a", "v6e-8", "bfloat16", {"1": Step(True, 1, {"all-reduce": 5})}, 1.0, 0.0),
        Row("b", "v6e-8", "bfloat16", {"1": Step(True, 1, {"all-reduce": 5, "all-gather": 2})}, 1.0, 0.0),
    ]
    lines = with_appendix("# Page\n", rows).splitlines()
    assert lines[0] == "# Page"
    assert "| a | v6e-1, v6e-8 | 1.00 |  |" in lines
    assert "| b | v6e-1 (**copies**), v6e-8 † | **1.20** |  |" in lines
    assert "| c |  |  | v6e-1 |" in lines
    assert "| c | v6e-1 | model: refused |" in lines

"""The file of rows of compiled programs."""

from __future__ import annotations

from tools.compiled_programs.rows import Row, Step, merge_rows, read_rows


def test_rows_of_several_runs_are_kept_and_newer_ones_take_the_place_of_older(tmp_path):
    rows = [Row("qwen3-8b", "v6e-1", width, {"1": Step(True, 1.5, {})}, 1.01) for width in ("bfloat16", "int8")]
    newer = Row("qwen3-8b", "v6e-1", "int8", error="T=1: refused")
    merge_rows(tmp_path / "rows.json", rows[:1])
    merge_rows(tmp_path / "rows.json", rows[1:])
    assert merge_rows(tmp_path / "rows.json", [newer]) == [rows[0], newer] == read_rows(tmp_path / "rows.json")

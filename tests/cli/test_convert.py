"""`jaxis convert`."""

from jaxis import SamplingParams


def test_to_orbax_and_back(run_jaxis, checkpoint, tmp_path, start_llm):
    source = checkpoint()
    result = run_jaxis("convert", source, tmp_path / "orbax", "--to", "orbax", "--scanned")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith(f"{tmp_path / 'orbax'}: ")
    assert result.stderr.count("\n") == 1
    with start_llm(tmp_path / "orbax") as llm:
        assert llm.generate("the cat", SamplingParams(max_tokens=3))[0].finished


def test_mistakes_are_one_line(invoke, checkpoint, tmp_path):
    result = invoke("convert", checkpoint(), tmp_path / "out", "--to", "hf")
    assert result.exit_code == 1
    assert "already in Hugging Face format" in result.stderr
    assert result.stderr.count("\n") == 1
    result = invoke("convert", checkpoint(), tmp_path / "out", "--to", "hf", "--unscanned")
    assert result.exit_code == 2
    assert "is for --to orbax" in result.stderr
    assert not (tmp_path / "out").exists()

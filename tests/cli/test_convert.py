"""`jaxis convert`."""

from jaxis import SamplingParams


def test_to_orbax_and_back(invoke, checkpoint, tmp_path, start_llm):
    source = checkpoint()
    result = invoke("convert", source, tmp_path / "orbax", "--to", "orbax", "--scanned")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith(f"{tmp_path / 'orbax'}: ")
    assert result.stderr.count("\n") == 1
    with start_llm(tmp_path / "orbax") as llm:
        assert llm.generate("the cat", SamplingParams(max_tokens=3))[0].finished


def test_to_gguf_and_back(run_jaxis, checkpoint, tmp_path):
    result = run_jaxis("convert", checkpoint(), tmp_path / "model.gguf", "--to", "gguf", "--outtype", "q8_0")
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith(f"{tmp_path / 'model.gguf'}: ")
    result = run_jaxis("convert", tmp_path / "model.gguf", tmp_path / "back", "--to", "hf", "--dtype", "bfloat16")
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert " become bfloat16, " in result.stderr
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == [
        *("chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    ]
    result = run_jaxis("convert", tmp_path / "model.gguf", tmp_path / "orbax", "--to", "orbax")
    assert result.returncode == 3
    assert "convert it with --to hf first" in result.stderr


def test_mistakes_are_one_line(invoke, checkpoint, tmp_path):
    result = invoke("convert", checkpoint(), tmp_path / "out", "--to", "hf")
    assert result.exit_code == 3
    assert "already in Hugging Face format" in result.stderr
    assert result.stderr.count("\n") == 1
    result = invoke("convert", checkpoint(), tmp_path / "out", "--to", "hf", "--unscanned")
    assert result.exit_code == 2
    assert "is for --to orbax" in result.stderr
    for option in (["--outtype", "f16"], ["--dtype", "float32"]):
        result = invoke("convert", checkpoint(), tmp_path / "out", "--to", "orbax", *option)
        assert result.exit_code == 2
        assert f"{option[0]}: is for --to" in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()

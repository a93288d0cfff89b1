"""Options for adapters, as vLLM's users write them."""

import pytest
from typer.testing import CliRunner

from jaxis import LLM, SamplingParams
from jaxis.cli.lora_options import LoraOptions, read_modules, spread_modules
from jaxis.cli.main import app
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.errors import ConfigError
from jaxis.lora import LoRARequest
from tests.support.adapters import save_adapter


def test_one_option_takes_several_adapters():
    words = ["./base", "--lora-modules", "a=A", "b=B", "--port", "1", "--lora-modules=c=C", "d=D", "./base"]
    spread = spread_modules(words)
    assert [word for word in spread if word != "--lora-modules"] == [word for word in words if word != "--lora-modules"]
    assert spread == [
        *("./base", "--lora-modules", "a=A", "--lora-modules", "b=B", "--port", "1"),
        *("--lora-modules=c=C", "--lora-modules", "d=D", "./base"),
    ]


def test_adapters_are_pairs_or_json():
    given = ["a=A=1", '{"name": "b", "path": "B"}', '[{"name": "c", "path": "C", "base_model_name": "m"}]']
    assert read_modules(given) == {"a": "A=1", "b": "B", "c": "C"}


@pytest.mark.parametrize(
    "given", [["a"], ["=A"], ["a="], ['{"name": "a"}'], ["{"], ['[{"name": 1, "path": "A"}]'], ["[[]]"]]
)
def test_what_is_neither_is_refused(given):
    with pytest.raises(ConfigError, match="--lora-modules"):
        read_modules(given)


def test_options_that_contradict_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    assert LoraOptions().llm_arguments() == {}
    for options, message in (
        ({"lora_modules": ["a=A"]}, "--lora-modules needs --enable-lora"),
        ({"enable_lora": True, "lora_updates": True}, "give --lora-root"),
        ({"enable_lora": True, "lora_modules": ["a=A", "a=B"]}, "two adapters are called 'a'"),
    ):
        with pytest.raises(ConfigError, match=message):
            LoraOptions(**options).llm_arguments()
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert LoraOptions(enable_lora=True, lora_root=tmp_path).allows_updates
    assert not LoraOptions().allows_updates


def test_layers_with_room_are_named_with_commas_between_them():
    named = LoraOptions(enable_lora=True, lora_target_modules="q_proj,embed_tokens").llm_arguments()
    assert named["lora_target_modules"] == ["q_proj", "embed_tokens"]
    with pytest.raises(ConfigError, match="--lora-target-modules needs --enable-lora"):
        LoraOptions(lora_target_modules="q_proj").llm_arguments()


def test_generate_takes_an_adapter_without_merging_it(tmp_path):
    folder = save_adapter(EMBEDDED_MODEL, tmp_path / "adapter", scale=0.5)
    params, messages = SamplingParams(temperature=0, max_tokens=12), [{"role": "user", "content": "hello"}]
    with LLM(enable_lora=True, show_progress=False, kv_cache_memory="16MiB") as llm:
        conversations, adapters = [messages] * 2, [LoRARequest("a", 1, folder), None]
        outputs = llm.chat(conversations, params, lora_request=adapters, progress=False)
    expected, base = (output.outputs[0].text.strip() for output in outputs)
    words = ["generate", "hello", "--adapter", str(folder), "--max-tokens", "12", "--temperature", "0"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == expected != base

"""A GGUF file from its path to tokens."""

from pathlib import Path

import gguf
import pytest

from jaxis import LLM, SamplingParams
from jaxis.errors import CheckpointError, ConfigError
from tests.support import parity
from tests.support.gguf_models import write_gguf
from tests.support.parity import FAMILIES

LLAMA = next(family for family in FAMILIES if family.name == "Llama 3")


def add_tokenizer(writer):
    tokens = [chr(33 + i) if i < 94 else f"<{i}>" for i in range(130)] + ["ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 131)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(Path(parity.checkpoint_folder(LLAMA)), path, split_max_tensors=12, more=add_tokenizer)
    return path.with_name("tiny-00002-of-00002.gguf")


def generate(model, **arguments):
    with LLM(str(model), dtype="float32", kv_cache_memory="1MiB", **arguments) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([parity.prompt(17)], params)
    return list(output.outputs[0].token_ids)


def test_a_file_and_its_folder_answer_as_the_checkpoint_does(path):
    expected = parity.reference_greedy_tokens(LLAMA, parity.prompt(17))[:8]
    assert generate(path) == generate(path.parent) == generate(parity.checkpoint_folder(LLAMA)) == expected


def test_overrides_apply(path):
    with pytest.raises(ConfigError, match="max_model_len=200 is more than the 100 positions"):
        generate(path, max_model_len=200, hf_overrides={"max_position_embeddings": 100})


def test_a_broken_file_is_one_line(tmp_path, path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"^\S*broken.gguf is truncated[^\n]*download it again$"):
        generate(broken)

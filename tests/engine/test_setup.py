"""From arguments and a checkpoint folder to an engine: sizes, defaults, and one clear line for every mistake."""

import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxis import LLM, SamplingParams
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.execution import cache_memory, kv_cache
from jaxis.engine.generation_defaults import note_unapplied
from jaxis.errors import CheckpointError, ConfigError, EngineError
from jaxis.host.byte_size import parse_bytes
from tests.support.tiny_checkpoints import variant, write_checkpoint

PROMPT = list(range(100))
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, 2 heads of 16, 2 layers, 16 tokens, float32


def num_blocks(llm):
    return llm.engine.scheduler.block_manager.num_blocks


@pytest.fixture
def changed(checkpoint, tmp_path):
    """`changed(files=..., **config)`: the checkpoint with other files or config keys."""
    numbers = itertools.count()
    return lambda **changes: variant(tmp_path / f"variant-{next(numbers)}", checkpoint(), **changes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("2K", 2048),
        ("2MiB", 2 << 20),
        ("2 mb", 2 << 20),
        ("1.5GiB", 3 << 29),
        ("1T", 1 << 40),
        (" 3G ", 3 << 30),
    ],
)
def test_sizes(size, expected):
    assert parse_bytes(size, "kv_cache_memory") == expected


@pytest.mark.parametrize("size", [0, -1, True, 1.5, "", "GiB", "-2GiB", "2 GiBs", "two", None])
def test_wrong_sizes(size):
    with pytest.raises(ConfigError, match=r"kv_cache_memory=.* must be"):
        parse_bytes(size, "kv_cache_memory")


@pytest.mark.parametrize("memory", [100 * BLOCK_BYTES + 5, "800KiB"])
def test_the_cache_has_as_many_blocks_as_fit(start_llm, memory):
    with start_llm(kv_cache_memory=memory, max_num_seqs=4) as llm:
        assert num_blocks(llm) == 100


def test_the_cache_is_no_larger_than_it_can_be_of_use(start_llm):
    with start_llm(kv_cache_memory="1GiB", max_num_seqs=3, max_model_len=100) as llm:
        assert num_blocks(llm) == 19  # 300 tokens


def test_default_cache(start_llm):
    with start_llm(kv_cache_memory=None, max_num_seqs=2) as llm:
        assert num_blocks(llm) == 64  # 512 tokens for each


@pytest.mark.sampled
@pytest.mark.parametrize(
    # An int8 entry of 16 elements has 20 bytes. 24: blocks that the native kernel does not take.
    ("dtype", "block_size", "blocks"),
    [
        *(("bfloat16", 32, 100), ("int8", 24, 213)),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [("int8", 32, 160), ("float16", 32, 100)]),
    ],
)
def test_smaller_cache_entries_and_other_blocks(llm, start_llm, dtype, block_size, blocks):
    settings = {"kv_cache_dtype": dtype, "block_size": block_size, "max_num_seqs": 8}
    expected = llm.compute_logits(PROMPT, path="paged")
    with start_llm(kv_cache_memory=100 * BLOCK_BYTES, **settings) as small:
        assert num_blocks(small) == blocks
        assert small.engine.runner.executor.state.caches[0].array.dtype == jnp.dtype(dtype)
        logits = small.compute_logits(PROMPT, path="paged")
        assert 0 < np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()
        assert len(small.generate([1, 2], SamplingParams(max_tokens=3))[0].outputs[0].token_ids) == 3


def test_max_model_len_shrinks_to_the_cache_and_says_so(start_llm, checkpoint, capsys):
    checkpoint()  # what makes the checkpoint may print
    capsys.readouterr()
    with start_llm(kv_cache_memory=10 * BLOCK_BYTES, show_progress=True) as llm:
        assert llm.max_model_len == 160
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("max_model_len is 160, not 1024")
        [output] = llm.generate([1], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 159
    with start_llm(show_progress=True):
        assert capsys.readouterr().err == ""


def test_too_little_memory(start_llm):
    with pytest.raises(EngineError, match=r"at least 0\.0 MiB for one block of 16 tokens") as caught:
        start_llm(kv_cache_memory=100)
    assert "\n" not in str(caught.value)


def test_more_memory_than_is_free(start_llm, monkeypatch):
    monkeypatch.setattr(cache_memory, "free_host_bytes", lambda: 40 * BLOCK_BYTES)
    with pytest.raises(EngineError, match="give a smaller kv_cache_memory"):
        start_llm(kv_cache_memory=41 * BLOCK_BYTES)
    with start_llm(kv_cache_memory=40 * BLOCK_BYTES) as llm:
        assert num_blocks(llm) == 40
    with start_llm(kv_cache_memory=None) as llm:
        assert num_blocks(llm) == 10


def test_device_without_the_memory(start_llm, monkeypatch):
    def no_memory(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocator: ...")

    monkeypatch.setattr(kv_cache, "make_cache_array", no_memory)
    with pytest.raises(EngineError, match=r"no memory for a KV cache of 512.0 KiB: give a smaller kv_cache_memory$"):
        start_llm()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8' must be one of auto, float32, bfloat16, float16"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype='int4' must be one of auto, float32, bfloat16, float16, int8"),
        ({"load_format": "pt"}, "load_format='pt' must be one of auto, dummy"),
        ({"max_model_len": 0}, "max_model_len=0 must be an integer of at least 1"),
        ({"max_model_len": 1025}, "max_model_len=1025 is more than the 1024 positions"),
        ({"max_num_seqs": -1}, "max_num_seqs=-1 must be"),
        ({"max_num_seqs": True}, "max_num_seqs=True must be"),
        ({"max_num_seqs": 100}, "max_num_seqs=100 is more than max_num_batched_tokens=64"),
        ({"max_num_batched_tokens": 2.5}, "max_num_batched_tokens=2.5 must be"),
        ({"block_size": 0}, "block_size=0 must be"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be"),
        ({"pipeline_parallel_size": -1}, "pipeline_parallel_size=-1 must be an integer of at least 1"),
        ({"data_parallel_size": "2"}, "data_parallel_size='2' must be an integer of at least 1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 needs that many cpu devices"),
        ({"tensor_parallel_size": 3}, "=3 does not divide the model's 8 attention heads: give 1 or 2$"),
        (
            {"tensor_parallel_size": 2, "hf_overrides": {"num_attention_heads": 6, "num_key_value_heads": 3}},
            "=2 and the model's 3 key-value heads: one must divide the other: give 1$",
        ),
        ({"kv_cache_memory": "much"}, "kv_cache_memory='much' must be"),
        ({"seed": "x"}, "seed='x' must be an integer"),
        ({"hf_overrides": "x"}, "hf_overrides='x' must be a dict"),
    ],
)
def test_wrong_arguments(start_llm, arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        start_llm(**arguments)
    assert "\n" not in str(caught.value)


def test_what_is_not_given_follows_what_is(start_llm):
    with start_llm(max_num_seqs=None, max_num_batched_tokens=16) as llm:
        assert llm.engine.scheduler.max_num_seqs == 16
    with start_llm(max_num_seqs=600, max_num_batched_tokens=None) as llm:
        assert llm.engine.scheduler.max_num_batched_tokens == 600
    with start_llm(max_num_seqs=None, max_num_batched_tokens=None) as llm:
        assert (llm.engine.scheduler.max_num_seqs, llm.engine.scheduler.max_num_batched_tokens) == (64, 512)


def test_arguments_are_those_of_llm():
    """Every argument of LLM is a field of EngineArgs with the same default, but for those that LLM itself uses."""
    parameters = LLM.__init__.__kwdefaults__
    defaults = EngineArgs()
    for name, default in parameters.items():
        if name not in ("runner", "show_progress", "needs_chat_template", "hf_overrides"):
            assert getattr(defaults, name) == default


def test_missing_folder(start_llm, tmp_path):
    with pytest.raises(CheckpointError, match="nowhere") as caught:
        start_llm(tmp_path / "nowhere")
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        start_llm(tmp_path)


def test_unknown_config_key(start_llm, changed):
    folder = changed(attention_sinks=4)
    with pytest.raises(ConfigError, match="keys that Qwen3ForCausalLM does not know: attention_sinks"):
        start_llm(folder)
    with start_llm(folder, hf_overrides={"attention_sinks": None}) as llm:
        assert llm.generate([1, 2], SamplingParams(max_tokens=1))[0].finished


def test_keys_of_tools_are_ignored_and_named_once(start_llm, changed, capsys):
    folder = changed(unsloth_version="2025.2", is_llama_config=True, torch_dtype="torch.bfloat16")
    capsys.readouterr()
    with start_llm(folder, show_progress=True):
        [line] = [line for line in capsys.readouterr().err.splitlines() if "ignored" in line]
    assert line == "ignored keys of config.json: is_llama_config, unsloth_version"


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "made_up", "bits": 4}, "is quantized by made_up, which is not supported"),
        ({}, "is quantized by an unknown method, which is not supported"),
        ("gptq", "quantization_config='gptq', expected an object"),
    ],
)
def test_quantized_by_another_method(start_llm, changed, quantization, message):
    with pytest.raises(ConfigError, match=message):
        start_llm(changed(quantization_config=quantization))


def test_dummy_weights_need_no_weight_files(start_llm, changed):
    folder = changed(files={"model.safetensors": None})
    with pytest.raises(CheckpointError):
        start_llm(folder)
    params = SamplingParams(temperature=0, max_tokens=5)
    answers = []
    for seed in (0, 0, 1):
        with start_llm(folder, load_format="dummy", seed=seed) as llm:
            answers.append(llm.generate([1, 2], params)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_engine_seed(start_llm):
    """For requests without a seed of their own; the same calls on a new engine sample the same."""
    answers = []
    for seed in (3, 3, 4):
        with start_llm(seed=seed) as llm:
            answers.append(llm.generate([[1, 2]] * 2, SamplingParams(max_tokens=8))[1].outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_sampling_defaults_of_the_checkpoint(start_llm, changed):
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    recommended |= {"repetition_penalty": 1.1, "max_new_tokens": 7, "min_new_tokens": 2}
    with start_llm(changed(files={"generation_config.json": recommended})) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(
            temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.1, max_tokens=7, min_tokens=2
        )
        assert len(llm.generate([1, 2])[0].outputs[0].token_ids) <= 7


def test_what_generation_config_says_is_applied_or_named(start_llm, changed):
    values = {"stop_strings": ["END", "\n\n"], "eos_token_id": [], "suppress_tokens": [3], "no_repeat_ngram_size": 0}
    values |= {"begin_suppress_tokens": [], "num_beams": 4, "typical_p": 1.0}
    folder, notes = changed(files={"generation_config.json": values}, eos_token_id=7), []
    with start_llm(folder) as llm:
        assert llm.get_default_sampling_params().stop == ["END", "\n\n"]
        assert llm.engine.eos_token_ids == {7, 372}  # the latter ends a turn in the folder's template
    note_unapplied(folder, SimpleNamespace(note=notes.append))
    expected = "not applied: num_beams; give sampling parameters of your own"
    assert notes == [f"generation_config.json: {expected}"]


def test_do_sample_false_is_greedy(start_llm, changed):
    files = {"generation_config.json": {"do_sample": False, "temperature": 0.6, "max_new_tokens": 9}}
    with start_llm(changed(files=files)) as llm:
        greedy = llm.generate([1, 2], SamplingParams(temperature=0, max_tokens=9))[0].outputs[0].token_ids
        assert llm.generate([1, 2])[0].outputs[0].token_ids == greedy


def test_wrong_sampling_defaults(start_llm, changed):
    with pytest.raises(ConfigError, match=r"generation_config\.json: top_p=1\.5 must be"):
        start_llm(changed(files={"generation_config.json": {"top_p": 1.5}}))


def test_where_end_of_sequence_comes_from(start_llm, changed):
    """generation_config.json, else config.json, else the tokenizer."""
    no_generation = {"generation_config.json": None}
    no_tokenizer = {"tokenizer.json": None, "tokenizer_config.json": None}
    cases = [
        ({"files": {"generation_config.json": {"eos_token_id": [5, 6]}}, "eos_token_id": 7}, {5, 6}),
        ({"files": {"generation_config.json": {"eos_token_id": 5}}}, {5}),
        ({"files": {"generation_config.json": {"eos_token_id": []}}, "eos_token_id": []}, {372}),
        ({"files": no_generation, "eos_token_id": [7, 8]}, {7, 8}),
        ({"files": no_generation}, {372}),
        ({"files": no_generation | no_tokenizer}, set()),
    ]
    for changes, expected in cases:
        with start_llm(changed(**changes)) as llm:
            assert llm.engine.eos_token_ids == expected
            for eos in expected:
                params = SamplingParams(temperature=0, max_tokens=5, logit_bias={eos: 100.0})
                assert llm.generate([1, 2], params)[0].outputs[0].token_ids == [eos]


def test_dynamic_rope_ends_where_its_frequencies_would_change(start_llm, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = write_checkpoint(tmp_path / "dynamic", "llama", rope_parameters=rope, max_position_embeddings=64)
    with start_llm(folder) as llm:
        assert llm.max_model_len == 64
        assert llm.engine.runner.max_model_len == 64
    with pytest.raises(ConfigError, match="max_model_len=65 is more than the 64 positions"):
        start_llm(folder, max_model_len=65)


def test_longrope_keeps_its_short_frequencies_unless_asked_for_more(start_llm, tmp_path, capsys):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope |= {"original_max_position_embeddings": 64}
    folder = write_checkpoint(tmp_path / "longrope", "llama", rope_parameters=rope, max_position_embeddings=256)
    capsys.readouterr()  # transformers' warnings
    prompt, params = list(range(20)), SamplingParams(temperature=0, max_tokens=1, logprobs=1)

    def logprobs(llm):
        return [entry.logprob for entry in llm.generate(prompt, params)[0].outputs[0].logprobs[0].values()]

    with start_llm(folder, show_progress=True) as llm:
        assert llm.max_model_len == 64
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith("max_model_len is 64, up to which")
        short = logprobs(llm)
    with start_llm(folder, max_model_len=200, show_progress=True) as llm:
        assert llm.max_model_len == 200
        assert capsys.readouterr().err == ""
        assert logprobs(llm) != pytest.approx(short, abs=1e-3)


def test_progress_can_be_silenced(start_llm, checkpoint, capsys):
    checkpoint()
    capsys.readouterr()  # of the library that writes it, if no test before has had it written
    with start_llm(kv_cache_memory=10 * BLOCK_BYTES, show_progress=False) as llm:
        llm.generate([[1], [2]], SamplingParams(max_tokens=2))
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


def test_config_files_are_left_as_they_are(start_llm, checkpoint):
    before = json.loads((checkpoint() / "config.json").read_text())
    with start_llm(hf_overrides={"rope_parameters.rope_theta": 5000.0}) as llm:
        changed = llm.compute_logits([1, 2, 3])
    with start_llm() as llm:
        assert abs(llm.compute_logits([1, 2, 3]) - changed).max() > 1e-3
    assert json.loads((checkpoint() / "config.json").read_text()) == before

"""Adapters by request inside vLLM. Needs vLLM: `make test-vllm`."""

import os
import shutil

import pytest

os.environ |= {"VLLM_PLUGINS": "jaxis", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
pytest.importorskip("vllm")
pytest.importorskip("peft")

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

import jaxis
from jaxis.errors import CheckpointError, ConfigError
from tests.integrations.vllm.vllm_requests import TINY_VOCAB_SIZE, Case, answer, random_cases
from tests.support.adapters import save_adapter
from tests.support.tiny_checkpoints import write_checkpoint

NAMES = ("a", "b", "c")
ENGINE = {"max_num_seqs": 8, "max_model_len": 256, "dtype": "float32", "seed": 3, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint, and adapters of it."""
    root = tmp_path_factory.mktemp("adapters")
    base = write_checkpoint(root / "base")
    for index, name in enumerate(NAMES):
        save_adapter(base, root / name, seed=index, r=2 + 2 * index, use_dora=name == "c")
    return root


@pytest.fixture(scope="module")
def reference(folders):
    return jaxis.LLM(
        folders / "base", **ENGINE, enable_lora=True, max_loras=3, kv_cache_memory="16MiB", show_progress=False
    )


def make_vllm(folders, **arguments):
    defaults = {"num_gpu_blocks_override": 160, "enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    return vllm.LLM(str(folders / "base"), **ENGINE | defaults | arguments)


def requests_of(folders, names):
    return [None if name is None else LoRARequest(name, 1 + NAMES.index(name), str(folders / name)) for name in names]


def wanted(reference, folders, cases, names):
    adapters = [None if name is None else jaxis.LoRARequest(name, 1, folders / name) for name in names]
    outputs = reference.generate(
        [case.prompt for case in cases], [case.jaxis_params for case in cases], lora_request=adapters
    )
    return [answer(output) for output in outputs]


def answers(llm, cases, requests):
    outputs = llm.generate(
        [case.vllm_prompt for case in cases],
        [case.vllm_params for case in cases],
        lora_request=requests,
        use_tqdm=False,
    )
    return [answer(output) for output in outputs]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"max_loras": 1, "async_scheduling": False}, {"num_gpu_blocks_override": 24, "enable_prefix_caching": False}],
)
def test_requests_with_adapters_and_without_get_jaxis_answers(folders, reference, arguments):
    """More adapters than a step, or memory, may have. Grammars and bad words, in which vLLM differs, are elsewhere."""
    llm = make_vllm(folders, **arguments)
    cases = random_cases(60, seed=1, vocab_size=TINY_VOCAB_SIZE)
    cases = [case for case in cases if not case.has_grammar and "bad_words" not in case.values]
    cases += [Case(case.prompt, temperature=0.0, max_tokens=8, ignore_eos=True) for case in cases[:4]]
    names = [(*NAMES, None)[index % 4] for index in range(len(cases))]
    ours = answers(llm, cases, requests_of(folders, names))
    for case, name, mine, theirs in zip(cases, names, ours, wanted(reference, folders, cases, names), strict=True):
        assert mine == theirs, (name, case)
    same = [Case([5, 6, 7], temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)] * 4
    assert len({str(each) for each in answers(llm, same, requests_of(folders, (*NAMES, None)))}) == 4


def test_adapters_are_loaded_listed_pinned_and_removed(folders, reference):
    llm = make_vllm(folders, max_loras=1, max_cpu_loras=2)
    engine = llm.llm_engine
    a, b, c = requests_of(folders, NAMES)
    assert all(engine.add_lora(each) for each in (a, b))
    assert engine.list_loras() == {1, 2}
    assert engine.pin_lora(1)
    assert engine.add_lora(c)
    assert engine.list_loras() == {1, 3}
    assert engine.remove_lora(3)
    assert not engine.remove_lora(3)
    case = Case([5, 6, 7], temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    assert answers(llm, [case], [c]) == wanted(reference, folders, [case], ["c"])


def test_an_adapter_that_is_removed_stays_with_its_requests(folders, reference):
    llm = make_vllm(folders)
    [request] = requests_of(folders, ["a"])
    case = Case([5, 6, 7], temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    llm.llm_engine.add_request("0", case.vllm_prompt, case.vllm_params, lora_request=request)
    for _ in range(4):
        llm.llm_engine.step()
    assert llm.llm_engine.remove_lora(1)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
    assert [answer(outputs[-1])] == wanted(reference, folders, [case], ["a"])


def test_other_files_under_a_name_and_path_that_the_prefix_cache_knows_are_refused(folders, reference, tmp_path):
    llm = make_vllm(folders)
    case = Case(list(range(5, 45)), temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    path = shutil.copytree(folders / "a", tmp_path / "x")
    request = LoRARequest("x", 1, str(path))
    assert answers(llm, [case], [request]) == wanted(reference, folders, [case], ["a"])
    shutil.copytree(folders / "b", path, dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="is not what requests had before"):
        llm.llm_engine.add_lora(LoRARequest("x", 1, str(path), load_inplace=True))
    assert llm.llm_engine.add_lora(LoRARequest("y", 1, str(path), load_inplace=True))
    assert answers(llm, [case], [LoRARequest("y", 1, str(path))]) == wanted(reference, folders, [case], ["b"])


def test_an_adapter_that_cannot_be_read_ends_its_request_alone(folders, reference, tmp_path):
    llm = make_vllm(folders)
    with pytest.raises(CheckpointError):
        llm.llm_engine.add_lora(LoRARequest("gone", 9, str(tmp_path / "gone")))
    [good] = requests_of(folders, ["a"])
    case = Case([5, 6, 7], temperature=0.0, max_tokens=8, logprobs=1)
    ours, ended = answers(llm, [case] * 2, [good, LoRARequest("gone", 9, str(tmp_path / "gone"))])
    assert [ours] == wanted(reference, folders, [case], ["a"])
    assert len(ended[0]) == 1
    # What was computed without it may be in the prefix cache.
    shutil.copytree(folders / "b", tmp_path / "gone")
    with pytest.raises(ConfigError, match="is not what requests had before"):
        llm.llm_engine.add_lora(LoRARequest("gone", 9, str(tmp_path / "gone")))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"lora_dtype": "float16"}, "lora_dtype=torch.float16 is not supported, only auto"),
        ({"enable_moe_shared_loras": True}, "enable_moe_shared_loras=True is not supported"),
    ],
)
def test_options_that_would_not_be_honoured_are_named(folders, arguments, line):
    with pytest.raises(ValueError, match=line):
        EngineArgs(str(folders / "base"), dtype="float32", enable_lora=True, **arguments).create_engine_config()

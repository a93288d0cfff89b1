"""Adapters chosen by requests: against PEFT, and each answer the same in any batch."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import psutil
import pytest

from jaxis import LLM, SamplingParams, StructuredOutputs
from jaxis.engine.execution.program_key import lower
from jaxis.engine.execution.step_programs import ForwardKey
from jaxis.engine.opened_model import EMBEDDED_MODEL
from jaxis.engine.scheduling.block_digests import extend_digests
from jaxis.engine.scheduling.places import PlaceUse
from jaxis.errors import ConfigError, RequestError
from jaxis.lora import LoRARequest
from tests.support.adapters import reference_logits, save_adapter
from tests.support.tiny_checkpoints import write_checkpoint

PROMPTS = [[5, 100, 7, 8, 9, 400, 11, 12], list(range(20, 57)), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [77] * 3]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
KINDS = [
    {"target_modules": "all-linear"},
    {"target_modules": ["q_proj", "v_proj"], "r": 8},
    {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    {"target_modules": r".*layers\.1\.mlp\.(gate|down)_proj", "r": 16},
    {"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", tokenizer=False)


@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    paths = [save_adapter(base, folder / f"a{i}", seed=i, **KINDS[i % len(KINDS)]) for i in range(16)]
    return [LoRARequest(f"a{i}", i + 1, path) for i, path in enumerate(paths)]


@pytest.fixture(scope="module")
def llm(base):
    with LLM(
        str(base), enable_lora=True, max_loras=16, max_model_len=128, max_num_seqs=32, kv_cache_memory="64MiB"
    ) as llm:
        yield llm


def _bits(output):
    return [
        (
            completion.token_ids,
            [
                {token: np.float64(each.logprob).tobytes() for token, each in step.items()}
                for step in completion.logprobs
            ],
        )
        for completion in output.outputs
    ]


def _log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_answers_are_those_of_peft(base, llm, adapters):
    for adapter in adapters[: len(KINDS)]:
        [output] = llm.generate([PROMPTS[0]], GREEDY, lora_request=adapter)
        tokens = output.outputs[0].token_ids
        expected = _log_softmax(reference_logits(base, adapter.lora_path, PROMPTS[0] + tokens).astype(np.float64))
        for i, (token, step) in enumerate(zip(tokens, output.outputs[0].logprobs, strict=True)):
            row = expected[len(PROMPTS[0]) - 1 + i]
            assert token == row.argmax()
            assert max(abs(each.logprob - row[t]) for t, each in step.items()) < 1e-4


def test_sixteen_adapters_and_the_base_in_a_batch_give_what_each_gives_alone(llm, adapters):
    chosen = [None, *adapters, None]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(chosen))]
    alone = []
    for prompt, adapter in zip(prompts, chosen, strict=True):
        llm.engine.reset_prefix_cache()
        alone += llm.generate([prompt], GREEDY, lora_request=adapter)
    llm.engine.reset_prefix_cache()
    together = llm.generate(prompts, GREEDY, lora_request=chosen)
    assert list(map(_bits, together)) == list(map(_bits, alone))
    again = llm.generate(prompts, GREEDY, lora_request=chosen)  # after prefix hits
    assert list(map(_bits, again)) == list(map(_bits, alone))
    assert len({tuple(each.outputs[0].token_ids) for each in together if each.prompt_token_ids == PROMPTS[0]}) > 3


def test_steps_without_adapters_run_the_programs_of_an_engine_without_any(base, llm):
    with LLM(str(base), max_model_len=128, max_num_seqs=32, kv_cache_memory="64MiB") as plain:
        expected = plain.generate(PROMPTS, GREEDY)
        assert list(map(_bits, llm.generate(PROMPTS, GREEDY))) == list(map(_bits, expected))
        ours, theirs = (each.engine.runner for each in (llm, plain))
        for num_tokens in (1, 4, 32):
            keys = [ForwardKey(runner.step_shape(num_tokens)) for runner in (ours, theirs)]
            assert keys[0] == keys[1]
            texts = [lower(keys[0], runner.programs.executor.stages[0].context).as_text() for runner in (ours, theirs)]
            assert texts[0] == texts[1]


def test_a_zero_adapter_is_the_base(base, llm, tmp_path):
    zero = LoRARequest("zero", 1, save_adapter(base, tmp_path / "zero", scale=0.0))
    expected = llm.generate(PROMPTS, GREEDY)
    assert list(map(_bits, llm.generate(PROMPTS, GREEDY, lora_request=zero))) == list(map(_bits, expected))


@pytest.mark.slow
def test_more_adapters_than_places_take_turns(base, llm, adapters):
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(6)]
    expected = llm.generate(prompts, GREEDY, lora_request=adapters[:6])
    with LLM(
        str(base),
        enable_lora=True,
        max_loras=2,
        max_cpu_loras=6,
        max_model_len=128,
        max_num_batched_tokens=8,  # prompts in chunks
        max_num_seqs=8,
        kv_cache_memory="64MiB",
    ) as few:
        assert list(map(_bits, few.generate(prompts, GREEDY, lora_request=adapters[:6]))) == list(map(_bits, expected))
        more = [PROMPTS[i % len(PROMPTS)] for i in range(8)]
        all_known = llm.generate(more, GREEDY, lora_request=adapters[:8])
        assert list(map(_bits, few.generate(more, GREEDY, lora_request=adapters[:8]))) == list(map(_bits, all_known))
        few.generate([PROMPTS[0]], GREEDY, lora_request=adapters[7])


@pytest.mark.slow
def test_requests_with_and_without_a_place_are_told_apart(base, adapters):
    with LLM(str(base), enable_lora=True, max_loras=1, max_model_len=64, kv_cache_memory="8MiB") as llm:
        store = llm._adapters
        first, second = (store.add(store.read(each.lora_path)) for each in adapters[:2])
        for i, adapter in enumerate([first, second, b"", first]):
            llm.engine.add_request(f"{i}", PROMPTS[0], SamplingParams(max_tokens=2, temperature=0), adapter=adapter)
        assert store.use == PlaceUse(1, (), (first, second))
        llm.engine.step()
        assert store.use == PlaceUse(1, (first,), (first, second))
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert store.use == PlaceUse(1, (), ())


def test_a_name_with_other_weights_finds_nothing_in_the_cache(base, llm, tmp_path):
    prompt = list(range(100, 140))
    answers, hits = [], []
    for seed in (1, 2, 1):
        request = LoRARequest("same", 1, save_adapter(base, tmp_path / "same", seed=seed))
        [output] = llm.generate([prompt], GREEDY, lora_request=request)
        answers.append(output.outputs[0].token_ids)
        hits.append(output.num_cached_tokens)
    assert answers[0] == answers[2] != answers[1]
    assert hits == [0, 0, 32]


def test_roots_of_caches_differ_by_adapter_and_salt():
    roots = set()
    for salt in (None, "", "a"):
        for adapter in (b"", bytes(32), b"x" * 32):
            digests: list[bytes] = []
            extend_digests(digests, 1, lambda start, stop: [0] * (stop - start), 16, salt, adapter)
            roots.add(digests[0])
    assert len(roots) == 9


def test_requests_that_cannot_have_their_adapter_say_why(base, llm, adapters, tmp_path):
    with pytest.raises(RequestError, match="lora_request has 2 values for 1 prompts"):
        llm.generate([PROMPTS[0]], GREEDY, lora_request=adapters[:2])
    for config, named in (
        ({"r": 32}, "has rank 32, more than max_lora_rank=16"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens', for which requests have no room"),
        ({"modules_to_save": ["norm"]}, "which is the same for all requests"),
    ):
        path = save_adapter(base, tmp_path / named.replace(" ", ""), **config)
        with pytest.raises(ConfigError, match=named):
            llm.generate([PROMPTS[0]], GREEDY, lora_request=LoRARequest("a", 1, path))
    with LLM(str(base), max_model_len=64) as plain, pytest.raises(RequestError, match=r"needs LLM\(.*enable_lora=True"):
        plain.generate([PROMPTS[0]], GREEDY, lora_request=adapters[0])


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("changed", "end"),
    [({}, "embed_tokens"), ({"tie_word_embeddings": True}, "lm_head")],
    ids=["embeddings", "head that is tied"],
)
def test_tables_are_those_of_peft_and_the_same_in_any_batch(changed, end, base, tmp_path):
    base = write_checkpoint(tmp_path / "base", tokenizer=False, **changed) if changed else base
    kinds = [{"target_modules": [end]}, {"target_modules": ["q_proj", end], "use_dora": True}, {"r": 8}]
    adapters = [LoRARequest(f"a{i}", 1, save_adapter(base, tmp_path / f"a{i}", seed=i, **kinds[i])) for i in range(3)]
    chosen, prompts = [None, *adapters], [PROMPTS[0]] * 4
    params = [dataclasses.replace(GREEDY, prompt_logprobs=1), GREEDY] * 2
    sizes = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_memory": "8MiB", "enable_lora": True}
    with LLM(str(base), max_loras=4, lora_target_modules=["all-linear", end], **sizes) as llm:
        alone = []
        for adapter, wanted in zip(chosen, params, strict=True):
            llm.engine.reset_prefix_cache()
            alone += llm.generate([PROMPTS[0]], wanted, lora_request=adapter)
        llm.engine.reset_prefix_cache()
        together = llm.generate(prompts, params, lora_request=chosen)
        assert list(map(_bits, together)) == list(map(_bits, alone))
        assert [each.prompt_logprobs for each in together] == [each.prompt_logprobs for each in alone]
    with LLM(str(base), **{**sizes, "enable_lora": False}) as plain:
        assert list(map(_bits, plain.generate([PROMPTS[0]], GREEDY))) == list(map(_bits, alone[:1]))
    for adapter, output in zip(adapters, alone[1:], strict=True):
        tokens = output.outputs[0].token_ids
        logits = reference_logits(base, adapter.lora_path, PROMPTS[0] + tokens).astype(np.float64)
        rows = _log_softmax(logits)
        steps = list(zip(output.outputs[0].logprobs, rows[len(PROMPTS[0]) - 1 :][: len(tokens)], strict=True))
        if output.prompt_logprobs is not None:
            steps += zip(output.prompt_logprobs[1:], rows[: len(PROMPTS[0]) - 1], strict=True)
        errors = [abs(each.logprob - row[token]) for step, row in steps for token, each in step.items()]
        assert max(errors) < 1e-5 * np.abs(logits).max()


def test_places_are_for_the_layers_that_are_named(base, adapters, llm):
    sizes = {"max_model_len": 64, "kv_cache_memory": "8MiB", "enable_lora": True}
    with LLM(str(base), lora_target_modules=["q_proj", "v_proj"], **sizes) as few:
        assert 0 < few._adapters.bytes_per_place < llm._adapters.bytes_per_place / 2
        expected = llm.generate([PROMPTS[0]], GREEDY, lora_request=adapters[1])
        found = few.generate([PROMPTS[0]], GREEDY, lora_request=adapters[1])
        assert list(map(_bits, found)) == list(map(_bits, expected))
        with pytest.raises(ConfigError, match="for which requests have no room: name it among lora_target_modules"):
            few.generate([PROMPTS[0]], GREEDY, lora_request=adapters[0])
    with pytest.raises(ConfigError, match="no layer that requests can change has a name that ends in 'proj'"):
        LLM(str(base), lora_target_modules=["proj"], **sizes)


@pytest.mark.slow
def test_preemption_changes_no_answer_of_an_adapter(base, llm, adapters):
    chosen = [None, *adapters[:7]]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=1),
    ] * 4
    prompts = [PROMPTS[i % 2] for i in range(8)]
    expected = llm.generate(prompts, params, lora_request=chosen)
    per_block = sum(llm.engine.runner.kv_bytes_per_block.values())
    with LLM(
        str(base), enable_lora=True, max_loras=3, max_model_len=64, max_num_seqs=8, kv_cache_memory=10 * per_block
    ) as small:
        outputs = small.generate(prompts, params, lora_request=chosen)
        assert small.engine.num_preemptions > 0
    assert list(map(_bits, outputs)) == list(map(_bits, expected))


@pytest.mark.slow
def test_guesses_at_next_tokens_change_no_answer_of_an_adapter(base, llm, adapters):
    repeated = [[5, 6, 7, 8] * 6, [9, 4] * 10]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    outputs = llm.generate(repeated, params, lora_request=adapters[:2])
    with LLM(
        str(base),
        enable_lora=True,
        max_loras=2,
        max_model_len=128,
        max_num_seqs=32,
        kv_cache_memory="64MiB",
        speculative_config={"num_speculative_tokens": 0},
    ) as plain:
        expected = plain.generate(repeated, params, lora_request=adapters[:2])
        assert plain.engine.speculation.counts is None
    assert list(map(_bits, outputs)) == list(map(_bits, expected))


@pytest.mark.slow
def test_grammars_samples_and_guesses_of_adapters_give_in_a_batch_what_each_gives_alone(tmp_path):
    folders = [save_adapter(EMBEDDED_MODEL, tmp_path / f"a{i}", seed=i, scale=0.2) for i in range(2)]
    chosen = [None, *(LoRARequest(folder.name, 1, folder) for folder in folders)]
    number, text = StructuredOutputs(regex="([a-e ]{2,5}[0-9]+)+"), StructuredOutputs(json_object=True)
    kinds = [
        SamplingParams(temperature=0, max_tokens=18, structured_outputs=number, logprobs=2),
        SamplingParams(temperature=1, seed=7, n=2, max_tokens=18, top_p=0.9, structured_outputs=text, logprobs=2),
        SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, repetition_penalty=1.2, logprobs=2),
    ]
    prompts = [[5, 6, 7, 8] * 6, [300, *range(20, 57)], [3, 1, 4]]  # all kinds with all adapters
    requests = [
        (prompts[(i + j) % 3], kind, adapter) for i, kind in enumerate(kinds) for j, adapter in enumerate(chosen)
    ]
    with LLM(enable_lora=True, max_loras=2, kv_cache_memory="8MiB", max_model_len=64, show_progress=False) as llm:
        alone = []
        for prompt, kind, adapter in requests:
            llm.engine.reset_prefix_cache()
            alone += llm.generate([prompt], kind, lora_request=adapter)
        llm.engine.reset_prefix_cache()
        together = [list(each) for each in zip(*requests, strict=True)]
        for _ in range(2):  # again with prefix hits
            outputs = llm.generate(together[0], together[1], lora_request=together[2])
            assert list(map(_bits, outputs)) == list(map(_bits, alone))
    assert all(re.fullmatch("([a-e ]{2,5}[0-9]*)+", each.outputs[0].text) for each in alone[:3])
    assert len({each.outputs[0].text for each in alone[:3]}) == 3


@pytest.mark.slow
def test_beside_a_model_in_bfloat16_places_take_half_and_answers_are_close(base, llm, adapters):
    sizes = {"max_loras": 16, "max_model_len": 128, "max_num_seqs": 32, "kv_cache_memory": "64MiB"}
    with LLM(str(base), dtype="bfloat16", enable_lora=True, **sizes) as low:
        assert low._adapters.bytes_per_place < 0.6 * llm._adapters.bytes_per_place
        chosen = [None, *adapters[:3]]
        alone = [low.generate([PROMPTS[0]], GREEDY, lora_request=each)[0] for each in chosen]
        low.engine.reset_prefix_cache()
        together = low.generate([PROMPTS[0]] * 4, GREEDY, lora_request=chosen)
    assert list(map(_bits, together)) == list(map(_bits, alone))
    for output, expected in zip(alone, llm.generate([PROMPTS[0]] * 4, GREEDY, lora_request=chosen), strict=True):
        ours, theirs = (each.outputs[0].logprobs[0] for each in (output, expected))
        shared = ours.keys() & theirs.keys()
        assert shared
        assert all(abs(ours[token].logprob - theirs[token].logprob) < 0.2 for token in shared)


@pytest.mark.slow
def test_a_thousand_loads_and_unloads_leave_nothing(llm, adapters):
    store = llm._adapters
    before = {name: len(getattr(store, name)) for name in ("_known", "_kept", "_removed", "_unfinished")}
    sizes = []
    for i in range(1000):
        digest = store.add(store.read(adapters[i % 16].lora_path), keep=True)
        if i % 50 == 0:
            llm.generate([PROMPTS[0]], GREEDY, lora_request=adapters[i % 16], progress=False)
        store.remove(digest)
        if i % 100 == 99:
            sizes.append(psutil.Process().memory_info().rss)
    assert all(len(getattr(store, name)) <= size for name, size in before.items())
    assert sizes[-1] - sizes[2] < 16 << 20, sizes

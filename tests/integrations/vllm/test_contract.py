"""Facts of vLLM that its plugin knows, and its deeds before vLLM is there. Needs no vLLM."""

import os
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from jaxis.engine.execution.sequence_sampling import SequenceSampling
from jaxis.engine.grammar.token_mask import is_allowed, pack_token_ids
from jaxis.engine.scheduling.sequence import SequenceId
from jaxis.errors import RequestError
from jaxis.integrations.vllm import contract, plugin
from jaxis.integrations.vllm.requests import RequestTable
from jaxis.integrations.vllm.sampling import APPLIED, OF_VLLM, REFUSED, GivenMasks, translate_params
from jaxis.sampling_params import SamplingParams
from tests.support.places import REPOSITORY

VOCAB_SIZE = 70


class Params(msgspec.Struct):
    """The fields of vLLM's that the plugin reads, and one that a later vLLM might have."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    bad_words: list[str] | None = None
    _bad_words_token_ids: list[list[int]] | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    structured_outputs: object = None
    thinking_token_budget: int | None = None
    extra_args: dict | None = None
    prompt_logprob_token_ids: object = None
    brand_new: int = 0

    @property
    def bad_words_token_ids(self):
        return self._bad_words_token_ids

    @property
    def all_stop_token_ids(self):
        return self._all_stop_token_ids


def test_the_entry_points_act_only_where_vllm_plugins_names_jaxis(monkeypatch):
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]
    assert points["vllm.platform_plugins"] == {plugin.NAME: f"{plugin.__name__}:{plugin.platform.__name__}"}
    assert points["vllm.general_plugins"] == {plugin.NAME: f"{plugin.__name__}:{plugin.register.__name__}"}
    for value in ("", "tpu", "jaxis-other"):
        monkeypatch.setenv("VLLM_PLUGINS", value)
        assert plugin.platform() is None
        plugin.register()  # imports no vLLM
    monkeypatch.delenv("VLLM_PLUGINS")
    assert plugin.platform() is None
    monkeypatch.setenv("VLLM_PLUGINS", "other, jaxis")
    assert plugin.platform() == "jaxis.integrations.vllm.platform.JaxisPlatform"


def test_what_the_front_end_imports_has_no_jax():
    script = """
import sys
import jaxis.integrations.vllm.config_checks, jaxis.integrations.vllm.contract, jaxis.integrations.vllm.plugin
from jaxis.models.registry import declared_architectures

assert "LlamaForCausalLM" in declared_architectures()
print([name for name in ("jax", "torch", "vllm") if name in sys.modules])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_every_field_has_one_place():
    kinds = (
        (contract.NEW_REQUEST_READ, contract.NEW_REQUEST_REFUSED, contract.NEW_REQUEST_OTHER),
        (contract.STEP_READ, contract.STEP_REFUSED, contract.STEP_OTHER),
        (contract.CACHED_REQUESTS_READ, contract.CACHED_REQUESTS_OTHER),
        (APPLIED, OF_VLLM, tuple(REFUSED)),
    )
    for places in kinds:
        names = [name for place in places for name in place]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"thinking_token_budget": 0}, "thinking_token_budget is not supported: the end of thinking is not forced"),
        ({"extra_args": {"a": 1}}, "extra_args is not supported: nothing reads them"),
        ({"prompt_logprob_token_ids": np.zeros((2, 2), int)}, "prompt_logprob_token_ids is not supported"),
        ({"brand_new": 2}, "brand_new is not supported: this version of jaxis does not know it"),
        ({"logprobs": -1}, "logprobs=-1 is not supported"),
        ({"repetition_penalty": 1000.0}, "repetition_penalty=1000.0 must be from 0.01 to 100"),
    ],
)
def test_what_would_not_be_applied_is_refused_by_name(values, line):
    with pytest.raises(RequestError, match=line):
        translate_params(Params(**values))


def test_parameters_that_ask_for_nothing_are_none():
    params = translate_params(Params(extra_args={}, prompt_logprob_token_ids=[]))
    assert (params.temperature, params.logprobs, params.stop_token_ids) == (1.0, None, [])


@pytest.mark.parametrize("num_words", [1, 2, 3, 5])
def test_a_mask_of_another_width_forbids_what_it_does_not_have(num_words):
    row = np.full(num_words, -1, np.int32)
    mask = GivenMasks(VOCAB_SIZE)
    mask.set_masks(row[None])
    allowed = [token_id for token_id in range(96) if is_allowed(mask.token_mask(), token_id)]
    assert allowed == list(range(min(32 * num_words, VOCAB_SIZE)))
    row = pack_token_ids([3, 40], VOCAB_SIZE)
    mask.set_masks(row[None])
    np.testing.assert_array_equal(mask.token_mask(), row)
    mask.set_masks(None)
    np.testing.assert_array_equal(mask.token_mask(), pack_token_ids(range(VOCAB_SIZE), VOCAB_SIZE))


def test_a_mask_for_each_draft_is_that_of_its_place():
    rows = np.stack([pack_token_ids([i, 10 + i], VOCAB_SIZE) for i in range(3)])
    masks = GivenMasks(VOCAB_SIZE)
    masks.set_masks(rows)
    sampling = SequenceSampling(
        SamplingParams(), prompt_token_ids=[1], output_token_ids=[5, 6], vocab_size=VOCAB_SIZE, seed=0, grammar=masks
    )
    for drafts in ((), (10,), (10, 11), (10,)):
        np.testing.assert_array_equal(sampling.token_mask(drafts), rows[len(drafts)])


def step(*, new=(), cached=None, finished=()):
    cached = cached or SimpleNamespace(req_ids=[])
    return SimpleNamespace(scheduled_new_reqs=list(new), scheduled_cached_reqs=cached, finished_req_ids=set(finished))


def new_request(request_id, prompt, blocks, *, computed=0, known=None, **params):
    return SimpleNamespace(
        req_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=Params(**params),
        block_ids=(blocks,),
        num_computed_tokens=computed,
        prefill_token_ids=known,
        lora_request=None,
    )


def cached_requests(request_id, blocks, computed, *, resumed=False, token_ids=None):
    return SimpleNamespace(
        req_ids=[request_id],
        resumed_req_ids={request_id} if resumed else set(),
        new_block_ids=[None if blocks is None else (blocks,)],
        num_computed_tokens=[computed],
        all_token_ids={} if token_ids is None else {request_id: token_ids},
    )


def table():
    return RequestTable(vocab_size=VOCAB_SIZE, num_spans=2, seed=0, logprobs_mode="raw_logprobs")


def started():
    """A request with the prompt 1, 2, 3, computed in two chunks, that has sampled 9."""
    requests = table()
    requests.update(step(new=[new_request("a", [1, 2, 3], [5])]))
    [chunk] = requests.schedule({"a": 2})
    assert (chunk.entry.start, chunk.entry.samples, chunk.is_decode) == (0, False, False)
    requests.update(step(cached=cached_requests("a", None, 2)))
    [last] = requests.schedule({"a": 1})
    assert (last.entry.start, last.entry.samples, last.is_decode) == (2, True, False)
    last.request.add_tokens([9])
    return requests


def test_a_token_in_flight_is_the_next_steps_input():
    requests = started()
    for computed in (3, 4):  # the step that samples the token at 4 is not read before the one that computes it
        requests.update(step(cached=cached_requests("a", None, computed)))
        [scheduled] = requests.schedule({"a": 1})
        assert (scheduled.entry.start, scheduled.entry.samples, scheduled.is_decode) == (computed, True, True)
        assert scheduled.is_ahead == (computed == 4)
        assert not requests.sampler_waits(scheduled)
    sequence = scheduled.entry.sequence
    assert (sequence.num_tokens, sequence.num_inflight_tokens) == (4, 2)
    scheduled.request.add_tokens([8])
    assert (sequence.output_token_ids, sequence.num_inflight_tokens) == ([9, 8], 1)


@pytest.mark.parametrize("values", [{"presence_penalty": 1.0}, {"_bad_words_token_ids": [[3, 4]]}])
def test_the_sampler_waits_for_tokens_that_parameters_have_to_see(values):
    requests = table()
    requests.update(step(new=[new_request("a", [1], [5], **values)]))
    [first] = requests.schedule({"a": 1})
    assert not requests.sampler_waits(first)
    requests.update(step(cached=cached_requests("a", None, 1)))
    [ahead] = requests.schedule({"a": 1})
    assert requests.sampler_waits(ahead)


def test_drafts_are_computed_behind_the_last_known_token_and_after_decodes():
    requests = started()
    requests.update(step(new=[new_request("b", [4, 4], [7])]))
    [first] = requests.schedule({"b": 2})
    first.request.add_tokens([5])
    requests.update(step(new=[new_request("c", [6, 6, 6], [9])], cached=cached_requests("a", None, 3)))
    requests.update(step(cached=cached_requests("b", None, 2)))
    decode, drafted, chunk = requests.schedule({"c": 3, "a": 3, "b": 1}, {"a": [9, 9]})
    assert [each.request.request_id for each in (decode, drafted, chunk)] == ["b", "a", "c"]
    assert (drafted.entry.start, drafted.entry.num_tokens, drafted.entry.samples) == (3, 3, True)
    assert (drafted.entry.draft_token_ids, drafted.is_decode) == ((9, 9), False)
    drafted.request.add_tokens([9, 4])
    sequence = drafted.entry.sequence
    assert (sequence.output_token_ids, sequence.num_inflight_tokens) == ([9, 9, 4], 0)


def test_decodes_come_first_and_blocks_are_appended():
    requests = started()
    new = new_request("b", [4, 4], [7])
    requests.update(step(new=[new], cached=cached_requests("a", [6], 3)))
    chunk, decode = requests.schedule({"b": 2, "a": 1})[::-1]
    assert (decode.request.request_id, decode.is_decode, chunk.is_decode) == ("a", True, False)
    assert [list(each.block_ids) for each in decode.entry.sequence.block_tables] == [[5, 6], [5, 6]]
    requests.update(step(finished=["a"]))
    assert "a" not in requests
    assert SequenceId("a") not in requests.sampling


@pytest.mark.parametrize("comes_back_as_new", [False, True])
def test_a_preempted_request_goes_on_in_either_way_of_vllms(comes_back_as_new):
    requests = started()
    seed = requests.sampling[SequenceId("a")].seed
    if comes_back_as_new:
        requests.update(step(new=[new_request("a", [1, 2, 3], [8], known=[1, 2, 3, 9])]))
    else:
        requests.update(step(cached=cached_requests("a", [8], 0, resumed=True, token_ids=[1, 2, 3, 9])))
    [scheduled] = requests.schedule({"a": 4})
    sequence = scheduled.entry.sequence
    assert (scheduled.entry.start, scheduled.entry.samples) == (0, True)
    assert sequence.token_ids(0, 4) == [1, 2, 3, 9]
    assert [list(each.block_ids) for each in sequence.block_tables] == [[8], [8]]
    sampling = requests.sampling[SequenceId("a")]
    assert sampling.seed == seed
    assert sampling.output_token_ids is sequence.output_token_ids


def test_an_output_that_the_scheduler_has_cut_is_sampled_again():
    requests = started()
    requests.update(step(cached=cached_requests("a", [8], 0, resumed=True, token_ids=[1, 2, 3])))
    [scheduled] = requests.schedule({"a": 3})
    assert scheduled.entry.samples
    assert requests.sampling[SequenceId("a")].output_token_ids == []


@pytest.mark.parametrize("comes_back_as_new", [False, True])
def test_a_token_that_was_in_flight_when_the_scheduler_took_the_blocks_is_dropped(comes_back_as_new):
    requests = started()
    requests.update(step(cached=cached_requests("a", None, 3)))
    [in_flight] = requests.schedule({"a": 1})
    if comes_back_as_new:
        requests.update(step(new=[new_request("a", [1, 2, 3], [8], known=[1, 2, 3, 9])]))
    else:
        requests.update(step(cached=cached_requests("a", [8], 0, resumed=True, token_ids=[1, 2, 3, 9])))
    [again] = requests.schedule({"a": 4})
    assert (again.entry.samples, again.is_ahead) == (True, False)
    in_flight.request.add_tokens([7])
    assert requests.sampling[SequenceId("a")].output_token_ids == [9]
    assert again.entry.sequence.num_inflight_tokens == 1


def test_a_request_that_bans_every_token_has_an_error_of_its_own():
    requests = table()
    requests.update(step(new=[new_request("a", [1], [5], allowed_token_ids=[3], _bad_words_token_ids=[[3]])]))
    [scheduled] = requests.schedule({"a": 1})
    assert "ban every token" in str(scheduled.request.error)

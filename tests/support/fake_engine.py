"""An engine without a model: every request's tokens are 0, 1, 2, ..., and a test says when a step goes wrong."""

from __future__ import annotations

import types

from jaxis.engine.execution.request_features import RequestFeatures
from jaxis.engine.host_group import NO_OTHER_HOSTS
from jaxis.engine.kv_connector import KVConnector
from jaxis.engine.output_processor import CompletionState, Request
from jaxis.engine.scheduling.sequence import Sequence, SequenceId, SequenceStatus
from jaxis.engine.speculation import NoSpeculation
from jaxis.errors import EngineError, RequestError
from jaxis.layers.module import JaxModule
from jaxis.sampling_params import SamplingParams

MAX_NUM_SEQS = 4


class FakeEngine:
    """The part of LLMEngine that `EngineThread` and `EngineInfo` use.

    Attributes:
      before_step: Called at the start of each step; may raise or block.
      steps: Number that have begun.
    """

    tokenizer = None
    max_model_len = 1000
    eos_token_ids = frozenset()
    num_preemptions = 0
    speculation = NoSpeculation()

    def __init__(self):
        self.grammar_compiler = None
        self.connector = KVConnector()
        self.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(model="", hf_config={}, logprobs_mode="raw_logprobs"),
            scheduler_config=types.SimpleNamespace(max_num_seqs=MAX_NUM_SEQS),
            parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
        )
        self.runner = types.SimpleNamespace(
            vocab_size=100,
            num_ranks=1,
            num_stages=1,
            last_compile_wait=None,
            features=RequestFeatures(),
            models=[JaxModule()],
        )
        self.before_step = lambda: None
        self.steps = 0
        self.holds = set()
        self.requests = {}

    @property
    def has_unfinished(self):
        return bool(self.requests)

    @property
    def has_work(self):
        return bool(self.requests) and not self.holds

    def reset_prefix_cache(self):
        pass

    def settle(self):
        return []

    @property
    def scheduler(self):
        blocks = types.SimpleNamespace(
            usage=0.0, num_blocks=10, block_size=16, prefix_cache_queries=0, prefix_cache_hits=0
        )
        rank = types.SimpleNamespace(num_running=len(self.requests), num_waiting=0, block_manager=blocks)
        return types.SimpleNamespace(**vars(rank), ranks=(rank,))

    def add_request(self, request_id, prompt_token_ids, params, *, priority, client, cache_salt, grammar, **_):
        if not prompt_token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if prompt_token_ids == [13]:
            raise ValueError("a fault in the engine")
        assert request_id not in self.requests
        request = Request(request_id, None, list(prompt_token_ids), params, seed=0)
        for index in range(params.n):
            total = len(prompt_token_ids) + params.max_tokens
            seq_id = SequenceId(request_id, index)
            sequence = Sequence(seq_id, prompt_token_ids, params, frozenset(), total, arrival=0)
            request.completions.append(CompletionState(request, sequence, None, None))
        self.requests[request_id] = request
        return request

    def abort_request(self, request_id):
        request = self.requests.pop(request_id, None)
        for completion in request.completions if request else ():
            if not completion.sequence.status.finished:
                completion.sequence.status = SequenceStatus.FINISHED_ABORTED

    def step(self):
        self.steps += 1
        try:
            self.before_step()
        except RuntimeError as error:
            for request in self.requests.values():
                request.error = EngineError(str(error))
            self.requests.clear()
            raise EngineError(str(error)) from error
        requests = list(self.requests.values())
        for request in requests:
            for completion in request.completions:
                output = completion.sequence.output_token_ids
                output.append(len(output))
                if len(output) == request.params.max_tokens:
                    completion.sequence.status = SequenceStatus.FINISHED_LENGTH
            if request.finished:
                del self.requests[request.request_id]
        return requests


def fake_built_engine():
    """A result as of `build_engine`."""
    return types.SimpleNamespace(
        engine=FakeEngine(),
        default_sampling_params=SamplingParams(),
        fingerprint="",
        calls={},
        hosts=NO_OTHER_HOSTS,
        left_out="",
    )

"""An engine without a model: every request's tokens are 0, 1, 2, ..., and a test says when a step goes wrong."""

from __future__ import annotations

import types

from jaxis.engine.output_processor import RequestState, SequenceState
from jaxis.engine.scheduling.sequence import Request, RequestStatus
from jaxis.errors import EngineError, RequestError
from jaxis.sampling_params import SamplingParams

MAX_NUM_SEQS = 4


class FakeEngine:
    """What AsyncLLMEngine uses of LLMEngine.

    Attributes:
      before_step: Called at the start of each step; may raise or block.
      steps: How many have begun.
    """

    tokenizer = None
    max_model_len = 1000
    num_preemptions = 0
    last_compile_wait = None

    def __init__(self):
        self.grammar_compiler = None
        self.vllm_config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(hf_config={}),
            scheduler_config=types.SimpleNamespace(max_num_seqs=MAX_NUM_SEQS),
        )
        self.before_step = lambda: None
        self.steps = 0
        self.requests = {}

    @property
    def has_unfinished(self):
        return bool(self.requests)

    @property
    def scheduler(self):
        blocks = types.SimpleNamespace(usage=0.0, prefix_cache_queries=0, prefix_cache_hits=0)
        return types.SimpleNamespace(num_running=len(self.requests), num_waiting=0, block_manager=blocks)

    def add_request(self, request_id, prompt_token_ids, params, *, prompt, priority, cache_salt, grammar):
        if not prompt_token_ids:
            raise RequestError("the prompt is empty: give at least one token")
        if prompt_token_ids == [13]:
            raise ValueError("a fault in the engine")
        state = RequestState(request_id, prompt, list(prompt_token_ids), params)
        for index in range(params.n):
            total = len(prompt_token_ids) + params.max_tokens
            request = Request(request_id, prompt_token_ids, params, frozenset(), total, arrival=0)
            state.sequences.append(SequenceState(state, request, None, index, None))
        self.requests[request_id] = state
        return state

    def abort_request(self, request_id):
        state = self.requests.pop(request_id, None)
        for sequence in state.sequences if state else ():
            if not sequence.request.status.finished:
                sequence.request.status = RequestStatus.FINISHED_ABORTED

    def step(self):
        self.steps += 1
        try:
            self.before_step()
        except RuntimeError as error:
            for state in self.requests.values():
                state.error = EngineError(str(error))
            self.requests.clear()
            raise EngineError(str(error)) from error
        states = list(self.requests.values())
        for state in states:
            for sequence in state.sequences:
                output = sequence.request.output_token_ids
                output.append(len(output))
                if len(output) == state.params.max_tokens:
                    sequence.request.status = RequestStatus.FINISHED_LENGTH
            if state.finished:
                del self.requests[state.request_id]
        return states


def fake_built_engine():
    """What `build_engine` would return."""
    return types.SimpleNamespace(engine=FakeEngine(), default_sampling_params=SamplingParams())

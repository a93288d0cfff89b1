"""The unfinished requests of vLLM's scheduler, as sequences for jaxis' runner.

The scheduler describes a request once, and then sends changes: blocks, and the number of computed tokens. It does not
send sampled tokens back. There are two ways in which a preempted request resumes (vLLM's model runners V1 and V2): as a
cached one, with blocks that replace all earlier ones, or as a new one with a known id.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from jaxis.engine.execution.sequence_sampling import SequenceSampling, draw_seed
from jaxis.engine.execution.token_logprobs import TokenLogprobs
from jaxis.engine.scheduling.scheduler_output import ScheduledSequence
from jaxis.engine.scheduling.sequence import BlockTable, SequenceId
from jaxis.engine.scheduling.sequence import Sequence as TokenSequence
from jaxis.errors import JaxisError, RequestError
from jaxis.integrations.vllm.adapters import NO_ADAPTER, AdapterTable
from jaxis.integrations.vllm.encoder_cache import EncoderCache
from jaxis.integrations.vllm.sampling import GivenMasks, translate_params
from jaxis.integrations.vllm.states import RequestStates
from jaxis.prompts import EmbeddedInput
from jaxis.sampling_params import LogprobsMode, SamplingParams

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass
class RunningRequest:
    """A request, from its first step to the step after its last.

    Attributes:
      request_id: vLLM's id.
      sequence: Tokens and blocks, for the runner.
      masks: Token masks of its grammar; None without a grammar.
      bad_words_token_ids: Token sequences that must not be generated.
      end_token_id: Token that ends the request if none can be sampled.
      seed: Seed of its random numbers.
      images: Images of its prompt in order, with vLLM's identifiers.
      error: Reason why no token can be sampled; None if there is none.
    """

    request_id: str
    sequence: TokenSequence
    masks: GivenMasks | None
    bad_words_token_ids: Sequence[Sequence[int]]
    end_token_id: int
    seed: int
    images: Sequence[tuple[str, EmbeddedInput]] = ()
    error: JaxisError | None = None
    _prompt_logprobs: dict[int, TokenLogprobs[np.ndarray]] = field(default_factory=dict)

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.sequence.prompt_token_ids

    def go_on_from(self, earlier: RunningRequest) -> None:
        """Takes over state of a preempted request that the scheduler does not send."""
        self.seed, self.error, self.sequence.place = earlier.seed, earlier.error, earlier.sequence.place
        self._prompt_logprobs = earlier._prompt_logprobs

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Adds the tokens that the oldest step in flight sampled for the request."""
        self.sequence.output_token_ids += token_ids
        self.sequence.num_inflight_tokens -= 1

    def add_prompt_logprobs(self, start: int, logprobs: TokenLogprobs[np.ndarray]) -> None:
        """Stores the log-probabilities of the tokens that follow positions `start`, `start + 1`, ..."""
        # Chunks computed before a preemption are computed again, perhaps with other borders.
        self._prompt_logprobs = {at: part for at, part in self._prompt_logprobs.items() if at < start}
        self._prompt_logprobs[start] = logprobs

    def finished_prompt_logprobs(self, entry: ScheduledSequence) -> list[TokenLogprobs[np.ndarray]] | None:
        """Returns the prompt's log-probabilities in the step that samples the first output token; otherwise None."""
        num_prompt_tokens = len(self.prompt_token_ids)
        wanted = self.sequence.sampling_params.prompt_logprobs is not None and num_prompt_tokens > 1
        if not wanted or not entry.samples or entry.start + entry.num_tokens != num_prompt_tokens:
            return None
        return [self._prompt_logprobs[start] for start in sorted(self._prompt_logprobs)]


@dataclass(frozen=True)
class ScheduledRequest:
    """A request in a step.

    Attributes:
      request: The request.
      entry: Tokens of the request in the step.
      is_decode: True if the step computes only the last sampled token.
      is_ahead: True if that token is in flight.
    """

    request: RunningRequest
    entry: ScheduledSequence
    is_decode: bool
    is_ahead: bool


class RequestTable:
    """The requests by vLLM's ids.

    Attributes:
      sampling: Sampling state of each sequence.

    Args:
      vocab_size: V.
      num_spans: Number of the model's attention spans; all have the same block table.
      num_state_slots: Slots for recurrent states, as many as requests run at once; None if no layer has states.
      seed: Seed for requests without one.
      logprobs_mode: Definition of log-probabilities.
      adapters: Adapters for requests; None without adapters.
      encoder_cache: Images of prompts; None without images.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        num_spans: int,
        num_state_slots: int | None = None,
        seed: int,
        logprobs_mode: LogprobsMode,
        adapters: AdapterTable | None = None,
        encoder_cache: EncoderCache | None = None,
    ) -> None:
        self._vocab_size, self._num_spans = vocab_size, num_spans
        self._states = None if num_state_slots is None else RequestStates(num_state_slots)
        self._adapters, self._encoder_cache = adapters, encoder_cache
        self._seed = seed
        self._logprobs_mode: LogprobsMode = logprobs_mode
        self._requests: dict[str, RunningRequest] = {}
        self._num_requests = 0
        self.sampling: dict[SequenceId, SequenceSampling] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def get(self, request_id: str) -> RunningRequest | None:
        """Returns the request of this id; None if it has ended."""
        return self._requests.get(request_id)

    def images_of(self, request_id: str) -> Sequence[tuple[str, EmbeddedInput]]:
        """Returns the images of a request, with vLLM's identifiers."""
        return self._requests[request_id].images

    def __len__(self) -> int:
        return len(self._requests)

    def update(self, output: SchedulerOutput) -> None:
        """Applies the scheduler's changes: first removes finished requests, then adds new ones and changes others."""
        for request_id in output.finished_req_ids:
            self._remove(request_id)
        if self._states is not None:
            for request_id in output.preempted_req_ids or ():
                self._states.give_back(request_id)
        for new in output.scheduled_new_reqs:
            self._add(new)
        cached = output.scheduled_cached_reqs
        for index in range(len(cached.req_ids)):
            self._change(cached, index)

    def schedule(
        self, num_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]] = MappingProxyType({})
    ) -> list[ScheduledRequest]:
        """Returns the requests of a step in the runner's order: decodes first, then those with drafts.

        Args:
          num_tokens: Number of tokens to compute for each request, including drafts, by id.
          drafts: Drafts for some requests, by id.
        """
        scheduled = [
            self._scheduled(self._requests[request_id], number, tuple(drafts.get(request_id, ())))
            for request_id, number in num_tokens.items()
        ]
        if self._adapters is not None and scheduled:
            self._adapters.place({each.entry.sequence.place for each in scheduled} - {NO_ADAPTER})
        return sorted(scheduled, key=lambda each: (not each.is_decode, not each.entry.draft_token_ids))

    def sampler_waits(self, scheduled: ScheduledRequest) -> bool:
        """Returns whether the sampler of its step needs a mask, or a token in flight, that is not known yet."""
        request, entry = scheduled.request, scheduled.entry
        if not entry.samples:
            return False
        is_behind = scheduled.is_ahead and self.sampling[entry.sequence.seq_id].needs_newest_token
        return request.masks is not None or is_behind

    def _scheduled(self, request: RunningRequest, num_tokens: int, drafts: tuple[int, ...]) -> ScheduledRequest:
        sequence = request.sequence
        start, is_ahead = sequence.num_computed_tokens, sequence.num_inflight_tokens > 0
        sequence.num_computed_tokens = stop = start + num_tokens
        num_known = sequence.num_tokens_with_inflight
        state = None if self._states is None else self._states.step(request.request_id, start, num_tokens)
        samples = stop - len(drafts) == num_known
        entry = ScheduledSequence(sequence, start, num_tokens, samples=samples, state=state, draft_token_ids=drafts)
        is_decode = entry.samples and num_tokens == 1 and num_known > sequence.num_prompt_tokens
        sequence.num_inflight_tokens += entry.samples
        return ScheduledRequest(request, entry, is_decode, is_ahead)

    def _add(self, new: NewRequestData) -> None:
        known = self._requests.get(new.req_id)
        if known is None:
            self._num_requests += 1
        params = translate_params(new.sampling_params, self._logprobs_mode)
        prompt_token_ids: list[int] = list(new.prompt_token_ids or ())
        [block_ids] = new.block_ids
        # A preempted request may come back as a new one, with the tokens sampled before.
        output_token_ids: list[int] = list((new.prefill_token_ids or ())[len(prompt_token_ids) :])
        request = RunningRequest(
            new.req_id,
            self._make_sequence(SequenceId(new.req_id), params, prompt_token_ids, output_token_ids, block_ids),
            None if new.sampling_params.structured_outputs is None else GivenMasks(self._vocab_size),
            bad_words_token_ids=new.sampling_params.bad_words_token_ids or [],
            end_token_id=min(new.sampling_params.all_stop_token_ids, default=0),
            seed=draw_seed(self._seed, self._num_requests) if params.seed is None else params.seed,
        )
        request.sequence.num_computed_tokens = new.num_computed_tokens
        if known is not None:
            request.go_on_from(known)
        elif new.lora_request is not None and self._adapters is not None:
            try:
                request.sequence.place = self._adapters.begin(new.lora_request)
            except JaxisError as error:
                request.error = error
        if self._encoder_cache is not None:
            request.images = self._encoder_cache.read(new.mm_features)
            request.sequence.spans = tuple(image for _, image in request.images)
        self._requests[new.req_id] = request
        self._prepare_sampling(request)

    def _change(self, cached: CachedRequestData, index: int) -> None:
        request_id = cached.req_ids[index]
        request = self._requests[request_id]
        sequence, table = request.sequence, request.sequence.block_tables[0]
        is_resumed = request_id in cached.resumed_req_ids
        if is_resumed:
            table.block_ids = array("i")
        if (of_groups := cached.new_block_ids[index]) is not None:
            [block_ids] = of_groups
            table.block_ids.extend(block_ids)
        if (token_ids := cached.all_token_ids.get(request_id)) is not None:
            outputs = list(token_ids[sequence.num_prompt_tokens :])
            if is_resumed or outputs != sequence.output_token_ids:
                # The scheduler may have dropped the last sampled token. If that is in flight, the old sequence gets it.
                adapter, images = sequence.place, request.images
                if self._encoder_cache is not None:
                    images = [(name, self._encoder_cache.with_pixels(image)) for name, image in images]
                sequence = self._make_sequence(
                    sequence.seq_id, sequence.sampling_params, sequence.prompt_token_ids, outputs, table.block_ids
                )
                sequence.place, sequence.spans = adapter, tuple(image for _, image in images)
                self._requests[request_id] = request = replace(request, sequence=sequence, images=images)
                self._prepare_sampling(request)
        sequence.num_computed_tokens = cached.num_computed_tokens[index]

    def _make_sequence(
        self,
        seq_id: SequenceId,
        params: SamplingParams,
        prompt_token_ids: list[int],
        output_token_ids: list[int],
        block_ids: Sequence[int],
    ) -> TokenSequence:
        return TokenSequence(
            seq_id,
            prompt_token_ids,
            params,
            frozenset(),
            max_total_tokens=0,  # the scheduler decides the end and the order
            arrival=0,
            output_token_ids=output_token_ids,
            block_tables=[BlockTable(array("i", block_ids))] * max(1, self._num_spans),
        )

    def _prepare_sampling(self, request: RunningRequest) -> None:
        sequence, params = request.sequence, request.sequence.sampling_params
        make = functools.partial(
            SequenceSampling,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            vocab_size=self._vocab_size,
            seed=request.seed,
        )
        try:
            # The end-of-sequence tokens are among the parameters' stop tokens.
            sampling = make(params, bad_words_token_ids=request.bad_words_token_ids, grammar=request.masks)
        except RequestError as error:
            request.error = error
            sampling = make(SamplingParams(temperature=0.0, logprobs=params.logprobs))
        self.sampling[sequence.seq_id] = sampling

    def _remove(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and self._adapters is not None:
            self._adapters.end(request.sequence.place)
        if self._states is not None:
            self._states.give_back(request_id)
        self.sampling.pop(SequenceId(request_id), None)

"""SGLang's /generate: texts or token ids in; text, token ids and log-probabilities out.

Source of the wire form: sglang/srt/managers/io_struct.py and https://docs.sglang.io/basic_usage/sampling_params.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator

from jaxis.errors import RequestError
from jaxis.outputs import CompletionOutput, Logprob, RequestOutput
from jaxis.sampling_params import INTEGER_BOUNDS, MAX_LOGPROBS, LogprobsMode
from jaxis.server.generation.answer_format import AnswerFormat
from jaxis.server.generation.answer_reader import AnswerCounts
from jaxis.server.generation.grammar import AnswerGrammar
from jaxis.server.generation.job import GenerationJob, make_job
from jaxis.server.generation.prompts import PlainPrompts
from jaxis.server.generation.routed_experts import routed_experts_int32
from jaxis.server.generation.served_model import ServedModel
from jaxis.server.http.body import MAX_INT32, LenientModel, NotApplied, TokenId, bounded, is_none, new_id
from jaxis.server.http.errors import DONE, DataEvents, ErrorDialect
from jaxis.server.http.sse import sse_event
from jaxis.server.openai.fields import UsualSampling
from jaxis.server.openai.job_parameters import bias_by_token
from jaxis.server.openai.logprobs import finite

MAX_PROMPTS = 4096
DEFAULT_MAX_NEW_TOKENS = 128  # as in SGLang
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
# SGLang's names -> jaxis's.
_SAMPLING = {
    **{name: name for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")},
    **{name: name for name in ("repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens")},
    "thinking_token_budget": "thinking_token_budget",
    **{"n": "n", "top_k": "top_k", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"},
    **{"sampling_seed": "seed", "no_stop_trim": "include_stop_str_in_output"},
}
_NO_MEDIA = "prompts take no images here: send those to /v1/chat/completions"
_NOT_SUPPORTED = "it is not supported here: leave it out"


class SGLangSamplingParams(UsualSampling):
    """SGLang's sampling parameters that are implemented; others are refused by name.

    Attributes:
      max_new_tokens: Most tokens to generate; None stands for 128, as in SGLang.
      sampling_seed: Seed; `seed` in jaxis.
      no_stop_trim: True if the text keeps the stop string; `include_stop_str_in_output` in jaxis.
      json_schema, regex, ebnf: Constraint on the text from its first token; at most one of the three.
    """

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int | None = bounded(INTEGER_BOUNDS["max_tokens"], high=MAX_INT32)
    min_new_tokens: int | None = bounded(INTEGER_BOUNDS["min_tokens"], high=MAX_INT32)
    no_stop_trim: bool | None = None
    sampling_seed: int | None = bounded(INTEGER_BOUNDS["seed"])
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class SGLangRequest(LenientModel):
    """A prompt, or a batch of prompts, to continue.

    Attributes:
      text, input_ids: Prompts, as strings or as token ids; exactly one of the two.
      return_logprob: True returns log-probabilities of generated tokens, and of prompt tokens from `logprob_start_len`
        on.
      logprob_start_len: First prompt token with a log-probability; None or -1 selects no prompt token.
      top_logprobs_num: Number of most likely tokens with a log-probability at each position.
      return_text_in_logprobs: True adds each token's text to its id.
      return_routed_experts: True returns the experts of each token from `routed_experts_start_len` on.
      logprobs_mode: Mode of `SamplingParams`; SGLang has no such field.
      rid: Id of the request, which the answer repeats.
    """

    not_applied: ClassVar[dict[str, NotApplied]] = {
        **dict.fromkeys(("image_data", "video_data", "audio_data"), NotApplied(([],), _NO_MEDIA)),
        **dict.fromkeys(("input_embeds", "session_params", "custom_logit_processor"), NotApplied((), _NOT_SUPPORTED)),
        "return_hidden_states": NotApplied((False,), _NOT_SUPPORTED),
        "token_ids_logprob": NotApplied(([],), "send top_logprobs_num, or score the tokens as a prompt"),
        "lora_path": NotApplied((), "adapters are not supported here: leave it out"),
        "max_new_tokens": NotApplied((), "send sampling_params.max_new_tokens"),
        "temperature": NotApplied((), "send sampling_params.temperature"),
        "prompt": NotApplied((), "send text or input_ids"),
        "messages": NotApplied((), "call /v1/chat/completions"),
    }

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)] | None = None
    sampling_params: SGLangSamplingParams = SGLangSamplingParams.model_construct()
    model: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1, le=MAX_INT32)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    logprobs_mode: LogprobsMode | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0, le=MAX_INT32)] | None = None
    stream: bool | None = None
    rid: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _one_of_them(self) -> SGLangRequest:
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("send one of text and input_ids")
        return self

    @property
    def is_batch(self) -> bool:
        """True if the answer is a list."""
        if self.input_ids is not None:
            is_list = isinstance(self.input_ids[0], list)
        else:
            is_list = isinstance(self.text, list)
        return is_list or (self.sampling_params.n or 1) > 1

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts as a list, also if there is only one."""
        if self.input_ids is not None:
            return list(self.input_ids) if isinstance(self.input_ids[0], list) else [self.input_ids]  # pyright: ignore
        return [self.text] if isinstance(self.text, str) else list(self.text or ())


# A token's log-probability (None for a prompt's first token), its id, and its text or None.
TokenEntry = tuple[float | None, int, str | None]


class SGLangMeta(BaseModel):
    """Metadata of an answer.

    Attributes:
      finish_reason: {"type": "stop", "matched": ...}, {"type": "length", "length": ...}, or None before the end.
      e2e_latency: Seconds since the request's arrival.
      seed: Seed of the request, or the seed drawn for it.
      kept_mass: Kept probability masses; see `CompletionOutput`.
      routed_experts: Experts of the tokens, in the form of `routed_experts_int32`.
    """

    id: str
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float
    weight_version: str | None
    seed: int | None = Field(default=None, exclude_if=is_none)
    input_token_logprobs: list[TokenEntry] | None = Field(default=None, exclude_if=is_none)
    output_token_logprobs: list[TokenEntry] | None = Field(default=None, exclude_if=is_none)
    input_top_logprobs: list[list[TokenEntry] | None] | None = Field(default=None, exclude_if=is_none)
    output_top_logprobs: list[list[TokenEntry] | None] | None = Field(default=None, exclude_if=is_none)
    kept_mass: list[float] | None = Field(default=None, exclude_if=is_none)
    routed_experts: str | None = Field(default=None, exclude_if=is_none)


class SGLangAnswer(BaseModel):
    """An answer. Each event of a stream has the whole answer so far.

    Attributes:
      index: Index in the batch; set in streams only.
    """

    text: str
    output_ids: list[int]
    meta_info: SGLangMeta
    index: int | None = Field(default=None, exclude_if=is_none)


class SGLangAnswers(RootModel[list[SGLangAnswer]]):
    """The answers of a batch."""


SGLANG_ERRORS = ErrorDialect(
    prefixes=("/generate",),
    fields={ours: f"sampling_params.{theirs}" for theirs, ours in _SAMPLING.items()}
    | {"logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num", "prompt": "text"}
    | {"routed_experts_prompt_start": "routed_experts_start_len"},
)
"""OpenAI's errors, with this endpoint's names of fields."""


def sglang_job(request: SGLangRequest, model: ServedModel) -> GenerationJob:
    """Returns the job of a request.

    Raises:
      RequestError: A field cannot be honoured.
    """
    model = model.named(request.model)
    given = request.sampling_params
    settings: dict[str, Any] = {ours: getattr(given, theirs) for theirs, ours in _SAMPLING.items()}
    settings["max_tokens"] = DEFAULT_MAX_NEW_TOKENS if given.max_new_tokens is None else given.max_new_tokens
    settings["logprobs_mode"] = request.logprobs_mode
    settings["return_routed_experts"] = request.return_routed_experts
    settings["routed_experts_prompt_start"] = request.routed_experts_start_len
    if given.logit_bias is not None:
        settings["logit_bias"] = bias_by_token(given.logit_bias)
    if request.return_logprob:
        settings["logprobs"] = request.top_logprobs_num or 0
        if request.logprob_start_len is not None and request.logprob_start_len >= 0:
            settings["prompt_logprobs"] = request.top_logprobs_num or 0
    elif request.top_logprobs_num:
        raise RequestError("needs return_logprob=true: add it", param="top_logprobs_num")
    answer = AnswerFormat(grammar=_grammar(given))
    return make_job(
        request.rid or new_id("gen"),
        model,
        PlainPrompts(prompts=request.prompts(), cache_salt=request.cache_salt),
        settings,
        answer,
        priority=request.priority,
        stream=request.stream,
    )


def _grammar(given: SGLangSamplingParams) -> AnswerGrammar | None:
    kinds = {"json_schema": given.json_schema, "regex": given.regex, "grammar": given.ebnf}
    constraints = {kind: value for kind, value in kinds.items() if value is not None}
    if len(constraints) > 1:
        raise RequestError(
            "constrain the answer, and only one can: send one", param=f"sampling_params.{[*constraints][1]}"
        )
    for kind, value in constraints.items():
        field = "ebnf" if kind == "grammar" else kind
        constraint: dict[str, Any] = {kind: value}
        return AnswerGrammar.of(f"sampling_params.{field}", **constraint)
    return None


class SGLangWriter(DataEvents):
    def __init__(self, request: SGLangRequest, job: GenerationJob) -> None:
        self._request, self._job = request, job
        self._counts = AnswerCounts()
        self._so_far: dict[tuple[int, int], CompletionOutput] = {}
        self._prompts: dict[int, RequestOutput] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> SGLangAnswer | SGLangAnswers:
        answers = []
        for prompt, output in enumerate(outputs):
            self._counts.add(prompt, output)
            answers += [self._answer(output, completion) for completion in output.outputs]
        return SGLangAnswers(answers) if self._request.is_batch else answers[0]

    def add(self, prompt: int, output: RequestOutput) -> str:
        """Returns an event with the whole of each answer that an output adds to."""
        self._counts.add(prompt, output)
        first = self._prompts.setdefault(prompt, output)
        text = ""
        for new in output.outputs:
            so_far = self._so_far.get((prompt, new.index))
            if so_far is None:
                so_far = self._so_far[prompt, new.index] = new
            else:
                so_far.text += new.text
                so_far.token_ids += new.token_ids
                so_far.finish_reason, so_far.stop_reason = new.finish_reason, new.stop_reason
                so_far.routed_experts = new.routed_experts
                if so_far.logprobs is not None:
                    so_far.logprobs += new.logprobs or []
                if so_far.kept_mass is not None:
                    so_far.kept_mass += new.kept_mass or []
            answer = self._answer(first, so_far)
            if self._request.is_batch:
                answer.index = prompt * self._job.params.n + new.index
            text += sse_event(answer)
        return text

    def end(self) -> str:
        return DONE

    def _answer(self, output: RequestOutput, completion: CompletionOutput) -> SGLangAnswer:
        meta = SGLangMeta(
            id=self._job.request_id,
            finish_reason=_finish_reason(completion),
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(completion.token_ids),
            cached_tokens=output.num_cached_tokens,
            e2e_latency=self._counts.total_seconds,
            weight_version=self._job.model.fingerprint,
            seed=output.seed,
            routed_experts=routed_experts_int32(completion),
        )
        if completion.logprobs is not None:
            self._add_logprobs(meta, output, completion)
        return SGLangAnswer(text=completion.text, output_ids=completion.token_ids, meta_info=meta)

    def _add_logprobs(self, meta: SGLangMeta, output: RequestOutput, completion: CompletionOutput) -> None:
        positions = completion.logprobs or []
        meta.output_token_logprobs = [
            self._entry(token_id, entries) for token_id, entries in zip(completion.token_ids, positions, strict=True)
        ]
        meta.kept_mass = completion.kept_mass
        num_top = self._request.top_logprobs_num
        if num_top:
            meta.output_top_logprobs = [self._top(entries, num_top) for entries in positions]
        start = self._request.logprob_start_len
        prompt = output.prompt_logprobs
        if start is None or start < 0 or prompt is None:
            meta.input_token_logprobs = []
            return
        ids = output.prompt_token_ids[start:]
        meta.input_token_logprobs = [
            self._entry(token_id, entries) for token_id, entries in zip(ids, prompt[start:], strict=True)
        ]
        if num_top:
            meta.input_top_logprobs = [self._top(entries, num_top) for entries in prompt[start:]]

    def _entry(self, token_id: int, entries: Mapping[int, Logprob] | None) -> TokenEntry:
        value = None if entries is None else finite(entries[token_id].logprob)
        return value, token_id, self._text(token_id)

    def _top(self, entries: Mapping[int, Logprob] | None, num_top: int) -> list[TokenEntry] | None:
        if entries is None:
            return None
        best = sorted(entries.items(), key=lambda entry: entry[1].rank)[:num_top]
        return [(finite(logprob.logprob), token_id, self._text(token_id)) for token_id, logprob in best]

    def _text(self, token_id: int) -> str | None:
        tokenizer = self._job.model.tokenizer
        return tokenizer.token_text(token_id) if self._request.return_text_in_logprobs and tokenizer else None


def _finish_reason(completion: CompletionOutput) -> dict[str, Any] | None:
    reason = completion.finish_reason
    if reason == "stop":
        # At the end of a sequence, `matched` is its last token.
        matched = completion.stop_reason
        return {"type": reason, "matched": completion.token_ids[-1] if matched is None else matched}
    if reason == "length":
        return {"type": reason, "length": len(completion.token_ids)}
    return None if reason is None else {"type": reason}

"""LLM: the Python API for offline use."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import numpy as np

from jaxis.engine.setup import EngineArgs, build_engine
from jaxis.errors import RequestError
from jaxis.outputs import Logprob, RequestOutput
from jaxis.progress import ProgressDisplay
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Mapping[str, Any]

PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class StreamOutput:
    """What a step added to a streamed completion.

    Attributes:
      text: New text; may be empty while a character or a stop string is undecided.
      token_ids: New token ids.
      logprobs: The new tokens', if asked for.
      finish_reason: "stop", "length" or "abort" in the last one, else None.
      stop_reason: The stop text or stop token id that ended it; None for end-of-sequence.
      num_prompt_tokens: Tokens of the prompt.
      num_cached_tokens: Prompt tokens that the prefix cache held.
    """

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int


class LLM:
    """A model, ready to generate.

    Use it as a context manager, or call `close`, to give its memory back. A Ctrl-C ends the call it interrupts and
    leaves the LLM usable. Not for use from several threads at once.

    Args:
      model: Folder of a checkpoint in Hugging Face format, or a hub id; None is the embedded demonstration model.
      dtype: Type of weights and activations; "auto" is the checkpoint's on GPU and TPU and float32 on CPU, where
        narrower types are slower.
      max_model_len: Most tokens of a request; None is the checkpoint's. Shortened, with a note, to what the KV cache
        can hold.
      max_num_seqs: Most requests that run at once.
      max_num_batched_tokens: Most tokens of a step; long prompts are taken in chunks of it.
      kv_cache_memory: Bytes for the KV cache, or a text such as "2GiB"; None sizes it from the memory there is.
      enable_prefix_caching: Compute equal prompt prefixes once.
      block_size: Tokens of a KV cache block.
      kv_cache_dtype: Type of the cached keys and values; "auto" is `dtype`.
      tensor_parallel_size: Devices to spread the model over.
      load_format: "auto", or "dummy" for random weights.
      seed: For requests that bring none, and for random weights.
      revision, token, cache_dir: Of the hub.
      hf_overrides: Keys of config.json to set; None as a value removes the key.
      show_progress: Show loading, compiling and generating on stderr.

    Raises:
      ConfigError: An argument or a config key that cannot be honoured.
      CheckpointError: The checkpoint cannot be found or read, or does not match the model.
      EngineError: Not enough memory.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory: int | str | None = None,
        enable_prefix_caching: bool = True,
        block_size: int = 16,
        kv_cache_dtype: str = "auto",
        tensor_parallel_size: int = 1,
        load_format: str = "auto",
        seed: int = 0,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        show_progress: bool = True,
    ) -> None:
        self._progress = ProgressDisplay(show_progress)
        self._built = build_engine(
            EngineArgs(
                model=None if model is None else str(model),
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                kv_cache_memory=kv_cache_memory,
                enable_prefix_caching=enable_prefix_caching,
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                tensor_parallel_size=tensor_parallel_size,
                load_format=load_format,
                seed=seed,
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                hf_overrides=dict(hf_overrides or {}),
            ),
            self._progress,
        )
        self._engine = self._built.engine
        self._num_calls = 0

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None if it has none: prompts are then token ids."""
        return self._engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self._engine.max_model_len

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends, generating until the model stops."""
        return self._built.default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, as many at a time as the engine holds.

        Args:
          prompts: One or many; each a text, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and
            optionally "cache_salt" (only requests with the same salt share cached prefixes).
          sampling_params: For all, or one for each prompt; None is `get_default_sampling_params()`.
          priority: One for each prompt; the lower value is served first.
          progress: Show a progress bar.

        Returns:
          One output a prompt, in their order.

        Raises:
          RequestError: A prompt or parameter that cannot be honoured; nothing was generated.
        """
        prompt_list = _as_list(prompts)
        requests = [self._tokenize(prompt, i, len(prompt_list)) for i, prompt in enumerate(prompt_list)]
        return self._run(requests, sampling_params, priority, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or many, through the model's chat template.

        Args:
          messages: One conversation, a list of {"role", "content"}, or a list of conversations.
          sampling_params: As for `generate`.
          tools: Functions that the model may call, as JSON schemas.
          chat_template: A Jinja template in place of the model's own.
          add_generation_prompt: End the prompt where the assistant's turn begins.
          continue_final_message: Go on with the last message in place of answering it.
          chat_template_kwargs: More variables for the template, such as `enable_thinking`.
          progress: Show a progress bar.

        Raises:
          RequestError: The model has no chat template, or it refuses the messages.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        render = functools.partial(
            self._chat_prompt,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
        return self._run([render(conversation) for conversation in conversations], sampling_params, None, progress)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[StreamOutput]:
        """Completes one prompt, or answers one conversation, step by step.

        Closing the iterator before its end, or interrupting it, aborts the request.

        Args:
          prompt: As for `generate`, or a conversation as for `chat`.
          sampling_params: `n` must be 1; None is `get_default_sampling_params()`.
          tools, chat_template_kwargs: As for `chat`.

        Raises:
          RequestError: The prompt or a parameter cannot be honoured.
        """
        params = sampling_params or self.get_default_sampling_params()
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream has one completion; use generate for several")
        if _is_conversation(prompt):
            request = self._chat_prompt(prompt, tools=tools, **(chat_template_kwargs or {}))
        else:
            request = self._tokenize(prompt, 0, 1)
        [request_id] = self._add([request], [params], None)
        return self._stream(request_id)

    def compute_logits(self, token_ids: Sequence[int], *, path: Literal["whole", "paged"] = "whole") -> np.ndarray:
        """Logits of every position of one sequence, float32 [T, V], for verification.

        Args:
          token_ids: T tokens.
          path: "whole" runs the sequence at once without a cache; "paged" as prompts are served.
        """
        if path not in ("whole", "paged"):
            raise RequestError(f"path={path!r} must be 'whole' or 'paged'")
        return self._engine.compute_logits(token_ids, paged=path == "paged")

    def close(self) -> None:
        """Gives the memory back; the LLM cannot be used any more."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        requests: list[_TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        params = _one_for_each(sampling_params or self.get_default_sampling_params(), requests)
        request_ids = self._add(requests, params, priority)
        outputs: dict[str, RequestOutput] = {}
        num_tokens = 0
        show = self._progress if progress and len(requests) > 1 else ProgressDisplay(enabled=False)
        try:
            with show.generating(len(requests)) as update:
                while len(outputs) < len(requests):
                    for state in self._step():
                        if state.finished:
                            outputs[state.request_id] = output = state.output()
                            num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    update(len(outputs), num_tokens)
        finally:
            for request_id in request_ids:
                self._engine.abort_request(request_id)
        return [outputs[request_id] for request_id in request_ids]

    def _stream(self, request_id: str) -> Iterator[StreamOutput]:
        num_sent = 0
        try:
            finished = False
            while not finished:
                for state in self._step():
                    if state.request_id != request_id:
                        continue
                    sequence, finished = state.sequences[0], state.finished
                    new = sequence.tokens_since(num_sent)
                    num_sent += len(new.token_ids)
                    yield StreamOutput(
                        text=sequence.delta(),
                        token_ids=new.token_ids,
                        logprobs=new.logprobs,
                        finish_reason=new.finish_reason,
                        stop_reason=new.stop_reason,
                        num_prompt_tokens=len(state.prompt_token_ids),
                        num_cached_tokens=sequence.request.num_cached_tokens,
                    )
        finally:
            self._engine.abort_request(request_id)

    def _step(self) -> list[Any]:
        with _interrupt_deferred():
            return self._engine.step()

    def _add(
        self, requests: list[_TokenizedPrompt], params: Sequence[SamplingParams], priority: Sequence[int] | None
    ) -> list[str]:
        """Queues all of the requests or none."""
        if priority is not None and len(priority) != len(requests):
            raise RequestError(f"{len(priority)} priorities were given for {len(requests)} prompts")
        self._num_calls += 1
        request_ids: list[str] = []
        try:
            for i, (request, request_params) in enumerate(zip(requests, params, strict=True)):
                request_id = f"{self._num_calls}-{i}"
                self._engine.add_request(
                    request_id,
                    request.token_ids,
                    request_params,
                    prompt=request.text,
                    priority=0 if priority is None else priority[i],
                    cache_salt=request.cache_salt,
                )
                request_ids.append(request_id)
        except BaseException as error:
            for request_id in request_ids:
                self._engine.abort_request(request_id)
            if isinstance(error, RequestError) and len(requests) > 1:
                raise RequestError(f"prompt {len(request_ids)} of {len(requests)}: {error}") from None
            raise
        return request_ids

    def _tokenize(self, prompt: Prompt, index: int, count: int) -> _TokenizedPrompt:
        where = f"prompt {index} of {count}" if count > 1 else "the prompt"
        if isinstance(prompt, Mapping):
            if unknown := set(prompt) - PROMPT_KEYS:
                raise RequestError(f"{where} has unknown keys {sorted(unknown)}; known: {sorted(PROMPT_KEYS)}")
            if ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise RequestError(f"{where} needs exactly one of 'prompt' and 'prompt_token_ids'")
            content = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
            cache_salt = prompt.get("cache_salt")
        else:
            content, cache_salt = prompt, None
        if not isinstance(content, str):
            if not isinstance(content, Sequence | np.ndarray):
                raise RequestError(f"{where} is {type(content).__name__}; give a text or a list of token ids")
            return _TokenizedPrompt(None, list(content), cache_salt)
        if self.tokenizer is None:
            raise RequestError(f"{where} is text, and the checkpoint has no tokenizer: give a list of token ids")
        return _TokenizedPrompt(content, self.tokenizer.encode(content), cache_salt)

    def _chat_prompt(self, messages: Sequence[Message], **template: Any) -> _TokenizedPrompt:
        if self.tokenizer is None:
            raise RequestError("chat needs a tokenizer with a chat template, and the checkpoint has none")
        text = self.tokenizer.apply_chat_template(messages, **template)
        return _TokenizedPrompt(text, self.tokenizer.encode(text, add_special_tokens=False), None)


@dataclass(frozen=True)
class _TokenizedPrompt:
    text: str | None
    token_ids: list[int]
    cache_salt: str | None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int | np.integer) for item in items):
        return [items]
    return items


def _is_conversation(prompt: Prompt | Sequence[Message]) -> bool:
    return not isinstance(prompt, str | Mapping) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams], requests: Sequence[object]
) -> Sequence[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * len(requests)
    if len(params) != len(requests):
        raise RequestError(f"{len(params)} sampling_params were given for {len(requests)} prompts")
    return params


@contextmanager
def _interrupt_deferred() -> Iterator[None]:
    """Holds a Ctrl-C back until the step is done, so that nothing is left half-way; a second one comes through."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.default_int_handler:
        yield
        return

    def handler(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted:
        raise KeyboardInterrupt

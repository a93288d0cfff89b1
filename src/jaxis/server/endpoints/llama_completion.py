"""llama-server's /completion: the core's completion in its shape, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from jaxis.outputs import CompletionOutput
from jaxis.server.endpoints.answer_clock import AnswerClock
from jaxis.server.endpoints.completions import TextCompletion
from jaxis.server.endpoints.context import ServerContext
from jaxis.server.endpoints.generation import generate
from jaxis.server.endpoints.renamed_fields import renamed_fields
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.http.errors import ParameterError
from jaxis.server.http.sse import DataEvents, sse_event
from jaxis.server.protocol.base import MAX_INT32
from jaxis.server.protocol.completions import CompletionRequest
from jaxis.server.protocol.llama_server import LlamaCompletion, LlamaCompletionRequest, LlamaTimings

_SAME_NAME = ("model", "prompt", "temperature", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
# The core's names -> llama-server's, for errors.
_NAMES = {
    "guided_json": "json_schema",
    "guided_grammar": "grammar",
    "repetition_penalty": "repeat_penalty",
    "max_tokens": "n_predict",
}


class LlamaCompletionRun(DataEvents):
    """One request, checked and ready to run.

    Attributes:
      job: The generation job.

    Args:
      request: The request.
      model: The served model.

    Raises:
      RequestError: A field cannot be honoured.
    """

    def __init__(self, request: LlamaCompletionRequest, model: ServedModel) -> None:
        self._model = model.named(request.model)
        with renamed_fields(_NAMES):
            self.job = TextCompletion(_core_request(request), self._model).job
        self._clock = AnswerClock()

    async def run(self, context: ServerContext) -> LlamaCompletion:
        """The whole answer: what the stream adds up to."""
        parts = [part async for part in self._parts(context)]
        content, tokens = "".join(part.content for part in parts), [token for part in parts for token in part.tokens]
        return parts[-1].model_copy(update={"content": content, "tokens": tokens})

    async def stream(self, context: ServerContext) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        async with aclosing(self._parts(context)) as parts:
            async for part in parts:
                yield sse_event(part)

    async def _parts(self, context: ServerContext) -> AsyncGenerator[LlamaCompletion, None]:
        last = CompletionOutput(0)
        with renamed_fields(_NAMES):
            async with aclosing(generate(context, self.job)) as prompt_outputs:
                async for _, output in prompt_outputs:
                    self._clock.take(output)
                    for last in output.outputs:
                        if last.text:
                            yield self._part(last.text, last.token_ids)
        yield self._ended(last)

    def _part(self, content: str, tokens: list[int]) -> LlamaCompletion:
        return LlamaCompletion(
            content=content,
            tokens=tokens,
            stop=False,
            tokens_predicted=self._clock.num_tokens,
            tokens_evaluated=self._clock.num_prompt_tokens,
        )

    def _ended(self, last: CompletionOutput) -> LlamaCompletion:
        clock = self._clock
        word = last.stop_reason if isinstance(last.stop_reason, str) else ""
        decode_seconds = clock.decode_seconds
        timings = LlamaTimings(
            cache_n=clock.num_cached_tokens,
            prompt_n=clock.num_prompt_tokens - clock.num_cached_tokens,
            prompt_ms=1e3 * clock.prefill_seconds,
            predicted_n=clock.num_tokens,
            predicted_ms=1e3 * decode_seconds,
            # The first token is the prefill's.
            predicted_per_second=(clock.num_tokens - 1) / decode_seconds if decode_seconds else None,
        )
        return self._part("", []).model_copy(
            update={
                "stop": True,
                "model": self._model.name,
                "stop_type": "limit" if last.finish_reason == "length" else "word" if word else "eos",
                "stopping_word": word,
                "tokens_cached": clock.num_cached_tokens,
                "truncated": False,
                "timings": timings,
            }
        )


def _core_request(request: LlamaCompletionRequest) -> CompletionRequest:
    """The same request of /v1/completions.

    Raises:
      ParameterError: Nothing is to be generated.
    """
    if request.n_predict == 0:
        raise ParameterError("n_predict", "n_predict=0 generates nothing: send at least 1")
    if request.grammar and request.json_schema is not None:
        raise ParameterError("json_schema", "grammar and json_schema both constrain the answer: send only one")
    return CompletionRequest(
        **{name: getattr(request, name) for name in _SAME_NAME},
        # The core's own limit is 16 tokens; this one is past the end of any context.
        max_tokens=MAX_INT32 if request.n_predict in (None, -1) else request.n_predict,
        top_k=None if request.top_k is None else max(0, request.top_k),
        seed=None if request.seed is None or request.seed < 0 else request.seed,
        repetition_penalty=request.repeat_penalty,
        ignore_eos=request.ignore_eos,
        guided_grammar=request.grammar or None,
        guided_json=request.json_schema,
        stream=request.stream,
    )

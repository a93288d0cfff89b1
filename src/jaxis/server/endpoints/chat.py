"""/v1/chat/completions: answers a conversation, whole or streamed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from jaxis.engine.frontend.output_stream import merge_outputs
from jaxis.engine.grammar.delayed_grammar import DelayedGrammar, Grammar
from jaxis.outputs import CompletionOutput, RequestOutput
from jaxis.parsing.model_parsers import ModelParsers
from jaxis.parsing.output_parser import OutputParser
from jaxis.parsing.parser_events import Event
from jaxis.prompts import TokenizedPrompt
from jaxis.server.endpoints.chat_output import ChatOutput, delta_of, message_of, plain_text
from jaxis.server.endpoints.chat_prompt import message_text, template_arguments, tokenize_request
from jaxis.server.endpoints.chat_tools import ChatTools, choose_tools
from jaxis.server.endpoints.context import ServerContext
from jaxis.server.endpoints.generation import GenerationJob, generate
from jaxis.server.endpoints.grammar_start import call_tokens, reasoning_tokens
from jaxis.server.endpoints.logprobs import LogprobFormatter
from jaxis.server.endpoints.sampling import chat_sampling_params, check_stream_options
from jaxis.server.endpoints.served_model import ServedModel
from jaxis.server.endpoints.structured_outputs import AnswerGrammar
from jaxis.server.endpoints.usage import UsageCounter
from jaxis.server.http.errors import ParameterError
from jaxis.server.http.sse import DONE, DataEvents, TextEvents, sse_event
from jaxis.server.protocol.base import new_id
from jaxis.server.protocol.chat import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
)


class ChatCompletion(DataEvents):
    """One chat request, checked and ready to run.

    Attributes:
      job: The generation job.

    Args:
      request: The request.
      model: The served model.
      request_id: None generates one.
      tools: How tools are called, where the request's own fields cannot say it.

    Raises:
      RequestError: A field cannot be honoured.
    """

    def __init__(
        self,
        request: ChatCompletionRequest,
        model: ServedModel,
        request_id: str | None = None,
        *,
        tools: ChatTools | None = None,
    ) -> None:
        model = model.named(request.model)
        check_stream_options(request)
        if request.echo and not request.continue_final_message:
            raise ParameterError("echo", "echo needs continue_final_message=true: add it, or leave echo out")
        self._request = request
        self._model = model
        self._num_top = request.top_logprobs or 0
        self._formatter = LogprobFormatter(model.tokenizer, bool(request.return_tokens_as_token_ids))
        self._prefix = message_text(request.messages[-1]) if request.echo else ""
        self._tools = choose_tools(request, model) if tools is None else tools
        params, self._grammar = chat_sampling_params(request, model.default_sampling_params, self._tools)
        self._call_tokens: list[int] = []
        if self._grammar is not None and self._tools.tools and self._tools.grammar is None:
            self._call_tokens = self._tokens_of_calls(self._grammar)
        if self._needs_special_tokens():
            params = dataclasses.replace(params, skip_special_tokens=False)
        arguments = template_arguments(request, model.tokenizer)
        self.job = GenerationJob(
            request_id=request_id or new_id("chatcmpl"),
            num_prompts=1,
            preprocess=functools.partial(_preprocess, request, model, arguments),
            params=params,
            compile_grammar=self._compile_grammar if self._grammar else None,
            priority=request.priority or 0,
            stream=bool(request.stream),
        )

    async def run(self, context: ServerContext) -> ChatCompletionResponse:
        """The whole answer."""
        outputs: list[RequestOutput] = []
        async with aclosing(generate(context, self.job)) as prompt_outputs:
            async for _, output in prompt_outputs:
                outputs.append(output)
        return self.response(merge_outputs(outputs))

    def response(self, output: RequestOutput) -> ChatCompletionResponse:
        """The whole answer from the whole output."""
        usage = UsageCounter()
        usage.add((0, output))
        prompt_logprobs = output.prompt_logprobs
        readers = {completion.index: self.reader(output) for completion in output.outputs}
        choices = [self._choice(completion, readers[completion.index]) for completion in output.outputs]
        return ChatCompletionResponse(
            id=self.job.request_id,
            model=self._model.name,
            system_fingerprint=self._model.fingerprint,
            choices=choices,
            usage=usage.usage(readers.values()),
            prompt_logprobs=None if prompt_logprobs is None else self._formatter.prompt(prompt_logprobs),
            kv_transfer_params=output.kv_transfer_params,
        )

    async def stream(self, context: ServerContext) -> AsyncGenerator[str, None]:
        """The answer as server-sent events."""
        options = self._request.stream_options
        usage = UsageCounter()
        readers: dict[int, ChatOutput] = {}
        plain: dict[int, TextEvents] = {}
        async with aclosing(generate(context, self.job)) as prompt_outputs:
            async for prompt_output in prompt_outputs:
                usage.add(prompt_output)
                so_far = usage.usage(readers.values()) if options and options.continuous_usage_stats else None
                for completion in prompt_output[1].outputs:
                    if completion.index not in readers:
                        readers[completion.index] = self.reader(prompt_output[1])
                        first = ChatDelta(role="assistant", content=self._prefix)
                        yield self._event([ChatChunkChoice(index=completion.index, delta=first)], usage=so_far)
                        plain[completion.index] = TextEvents(functools.partial(self._text_chunk, completion.index))
                    reader = readers[completion.index]
                    events = reader.read(completion)
                    says_more = so_far or completion.logprobs or completion.finished
                    if not says_more and (text := plain_text(events)):
                        yield plain[completion.index].event(text)
                    elif events or completion.logprobs or completion.finished:
                        choice = self._chunk_choice(completion, events, reader)
                        # There once all have ended, and said once.
                        is_last = completion is prompt_output[1].outputs[-1]
                        transfer = prompt_output[1].kv_transfer_params if is_last else None
                        yield self._event([choice], usage=so_far, kv_transfer_params=transfer)
        if options and options.include_usage:
            yield self._event([], usage=usage.usage(readers.values()))
        yield DONE

    def _event(self, choices: list[ChatChunkChoice], **more: Any) -> str:
        return sse_event(self._chunk(choices, **more))

    def _text_chunk(self, index: int, text: str) -> ChatCompletionChunk:
        return self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(content=text))])

    def _chunk(self, choices: list[ChatChunkChoice], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self.job.request_id,
            model=self._model.name,
            system_fingerprint=self._model.fingerprint,
            choices=choices,
            **more,
        )

    def reader(self, output: RequestOutput) -> ChatOutput:
        """A reader for one of the answers; `output` is any output of the request, read for its prompt."""
        reasoning_parser, prompt = self._model.parsers.reasoning, output.prompt or ""
        reasoning = reasoning_tokens(reasoning_parser, prompt, self._model.tokenizer)
        if self._grammar is not None and reasoning is None:
            reasoning_parser = None  # the grammar applies from the first token
        parser = None
        if self._tools.parser is not None or reasoning_parser is not None:
            parser = OutputParser(self._tools.parser, reasoning_parser, tools=self._tools.tools, prompt=prompt)
        return ChatOutput(
            parser,
            reasoning,
            include_reasoning=self._request.include_reasoning is not False,
            parallel_tool_calls=self._request.parallel_tool_calls is not False,
        )

    @property
    def parses(self) -> bool:
        """Whether the text is searched for reasoning or tool calls."""
        return self._tools.parser is not None or self._model.parsers.reasoning is not None

    def _compile_grammar(self, prompt: TokenizedPrompt) -> Grammar:
        assert self._grammar is not None
        grammar = self._grammar.compile(self._model.grammar_compiler)
        reasoning = reasoning_tokens(self._model.parsers.reasoning, prompt.text or "", self._model.tokenizer)
        if reasoning is None and not self._call_tokens:
            return grammar
        return DelayedGrammar(grammar, reasoning, self._call_tokens)

    def _tokens_of_calls(self, grammar: AnswerGrammar) -> list[int]:
        tokens = call_tokens(self._tools.parser, self._model.tokenizer)
        if not tokens:
            raise ParameterError(
                grammar.param,
                f"{grammar.field} leaves no room for this model's tool calls, which begin like ordinary text: leave it "
                'out, or send tool_choice "none"',
            )
        return tokens

    def _needs_special_tokens(self) -> bool:
        return ModelParsers(self._tools.parser, self._model.parsers.reasoning).needs_special_tokens

    def _choice(self, completion: CompletionOutput, reader: ChatOutput) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=message_of(reader.read(completion), self._prefix),
            logprobs=self.logprobs(completion),
            finish_reason=reader.finish_reason(completion),
            stop_reason=completion.stop_reason,
        )

    def _chunk_choice(self, completion: CompletionOutput, events: list[Event], reader: ChatOutput) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=completion.index,
            delta=delta_of(events),
            logprobs=self.logprobs(completion),
            finish_reason=reader.finish_reason(completion),
            stop_reason=completion.stop_reason,
        )

    def logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        """A completion's log-probabilities, if they were asked for."""
        if completion.logprobs is None:
            return None
        return self._formatter.chat(completion.logprobs, self._num_top)


def _preprocess(request: ChatCompletionRequest, model: ServedModel, arguments: dict[str, Any]) -> list[TokenizedPrompt]:
    return [tokenize_request(request, model.tokenizer, arguments)]

"""JAXInferenceEngine: answers conversations by adding the assistant's turn."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxis.config.oumi_objects import OumiConversation, OumiParams
from jaxis.engine.grammar.matcher import Grammar
from jaxis.engine.model_params import ModelParams, to_llm_arguments
from jaxis.errors import ConfigError
from jaxis.host.closing import Closing
from jaxis.host.progress import ProgressDisplay
from jaxis.inference.answer_message import parse_answer
from jaxis.inference.batch import RowFailure
from jaxis.inference.conversation_file import ConversationFile
from jaxis.inference.generation_params import GenerationParams, to_sampling_params
from jaxis.inference.inference_config import InferenceConfig
from jaxis.inference.journal import dump_line, run_key
from jaxis.inference.run import (
    MemorySink,
    RunSummary,
    answer_rows,
    content_of,
    model_identity,
    run,
    run_to_output,
    with_row_seed,
)
from jaxis.inference.template_arguments import template_arguments
from jaxis.jsonl.conversation import Conversation, Message, Role
from jaxis.jsonl.source import JSONLSource, ListSource, Row, RowSource
from jaxis.llm import LLM
from jaxis.outputs import RequestOutput
from jaxis.parsing.model_parsers import AUTO, NONE, ModelParsers
from jaxis.parsing.tool_parsers.tools import function_tools
from jaxis.prompts import TokenizedPrompt, tokenize_chat
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer.chat_messages import messages_for_template
from jaxis.vision.prompt_images import take_images

ID_KEY = "conversation_id"


class JAXInferenceEngine(Closing):
    """Answers conversations with one model.

    Use it as a context manager, or call `close`, to free its memory.

    Attributes:
      llm: The model.
      model_params, generation_params: Parameters as given.
      display: Display of notes and progress.
      identity: Values that answers depend on besides parameters and data.

    Args:
      model_params: Model to use: a `ModelParams`, a mapping, or Oumi's own object.
      generation_params: Parameters for calls of `infer` without their own.
      show_progress: True to show loading and progress on stderr, if that is a terminal.

    Raises:
      ConfigError: A field cannot be honoured.
      CheckpointError, EngineError: The model cannot be loaded.
    """

    def __init__(
        self,
        model_params: ModelParams | Mapping[str, Any] | OumiParams,
        *,
        generation_params: GenerationParams | Mapping[str, Any] | OumiParams | None = None,
        show_progress: bool = True,
    ) -> None:
        self.model_params = ModelParams.of(model_params)
        self.generation_params = GenerationParams.of({} if generation_params is None else generation_params)
        self.display = ProgressDisplay(show_progress)
        arguments = to_llm_arguments(self.model_params)
        if self.model_params.model_revision is not None and self.model_params.model_name is None:
            raise ConfigError("model.model_revision applies to a Hub id: give model.model_name, or leave it out")
        for note in self.model_params.notes() + self.generation_params.notes():
            self.display.note(f"jaxis: {note}")
        self.llm = LLM(
            self.model_params.model_name,
            revision=self.model_params.model_revision,
            show_progress=show_progress,
            **arguments,
        )
        self.identity = identity_of(self.model_params, Path(self.llm.engine.vllm_config.model_config.model))

    def infer(
        self,
        conversations: Sequence[Conversation | Mapping[str, Any] | OumiConversation] | None = None,
        inference_config: InferenceConfig | Mapping[str, Any] | OumiParams | None = None,
        *,
        input: Sequence[Conversation | Mapping[str, Any] | OumiConversation] | None = None,
        generation_params: GenerationParams | Mapping[str, Any] | OumiParams | None = None,
    ) -> Sequence[Any]:
        """Answers each conversation with one more message.

        A conversation that cannot be answered is returned unchanged, with metadata["error"]: a dict of message, type
        and retryable. The others are still answered. With an output path, conversations are saved as they finish, and
        the same call resumes an interrupted one.

        Args:
          conversations: `Conversation`s, dicts of the same structure, or Oumi's own objects.
          inference_config: Paths of files, and parameters; its model, if named, must be this one.
          input: Alternative name of `conversations`.
          generation_params: Parameters that replace the engine's.

        Returns:
          The conversations in the order of the input, of the same class as the input; with an output path, a sequence
          that reads them from the file.

        Raises:
          ConfigError: There is not exactly one input, two conversations have the same id, or a field cannot be
            honoured.
          EngineError: The engine fails for every row, or a file cannot be written.
        """
        config = InferenceConfig.of({} if inference_config is None else inference_config)
        if inference_config is not None and generation_params is not None:
            raise ConfigError("generation_params and inference_config were both given: give only one of them")
        if config.model.model_name not in (None, self.model_params.model_name):
            raise ConfigError(
                f"inference_config.model.model_name={config.model.model_name!r} is not this engine's model "
                f"{self.model_params.model_name!r}: leave it out, or make an engine for it"
            )
        if inference_config is not None:
            generation = config.generation
        else:
            generation = self.generation_params if generation_params is None else GenerationParams.of(generation_params)
        given = [name for name in (conversations, input, config.input_path) if name is not None]
        if len(given) != 1:
            raise ConfigError(
                f"infer got {len(given)} inputs: give exactly one of conversations (input) and input_path"
            )
        if config.input_path is not None:
            source: RowSource = JSONLSource(Path(config.input_path), ID_KEY, output=_optional_path(config.output_path))
            objects: Sequence[Any] = ()
        else:
            objects = list(given[0])
            values = [_to_dict(item, i) for i, item in enumerate(objects)]
            if config.output_path is not None:
                _check_json(values)
            source = ListSource(values, ID_KEY)
        if config.output_path is not None:
            self.run(source, generation, Path(config.output_path), _optional_path(config.progress_path))
            return ConversationFile(Path(config.output_path))
        sink = MemorySink(source.num_rows)
        task = ConversationTask(self, generation, key=None)
        progress_path = _optional_path(config.progress_path)
        answers = functools.partial(answer_rows, self.llm.engine, task)
        run(answers, source, sink, display=self.display, progress_path=progress_path)
        results = [Conversation.from_dict(value) for value in sink.values]
        return [_like(objects[i], result) for i, result in enumerate(results)] if objects else results

    def run(
        self,
        source: RowSource,
        generation: GenerationParams,
        output: Path | BinaryIO,
        progress_path: Path | None = None,
    ) -> RunSummary:
        """Answers a source's conversations into a JSONL file, as `infer` does, or into a stream."""
        key = conversations_key(self.identity, generation, source)
        answers = functools.partial(answer_rows, self.llm.engine, ConversationTask(self, generation, key=key))
        return run_to_output(answers, source, output, key, display=self.display, progress_path=progress_path)

    def close(self) -> None:
        """Frees the memory. The engine cannot be used afterwards."""
        self.llm.close()


def identity_of(model_params: ModelParams, folder: Path) -> list[Any]:
    """Returns the values that answers depend on besides parameters and data; `folder` is that of the checkpoint."""
    return [
        *model_identity(folder, to_llm_arguments(model_params)),
        content_of(model_params.chat_template),
        model_params.tool_call_parser,
        model_params.chat_template_kwargs or {},
    ]


def conversations_key(identity: list[Any], generation: GenerationParams, source: RowSource) -> str:
    """Returns the key of a run: a hash of everything that its answers depend on. The rows' seeds follow from it."""
    effective = [
        dataclasses.asdict(to_sampling_params(generation)),
        generation.tools,
        generation.tool_choice == "none",
        generation.reasoning_effort,
    ]
    return run_key("conversations", identity, effective, source.digest)


class ConversationTask:
    """Renders conversations and adds answers to them.

    Rows get seeds from the run's `key`; None leaves seeds to the engine. Raises ConfigError if the model cannot honour
    a parameter.
    """

    def __init__(self, engine: JAXInferenceEngine, generation: GenerationParams, *, key: str | None) -> None:
        self._tokenizer, self._images = engine.llm.tokenizer, engine.llm.images
        self._generation = generation
        self._params = to_sampling_params(generation)
        self._template = template_arguments(engine.model_params, generation, self._tokenizer)
        self._key = key
        self._parsers = _parsers(engine, self._params)
        if self._parsers is not None and self._parsers.needs_special_tokens:
            self._params = dataclasses.replace(self._params, skip_special_tokens=False)

    def prepare(self, row: Row) -> tuple[TokenizedPrompt, SamplingParams, Grammar | None]:
        conversation = Conversation.from_dict(row.value)
        tools = self._tools(conversation)
        if self._parsers is not None:
            function_tools(tools or ())  # raises for a message whose calls could not be parsed
        messages = [message.for_template() for message in conversation.messages]
        if self._tokenizer is not None:
            messages = messages_for_template(
                messages, self._tokenizer, chat_template=self._template.get("chat_template"), tools=tools
            )
        messages, sources = take_images(messages)
        prompt = tokenize_chat(messages, self._tokenizer, tools=tools, **self._template)
        prompt = self._images.put(prompt, sources)
        return prompt, self._params if self._key is None else with_row_seed(self._params, self._key, row), None

    def answer(self, row: Row, output: RequestOutput) -> dict[str, Any]:
        [completion] = output.outputs
        num_prompt_tokens, num_tokens = len(output.prompt_token_ids), len(completion.token_ids)
        conversation = Conversation.from_dict({**row.value, ID_KEY: row.id})
        message, finish_reason = Message(Role.ASSISTANT, completion.text), completion.finish_reason
        if self._parsers is not None:
            message, finish_reason = parse_answer(self._parsers, output, self._tools(conversation), row.id)
        conversation = conversation.extended(
            message,
            finish_reason=finish_reason,
            usage={
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt_tokens + num_tokens,
            },
        )
        return conversation.to_dict()

    def _tools(self, conversation: Conversation) -> list[Any] | None:
        return None if self._generation.tool_choice == "none" else conversation.tools or self._generation.tools

    def failure(self, row: Row, failure: RowFailure) -> dict[str, Any]:
        try:
            conversation = Conversation.from_dict({**row.value, ID_KEY: row.id})
        except Exception:  # it has no valid conversation to return
            conversation = Conversation([], row.id)
        return conversation.extended(None, error=failure.to_dict()).to_dict()


def _parsers(engine: JAXInferenceEngine, params: SamplingParams) -> ModelParsers | None:
    """Returns parsers of tool calls and reasoning in answers; None leaves both in the text."""
    if (tool := engine.model_params.tool_call_parser) is None:
        return None
    model_type = engine.llm.engine.vllm_config.model_config.hf_config.get("model_type")
    # A grammar applies from the first token, so there is no reasoning.
    reasoning = AUTO if params.structured_outputs is None else NONE
    return ModelParsers.select(engine.llm.tokenizer, model_type, tool=tool, reasoning=reasoning)


def _to_dict(value: object, index: int) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Conversation):
        return value.to_dict()
    if not isinstance(value, OumiConversation):
        raise ConfigError(f"conversations[{index}] is {type(value).__name__}; give a Conversation, or a dict")
    return value.model_dump(mode="json", exclude_none=True)


def _check_json(values: Sequence[Mapping[str, Any]]) -> None:
    for i, value in enumerate(values):
        try:
            dump_line(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"conversations[{i}] cannot be written to output_path as JSON: {error}") from None


def _like(
    given: Conversation | Mapping[str, Any] | OumiConversation, result: Conversation
) -> Conversation | OumiConversation:
    """Converts a result to the class of the input: Oumi's for Oumi's objects, otherwise jaxis's."""
    if isinstance(given, Mapping | Conversation):
        return result
    return type(given).model_validate(result.to_dict())


def _optional_path(path: str | None) -> Path | None:
    return None if path is None else Path(path)

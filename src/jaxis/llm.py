"""LLM: the Python API for offline use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import numpy as np

from jaxis.engine.argument_groups.engine_kwargs import EngineKwargs, shows_engine_arguments
from jaxis.engine.arguments import EngineArgs
from jaxis.engine.client.engine_client import GENERATION
from jaxis.engine.engine import PAUSED, LLMEngine
from jaxis.engine.logits import compute_logits
from jaxis.engine.opened_model import open_model
from jaxis.engine.setup import BuiltEngine, build_engine
from jaxis.engine.vllm_arguments import translate
from jaxis.engine.weights.new_weights import Weights
from jaxis.errors import ConfigError, EngineError, RequestError
from jaxis.host.closing import Closing
from jaxis.host.garbage import age_objects
from jaxis.host.interrupt import interrupt_deferred
from jaxis.host.progress import ProgressDisplay
from jaxis.offline_requests import OfflineRequests, WantedRequest, prompt_name
from jaxis.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    StreamOutput,
)
from jaxis.prompt_extension import PromptExtension, compare_prompts
from jaxis.prompts import (
    ContentFormat,
    Message,
    Prompt,
    TokenizedPrompt,
    as_conversation_list,
    as_prompt_list,
    check_tokenization_kwargs,
    is_conversation,
    tokenize_chat,
    tokenize_prompt,
    with_content_format,
)
from jaxis.runners import Runner, check_runner, kind_of_checkpoint
from jaxis.sampling_params import SamplingParams
from jaxis.tokenizer import Tokenizer
from jaxis.tokenizer.template_choice import chat_template_source
from jaxis.vision.prompt_images import NoImages, PromptImages, images_of_prompt, take_images

if TYPE_CHECKING:
    from jaxis.lora import LoRARequest
    from jaxis.pooling.embedder import Embedder
    from jaxis.pooling.pairs import Texts


@dataclass(frozen=True)
class RenderedChat:
    """The prompt of a conversation.

    Attributes:
      prompt: The prompt as a string.
      prompt_token_ids: The prompt as token ids, which `LLM.generate` takes.
      extension: Relation to the earlier prompt that it was compared with; None without one.
    """

    prompt: str
    prompt_token_ids: list[int]
    extension: PromptExtension | None = None


class LLM(Closing):
    """A model, ready to generate text, or to make vectors or scores of texts.

    Use it as a context manager, or call `close`, to give its memory back. A Ctrl-C ends the call it interrupts and
    leaves the LLM usable. Not for use from several threads at once.

    Args:
      model: Folder of a checkpoint in Hugging Face format, or a Hub id; None is the embedded demonstration model.
      show_progress: Show loading, compiling and generating on stderr.
      needs_chat_template: Refuse a model without a chat template before its weights are read.
      runner: "generate" or "pooling", which makes vectors or scores; "auto" is the checkpoint's purpose.
      **arguments: Engine arguments, such as `dtype="bfloat16"`, `max_model_len=8192` or `quantization="int8"`;
        `help(jaxis.engine.arguments.EngineArgs)` explains each. Arguments of vLLM's `LLM` are accepted too: those that
        can change no answer have no effect, which is said once, and others are refused.

    Raises:
      ConfigError: An argument or a config key cannot be honoured.
      CheckpointError: The checkpoint cannot be found or read, or does not match the model.
      EngineError: Memory is too small.
    """

    @shows_engine_arguments
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        show_progress: bool = True,
        needs_chat_template: bool = False,
        runner: Runner = "auto",
        **arguments: Unpack[EngineKwargs],
    ) -> None:
        self._open(model, show_progress, needs_chat_template, runner, arguments)

    @classmethod
    def from_params(
        cls,
        model: str | Path | None,
        params: Weights,
        tokenizer: Tokenizer | None = None,
        *,
        show_progress: bool = True,
        **arguments: Unpack[EngineKwargs],
    ) -> LLM:
        """Makes a model that generates with the caller's weights.

        Args:
          model: Folder with the model's config.json and, unless another is given, its tokenizer; or a Hub id; None is
            the embedded demonstration model.
          params: Weights, as for `update_weights`.
          tokenizer: Tokenizer; None is the folder's.
          show_progress: Show progress, as for `LLM`.
          **arguments: Engine arguments, as for `LLM`.

        Raises:
          ConfigError, CheckpointError, EngineError: A cause of `LLM` or `update_weights`.
        """
        llm = cls.__new__(cls)
        llm._open(model, show_progress, False, "generate", arguments, params, tokenizer)
        return llm

    def _open(
        self,
        model: str | Path | None,
        show_progress: bool,
        needs_chat_template: bool,
        runner: Runner,
        arguments: EngineKwargs,
        params: Weights | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        check_runner(runner)
        name = None if model is None else str(model)
        translated = translate(name, arguments)
        args = EngineArgs(model=name, **translated.arguments)
        self._name = name
        self._progress = ProgressDisplay(show_progress)
        if translated.without_effect:
            self._progress.note(f"arguments without an effect here: {', '.join(translated.without_effect)}")
        self._closed = False
        opened = open_model(args)
        if kind_of_checkpoint(opened.path, opened.hf_config, runner) is not GENERATION:
            if needs_chat_template:
                raise ConfigError(
                    f"{args.model} makes vectors or scores, so it cannot chat: use LLM.embed or LLM.score"
                )
            from jaxis.pooling.embedder import open_embedder

            self._opened: BuiltEngine | Embedder = open_embedder(args, opened, self._progress)
        else:
            self._opened = build_engine(
                args,
                self._progress,
                opened=opened,
                quant_method=translated.quant_method,
                needs_chat_template=needs_chat_template,
                weights=params,
                tokenizer=tokenizer,
            )
        age_objects()  # the first answer would wait for a collection of them

    @property
    def engine(self) -> LLMEngine:
        """The engine, for adding requests and stepping it directly; until those have ended, call nothing else here."""
        return self._generator.engine

    @property
    def _generator(self) -> BuiltEngine:
        if not isinstance(self._opened, BuiltEngine):
            raise RequestError("this model makes vectors or scores of texts and generates none: use embed or score")
        return self._opened

    @property
    def requests(self) -> OfflineRequests:
        """Requests of this model, for callers that step it themselves."""
        self._check_open()
        return self._requests

    @functools.cached_property
    def _requests(self) -> OfflineRequests:
        return OfflineRequests(self._generator, self._progress)

    @property
    def _embedder(self) -> Embedder:
        self._check_open()
        if isinstance(self._opened, BuiltEngine):
            raise RequestError("this model generates text: LLM(model, runner='pooling') makes vectors with it")
        return self._opened

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer, or None if it has none: prompts are then token ids."""
        return self._opened.tokenizer

    def tokenizer_of(self, lora_request: LoRARequest | None) -> Tokenizer | None:
        """Returns the tokenizer, with the chat template that an adapter brings, if it brings one.

        Args:
          lora_request: The adapter; None is the model itself.

        Raises:
          ConfigError, CheckpointError: The adapter's files cannot be read.
        """
        return self.tokenizer if lora_request is None else self.requests.tokenizer_of(lora_request)

    @functools.cached_property
    def images(self) -> PromptImages | NoImages:
        """Puts images into prompts, or refuses them."""
        if not isinstance(self._opened, BuiltEngine):
            return NoImages()
        if (feature := self.engine.runner.feature("inputs")) is None:
            return NoImages(self._opened.left_out)
        inputs = feature.encoder
        return PromptImages.of_model(inputs.files, self.tokenizer, inputs.max_inputs, self.max_model_len)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt and output together."""
        return self._opened.max_model_len

    @property
    def weight_bytes(self) -> int:
        """Bytes of the model's weights as they are in memory, on all devices together."""
        return self._opened.weight_bytes

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that generation_config.json recommends, without a limit on the tokens."""
        return self._generator.default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts, as many at a time as the engine holds.

        Args:
          prompts: One or many; each a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and
            optionally "cache_salt" (only requests with the same salt share cached prefixes) and "multi_modal_data":
            {"image": one, or a list}, one for each placeholder of the prompt (see docs/images.md).
          sampling_params: Parameters for all prompts, or one for each; None is `get_default_sampling_params()`.
          use_tqdm: vLLM's name of `progress`.
          lora_request: The adapter for all prompts, or one (or None) for each; needs `enable_lora`.
          priority: One number for all prompts, or one for each; the lower value is served first.
          tokenization_kwargs: Argument of vLLM; must be empty.
          progress: Show a progress bar.

        Returns:
          One output a prompt, in their order.

        Raises:
          RequestError: A prompt or parameter cannot be honoured; nothing was generated. Or a completion met the limits
            of its `structured_outputs`.
          EngineError: A step failed, or the model's logits for a prompt are not finite. The LLM stays usable.
        """
        check_tokenization_kwargs(tokenization_kwargs)
        given, requests = as_prompt_list(prompts), self.requests
        count = len(given)
        adapters = requests.adapters(lora_request, count)
        tokenized = [self._tokenize(prompt, prompt_name(i, count)) for i, prompt in enumerate(given)]
        rows = (tokenized, requests.params(sampling_params, count), adapters, requests.priorities(priority, count))
        show = progress if use_tqdm is None else bool(use_tqdm)
        return requests.run(list(map(WantedRequest, *rows)), progress=show)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation, or many, through the model's chat template.

        Args:
          messages: One conversation, a list of {"role", "content"}, or a list of conversations. Parts of contents may
            be images: {"type": "image", "image": a PIL image, bytes or a path}, `image_pil`, or `image_url` with a data
            URL; and videos as frames: {"type": "video", "video": a list of images, "fps": 2}, or `video_url`.
          sampling_params: Parameters for all conversations, or one for each; None is `get_default_sampling_params()`.
          use_tqdm: vLLM's name of `progress`.
          lora_request: The adapter for all conversations, or one (or None) for each; needs `enable_lora`.
          tools: Functions that the model may call, as JSON schemas.
          chat_template: A template to use instead of the model's own; see `EngineArgs`.
          chat_template_content_format: Format of a message's content for the template: "string", "openai" (a list of
            parts), or "auto", as it is given.
          add_generation_prompt: End the prompt where the assistant's turn begins.
          continue_final_message: Continue the last message instead of answering it.
          chat_template_kwargs: More variables for the template, such as `enable_thinking`.
          tokenization_kwargs: Argument of vLLM; must be empty.
          mm_processor_kwargs: Argument of vLLM; must be empty: images are prepared by the checkpoint's files.
          progress: Show a progress bar.

        Raises:
          ConfigError: There is no such `chat_template`.
          RequestError, EngineError: A cause of `generate`; also, the model has no chat template, or it refuses the
            messages.
        """
        if mm_processor_kwargs:
            raise RequestError(f"mm_processor_kwargs={dict(mm_processor_kwargs)!r} is not supported: leave it out")
        check_tokenization_kwargs(tokenization_kwargs)
        conversations, requests = as_conversation_list(messages), self.requests
        count = len(conversations)
        adapters = requests.adapters(lora_request, count)
        tokenizer_of = functools.cache(requests.tokenizer_of)  # an adapter's chat template is read once a call
        render = functools.partial(
            self._tokenize_chat,
            tools=tools,
            chat_template=None if chat_template is None else self._template_source(chat_template),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **(chat_template_kwargs or {}),
        )
        tokenized = [
            render(with_content_format(each, chat_template_content_format), tokenizer=tokenizer_of(adapter))
            for each, adapter in zip(conversations, adapters, strict=True)
        ]
        show = progress if use_tqdm is None else bool(use_tqdm)
        wanted = list(map(WantedRequest, tokenized, requests.params(sampling_params, count), adapters))
        return requests.run(wanted, progress=show)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        previous_token_ids: Sequence[int] | None = None,
    ) -> RenderedChat:
        """Renders the prompt of one conversation, and compares it with an earlier one; generates nothing.

        Args:
          messages: One conversation.
          tools: Functions, as for `chat`.
          add_generation_prompt: End of the prompt, as for `chat`.
          continue_final_message: End of the prompt, as for `chat`.
          chat_template_kwargs: More variables for the template.
          previous_token_ids: Token ids of an earlier prompt and of its answer.

        Raises:
          RequestError: The model has no chat template, or it refuses the messages.
        """

        def tokenize(messages: Sequence[Message], *, opens_turn: bool, continues: bool) -> TokenizedPrompt:
            return self._tokenize_chat(
                messages,
                tokenizer=self.tokenizer,
                tools=tools,
                add_generation_prompt=opens_turn,
                continue_final_message=continues,
                **(chat_template_kwargs or {}),
            )

        prompt = tokenize(
            messages, opens_turn=add_generation_prompt and not continue_final_message, continues=continue_final_message
        )
        token_ids, extension = list(prompt.token_ids), None
        if previous_token_ids is not None:
            extension = compare_prompts(
                token_ids,
                list(previous_token_ids),
                messages,
                lambda part: tokenize(part, opens_turn=False, continues=False).token_ids,
                has_tools=bool(tools),
            )
        return RenderedChat(prompt.text or "", token_ids, extension)

    def stream(
        self,
        prompt: Prompt | Sequence[Message] | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[StreamOutput, None, None]:
        """Completes one prompt, or answers one conversation, step by step.

        Closing the iterator before its end, or interrupting it, aborts the request. Other calls, and other streams, may
        be made in between; their steps advance this stream too.

        Args:
          prompt: One prompt of `generate`, one conversation of `chat`, or either after tokenization.
          sampling_params: `n` must be 1; None is `get_default_sampling_params()`.
          lora_request: The adapter; needs `enable_lora`.
          tools: Functions, as for `chat`.
          chat_template_kwargs: More variables for the template, as for `chat`.

        Raises:
          RequestError: The prompt or a parameter cannot be honoured.
          EngineError: A step failed, or the model's logits are not finite.
        """
        requests = self.requests
        [params], [adapter] = requests.params(sampling_params, 1), requests.adapters(lora_request, 1)
        if params.n != 1:
            raise RequestError(f"n={params.n}: a stream has one completion; use generate for several")
        if isinstance(prompt, TokenizedPrompt):
            tokenized = prompt
        elif is_conversation(prompt):
            tokenizer = requests.tokenizer_of(adapter)
            tokenized = self._tokenize_chat(prompt, tokenizer=tokenizer, tools=tools, **(chat_template_kwargs or {}))
        else:
            tokenized = self._tokenize(cast(Prompt, prompt), prompt_name(0, 1))
        return requests.stream(WantedRequest(tokenized, params, adapter))

    def compute_logits(self, token_ids: Sequence[int], *, path: Literal["whole", "paged"] = "whole") -> np.ndarray:
        """Computes the logits of every position of one sequence, float32 [T, V], for verification.

        Args:
          token_ids: T tokens.
          path: "whole" runs the sequence at once without a cache; "paged" runs it as prompts are served.

        Raises:
          RequestError: There are no tokens, an unknown one, or more than `max_model_len`.
          EngineError: A stream is open.
        """
        if path not in ("whole", "paged"):
            raise RequestError(f"path={path!r} must be 'whole' or 'paged'")
        self.requests.check_runs()
        with interrupt_deferred():
            return compute_logits(self.engine, token_ids, paged=path == "paged")

    def update_weights(self, weights: Weights, version: str | int | None = None) -> None:
        """Gives the model other weights, which are stored, quantized and packed as its own were.

        The new weights are read whole before they take the old ones' place: after an error, nothing has changed.
        Meanwhile there has to be memory for both, unless `sleep(2)` has dropped the old ones. The cache of the old
        weights is not used again. Open streams continue with the new weights, which read their tokens so far anew.

        Args:
          weights: A folder of the same model; or arrays by the names of a checkpoint's tensors, in a mapping, nested or
            not, or as pairs; or a `JaxModule` as the engine itself loads it, whose arrays are not copied.
          version: Version of the tokens that follow, for `CompletionOutput.weight_versions`: a string or a positive
            integer; None is one more than the number of updates so far.

        Raises:
          CheckpointError: A tensor is missing, unknown, or of another shape or type.
          ConfigError: The folder is of another model, or this model's weights cannot be changed.
          RequestError: The version is of another kind.
        """
        self._check_open()
        with interrupt_deferred():
            self._generator.weights.update(weights, version)

    def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        """Lets no request run until `resume`.

        Args:
          mode: Treatment of open streams: "keep" continues them after `resume`, "abort" ends them.
        """
        if mode not in ("keep", "abort"):
            raise RequestError(f"mode={mode!r} must be keep or abort")
        self._check_open()
        with interrupt_deferred():
            if mode == "abort":
                self.engine.abort_all()
            self.engine.holds.add(PAUSED)

    def resume(self) -> None:
        """Lets requests run again after `pause`."""
        self.engine.holds.discard(PAUSED)

    def sleep(self, level: int = 1) -> None:
        """Frees the memory of the KV cache, and of the weights, until `wake_up`. Open streams go on after that.

        Args:
          level: 1 keeps the weights in the host's memory; 2 drops them.

        Raises:
          ConfigError: This model cannot sleep.
        """
        self._check_open()
        with interrupt_deferred():
            self._generator.weights.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends `sleep`. Weights that it dropped are read again from their folder, unless others were given meanwhile.

        Args:
          tags: Parts to bring back, "weights" and "kv_cache"; None is both.

        Raises:
          EngineError: The dropped weights were given as arrays: give others by `update_weights`.
        """
        self._check_open()
        with interrupt_deferred():
            self._generator.weights.wake_up(tags)

    def __repr__(self) -> str:
        return f"LLM({self._name!r}, {'closed' if self._closed else self._opened})"

    def close(self) -> None:
        """Gives the memory back; the LLM cannot be used any more."""
        self._closed = True
        self._opened.close()

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Computes the vectors of texts. On CPU, they are the same, bit for bit, whatever other texts are in the call.

        Args:
          prompts: One or many texts, as in `generate`.
          truncate_prompt_tokens: Number of tokens to keep of a longer input; -1 is as many as the model takes. None: an
            input that is too long is an error.
          prompt_name: Kind of the texts, such as "query", for which the checkpoint has a prompt.
          use_tqdm: Accepted as in vLLM; without effect.
          lora_request: Accepted as in vLLM; must be None.
          tokenization_kwargs: Accepted as in vLLM; must be empty.

        Returns:
          One output for each input, in order.

        Raises:
          RequestError: An input is empty or too long, an argument cannot be honoured, or the model generates text;
            nothing was computed.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        check_tokenization_kwargs(tokenization_kwargs)
        embedder = self._embedder
        from jaxis.pooling.text_groups import TextGroup

        with interrupt_deferred():
            return embedder.embed(
                TextGroup(as_prompt_list(prompts), kind=prompt_name, truncate_tokens=truncate_prompt_tokens)
            )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Computes the score of each label for texts. On CPU, they are the same, bit for bit, whatever is in the call.

        Args:
          prompts: One or many texts, as in `generate`.
          truncate_prompt_tokens: Number of tokens to keep, as in `embed`.
          use_activation: True to convert logits to probabilities: by a sigmoid for one label, a softmax for several, or
            as the checkpoint's config.json says.
          use_tqdm: Accepted as in vLLM; without effect.
          lora_request: Accepted as in vLLM; must be None.
          tokenization_kwargs: Accepted as in vLLM; must be empty.

        Returns:
          One output for each input, in order.

        Raises:
          RequestError: An input is invalid, as in `embed`, or the model is not a classifier.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        check_tokenization_kwargs(tokenization_kwargs)
        embedder = self._embedder
        from jaxis.pooling.text_groups import TextGroup

        with interrupt_deferred():
            return embedder.classify(
                TextGroup(as_prompt_list(prompts), truncate_tokens=truncate_prompt_tokens),
                use_activation=use_activation,
            )

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_activation: bool = True,
        instruction: str | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora_request: object = None,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts: by a cross-encoder that reads both, or by the cosine of their vectors.

        Args:
          data_1: One string that is paired with each of `data_2`, or as many strings as there; such as queries.
          data_2: One string or many, such as documents. A dict with "text" counts as a string.
          truncate_prompt_tokens: Number of tokens to keep, as in `embed`. A cross-encoder's pair loses tokens of its
            second text.
          use_activation: True to convert logits to probabilities, as in `classify`.
          instruction: Task in words, for models that use one, such as Qwen3-Reranker; None: that of the model card.
          use_tqdm: Accepted as in vLLM; without effect.
          lora_request: Accepted as in vLLM; must be None.

        Returns:
          One output for each pair, in order.

        Raises:
          RequestError: An input is invalid, as in `embed`; the lists' lengths differ; or the model is a classifier of
            several labels.
        """
        del use_tqdm
        _check_no_adapter(lora_request)
        embedder = self._embedder
        from jaxis.pooling.pairs import as_texts
        from jaxis.pooling.text_groups import TextGroup, check_sides

        sides = as_texts(data_1, "data_1"), as_texts(data_2, "data_2")
        check_sides(*map(TextGroup, sides, ("data_1", "data_2")))
        with interrupt_deferred():
            return embedder.score(
                *(TextGroup(texts, truncate_tokens=truncate_prompt_tokens) for texts in sides),
                use_activation=use_activation,
                instruction=instruction,
            )

    def _tokenize(self, prompt: Prompt, where: str) -> TokenizedPrompt:
        if not isinstance(prompt, Mapping) or prompt.get("multi_modal_data") is None:
            return tokenize_prompt(prompt, self.tokenizer, where)
        sources = images_of_prompt(prompt["multi_modal_data"], where)
        others = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
        return self.images.put(tokenize_prompt(others, self.tokenizer, where), sources)

    def _tokenize_chat(
        self, messages: Sequence[Message], *, tokenizer: Tokenizer | None, **template: Any
    ) -> TokenizedPrompt:
        messages, sources = take_images(messages)
        return self.images.put(tokenize_chat(messages, tokenizer, **template), sources)

    def _template_source(self, chat_template: str) -> str:
        return chat_template_source(chat_template, self.tokenizer.chat_templates if self.tokenizer else {})

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed: make a new one")


def _check_no_adapter(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError("lora_request is not supported by models that make vectors or scores: merge the adapter")

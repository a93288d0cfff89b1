"""`jaxis generate`: completes one prompt."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxis.cli.command import OTHER_ARGUMENTS, Command
from jaxis.cli.console import AnswerStats, note, read_stdin, report_errors, write_answer
from jaxis.cli.options import (
    OUTPUT_PANEL,
    PROMPT_PANEL,
    SAMPLING_PANEL,
    ChatTemplate,
    Debug,
    EngineOptions,
    SamplingOptions,
    TemplateKwargs,
    bounded,
    chat_params,
    expand_options,
    open_llm,
    parse_json_object,
    with_drawn_seed,
)
from jaxis.errors import RequestError
from jaxis.outputs import CompletionOutput
from jaxis.prompts import Prompt
from jaxis.sampling_params import INTEGER_BOUNDS, TOP_LOGPROBS_BOUNDS
from jaxis.tokenizer.chat_template import IMAGE_PART

if TYPE_CHECKING:
    from jaxis.llm import LLM
    from jaxis.lora import LoRARequest
    from jaxis.sampling_params import SamplingParams
    from jaxis.tokenizer import Tokenizer

_HUB_ID_OR_PATH = re.compile(r"~?[\w./\\-]*[/\\][\w./\\-]*(:[\w.-]+)?|\S+\.gguf")


@expand_options
def generate(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Folder, file or Hub id (default: the embedded model).", show_default=False
        ),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="The text, or - to read it from stdin; may be left out where stdin is a pipe or a file.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message before the prompt.", rich_help_panel=PROMPT_PANEL)
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="An image before the prompt; may be repeated.", rich_help_panel=PROMPT_PANEL),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Continue the prompt as it stands, without chat template.", rich_help_panel=PROMPT_PANEL
        ),
    ] = False,
    token_ids: Annotated[
        bool,
        typer.Option(
            "--token-ids",
            help="The prompt is token ids (1,2,3), and token ids are printed: works without tokenizer.",
            rich_help_panel=PROMPT_PANEL,
        ),
    ] = False,
    chat_template: ChatTemplate = None,
    chat_template_kwargs: TemplateKwargs = None,
    max_tokens: Annotated[
        int,
        bounded(
            INTEGER_BOUNDS["max_tokens"], "Most tokens to generate.", metavar="TOKENS", rich_help_panel=SAMPLING_PANEL
        ),
    ] = 256,
    n: Annotated[
        int, bounded(INTEGER_BOUNDS["n"], "Completions to generate.", metavar="NUMBER", rich_help_panel=SAMPLING_PANEL)
    ] = 1,
    sampling: SamplingOptions = SamplingOptions(),  # noqa: B008 (frozen; only its type is used)
    stats: Annotated[
        bool, typer.Option("--stats", help="Print token counts and speed on stderr.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a completion.", rich_help_panel=OUTPUT_PANEL)
    ] = False,
    logprobs: Annotated[
        int | None,
        bounded(
            TOP_LOGPROBS_BOUNDS,
            "With --json: log-probabilities of each token and the K most likely.",
            metavar="K",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008
    debug: Debug = False,
) -> None:
    """Complete a prompt.

    The answer streams to stdout; everything else goes to stderr.
    A model with a chat template gets the prompt as a user message, unless --raw is given.

    \b
    [bold]Examples[/bold]
      jaxis generate "What is the capital of France?"
      jaxis generate ./Qwen3-0.6B "Write a haiku" --temperature 0.7 --stats
      jaxis generate Qwen/Qwen3-0.6B - --system "Summarize." < report.txt
      jaxis generate ./model 1,2,3 --token-ids --max-tokens 8
      jaxis generate ./base "Write a haiku" --adapter ./poet
      jaxis generate ./model "What is this?" --image photo.jpg
      jaxis generate "Pick a number" --n 3 --temperature 1 --json | jq .text
    """
    model, prompt = _split([word for word in (model, prompt, *context.args) if word is not None])
    if logprobs is not None and not json_lines:
        raise typer.BadParameter("log-probabilities are printed with --json only: add it", param_hint="--logprobs")
    if (raw or token_ids) and any(given is not None for given in (system, chat_template, chat_template_kwargs)):
        raise typer.BadParameter("--raw and --token-ids use no chat template: leave out it, --system and its variables")
    overrides = sampling.overrides(
        max_tokens=max_tokens, n=n, logprobs=logprobs, detokenize=False if token_ids else None
    )
    arguments = {**engine.llm_arguments(), "chat_template": chat_template}
    template_kwargs = parse_json_object(chat_template_kwargs, "--chat-template-kwargs") or {}
    with report_errors(debug=debug):
        text = read_stdin() if prompt is None else prompt
        if not text:
            raise RequestError("the prompt is empty")
        request: Prompt = _parse_token_ids(text) if token_ids else text
        adapter = _adapter_by_request(arguments)
        with open_llm(model, arguments, chats=not raw and not token_ids) as llm:
            if isinstance(request, str):
                tokenizer = llm.tokenizer if chat_template is not None else llm.tokenizer_of(adapter)
                request = _prompt_for(
                    llm, tokenizer, model, request, system, raw, template_kwargs, num_images=len(image or ())
                )
            params = _params_for(llm, overrides, chats=not token_ids and not isinstance(request, str))
            if image:
                key = "prompt" if isinstance(request, str) else "prompt_token_ids"
                request = {key: request, "multi_modal_data": {"image": [Path(each) for each in image]}}
            if n == 1:
                completions, timing = _stream(llm, request, params, adapter, show=not json_lines)
            else:
                completions, timing = _generate(llm, request, params, adapter, show=not json_lines)
        for completion in completions if json_lines else ():
            print(json.dumps(_to_json(completion, timing.num_prompt_tokens), ensure_ascii=False), flush=True)
        if stats:
            note(str(timing))
        elif params.seed is not None and sampling.seed is None:
            note(f"(seed {params.seed}: --seed {params.seed} gives this answer again)")


def _params_for(llm: LLM, overrides: dict[str, Any], *, chats: bool) -> SamplingParams:
    defaults = llm.get_default_sampling_params()
    return with_drawn_seed(chat_params(defaults, overrides) if chats else dataclasses.replace(defaults, **overrides))


def _adapter_by_request(arguments: dict[str, Any]) -> LoRARequest | None:
    """Returns the adapter that is used beside the weights, without --merge; sets the engine's arguments for it."""
    if arguments.get("adapter") is None or arguments.get("merge"):
        return None
    from jaxis.lora import LoRARequest
    from jaxis.lora.adapter import read_adapter

    folder = arguments.pop("adapter")
    adapter = read_adapter(folder)
    arguments |= {"enable_lora": True, "max_lora_rank": max(1, adapter.max_rank)}
    arguments |= {"lora_target_modules": ["all-linear", *adapter.extra_targets]}
    return LoRARequest(folder, 1, folder)


def _split(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Splits the command's words into model (None: the embedded one) and prompt (None: on stdin).

    Raises:
      typer.BadParameter: There are too many words, or no prompt.
    """
    if len(words) > 2:
        raise typer.BadParameter(
            f"got {len(words)} words, expected a model and a prompt: put the prompt in quotes", param_hint="PROMPT"
        )
    model, prompt = None, None
    if len(words) == 2:
        model, prompt = words
    elif words and _names_a_model(words[0]):
        model = words[0]
    elif words:
        prompt = words[0]
    if prompt == "-":
        return model, None
    if prompt is None and sys.stdin.isatty():
        what = f"{model} names a model; the prompt is missing" if model else "the prompt is missing"
        raise typer.BadParameter(f"{what}: give one, or pipe it in", param_hint="PROMPT")
    return model, prompt


def _names_a_model(word: str) -> bool:
    """Returns whether a lone word is a checkpoint or shaped like a path or a Hub id, rather than a prompt."""
    # For a prompt that is too long for a file name, os.path reports that there is no such file.
    config = os.path.join(os.path.expanduser(word), "config.json")
    return os.path.isfile(config) or _HUB_ID_OR_PATH.fullmatch(word) is not None


def _parse_token_ids(text: str) -> list[int]:
    ids = text.replace(",", " ").split()
    for token_id in ids:
        if not token_id.isdecimal():
            raise RequestError(f"--token-ids: {token_id!r} is not a token id; give integers such as 1,2,3")
    return [int(token_id) for token_id in ids]


def _prompt_for(
    llm: LLM,
    tokenizer: Tokenizer | None,
    model: str | None,
    text: str,
    system: str | None,
    raw: bool,
    template_kwargs: dict[str, Any],
    *,
    num_images: int = 0,
) -> str | list[int]:
    """Returns the string itself for a base model or `raw`, otherwise the token ids of a conversation with it."""
    if num_images:
        llm.images.check_takes("image", "--image")
    name = model or "the embedded model"
    if tokenizer is None:
        raise RequestError(f"{name} has no tokenizer: give the prompt as token ids, with --token-ids")
    if raw or not tokenizer.has_chat_template:
        if system is not None or template_kwargs:
            raise RequestError(
                f"{name} has no chat template: leave out --system and --chat-template-kwargs, or give --chat-template"
            )
        return text
    parts = [IMAGE_PART] * num_images + [{"type": "text", "text": text}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": parts if num_images else text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return tokenizer.encode_chat(messages, **template_kwargs)


def _stream(
    llm: LLM, request: Prompt, params: SamplingParams, adapter: LoRARequest | None, *, show: bool
) -> tuple[list[CompletionOutput], AnswerStats]:
    """Generates one completion; with `show`, prints it as it is generated."""
    timing = AnswerStats(params.seed)
    completion = CompletionOutput(0, logprobs=None if params.logprobs is None else [])
    for delta in llm.stream(request, params, lora_request=adapter):
        timing.num_prompt_tokens = delta.num_prompt_tokens
        timing.add(len(delta.token_ids))
        if show:
            write_answer(delta.text if params.detokenize else _join(delta.token_ids, after=completion.token_ids))
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        if completion.logprobs is not None:
            completion.logprobs += delta.logprobs or []
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
    if show and not completion.text.endswith("\n"):
        write_answer("\n")
    return [completion], timing


def _generate(
    llm: LLM, request: Prompt, params: SamplingParams, adapter: LoRARequest | None, *, show: bool
) -> tuple[list[CompletionOutput], AnswerStats]:
    """Generates several completions; with `show`, prints them, numbered on stderr."""
    timing = AnswerStats(params.seed)
    [output] = llm.generate([request], params, lora_request=adapter, progress=False)
    timing.num_prompt_tokens = len(output.prompt_token_ids)
    timing.add(sum(len(completion.token_ids) for completion in output.outputs))
    for completion in output.outputs if show else ():
        note(f"[{completion.index + 1}/{params.n}]")
        text = completion.text if params.detokenize else _join(completion.token_ids)
        write_answer(text if text.endswith("\n") else text + "\n")
    return output.outputs, timing


def _join(token_ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
    separator = " " if after and token_ids else ""
    return separator + " ".join(map(str, token_ids))


def _to_json(completion: CompletionOutput, num_prompt_tokens: int) -> dict[str, Any]:
    fields = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": num_prompt_tokens,
    }
    if completion.logprobs is not None:
        fields["logprobs"] = [
            [{"token_id": token_id, **dataclasses.asdict(logprob)} for token_id, logprob in position.items()]
            for position in completion.logprobs
        ]
    return fields


COMMANDS = (Command("generate", generate, settings=OTHER_ARGUMENTS),)

"""Asks for what agents and reinforcement learning need, with the clients that ask for it, and prints what came back.

    python benchmarks/client_features.py
    python benchmarks/client_features.py -- ./Qwen3-0.6B

Clients are the packages `openai`, `anthropic` and `ollama`, and the requests that TRL (1.16, async GRPO and
distillation) and verl (0.9, generation server) send, written out from their sources: they need GPUs to start. Exit code
1 says that something asked for was not honoured. What stands after `--` goes to `jaxis serve`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anthropic
import ollama
import openai
from openai.types.chat import ChatCompletion

from serving.server_process import server_process

SERVER_ARGUMENTS = ("--model-alias", "*", "--reasoning-parser", "qwen3")
QUESTION = {"role": "user", "content": "What is 17 + 25?"}
THINKS = [QUESTION, {"role": "assistant", "content": "<think>"}]
ADDENDS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": ADDENDS, "strict": True}}
Seen = Iterator[tuple[str, str, str]]


def expect(condition: object, found: object) -> str:
    """What was found, as a cell of the table.

    Raises:
      AssertionError: It is not what was asked for.
    """
    if not condition:
        raise AssertionError(f"found {found!r}")
    return str(found)


def check_arguments(arguments: Any) -> str:
    """Whether a call's arguments fit the schema."""
    values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    return expect(values.keys() == {"a", "b"} and all(type(value) is int for value in values.values()), values)


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    """The answer to a request in JSON."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def openai_chat(url: str) -> dict[str, Callable[[], str]]:
    """Chat completions of the package `openai`."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(messages: Sequence[Any] = (QUESTION,), extra: Any = None, **fields: Any) -> ChatCompletion:
        given = {"temperature": 0, "max_tokens": 40, **fields}
        return client.chat.completions.create(model="any", messages=list(messages), extra_body=extra, **given)

    def budget(**more: int) -> str:
        extra = {"thinking_token_budget": 5, "continue_final_message": True, "add_generation_prompt": False, **more}
        details = ask(THINKS, extra).usage.completion_tokens_details
        return expect(0 < details.reasoning_tokens <= 5 + sum(more.values()) + 10, f"{details.reasoning_tokens} tokens")

    def token_ids() -> str:
        answer = ask(extra={"return_token_ids": True})
        ids = answer.choices[0].model_extra["token_ids"]
        return expect(len(ids) == answer.usage.completion_tokens and answer.model_extra["prompt_token_ids"], len(ids))

    def logprobs(mode: str) -> float:
        extra = {"logprobs_mode": mode}
        answer = ask(extra=extra, temperature=0.5, seed=1, logprobs=True, max_tokens=3)
        return answer.choices[0].logprobs.content[0].logprob

    def modes() -> str:
        raw, processed = logprobs("raw_logprobs"), logprobs("processed_logprobs")
        return expect(raw != processed, f"{raw:.4f}, {processed:.4f}")

    def timings() -> str:
        found = ask().model_extra["timings"]
        return expect(found["predicted_n"] > 0, f"{found['predicted_n']} of {found['predicted_ms']:.0f} ms")

    def seed() -> str:
        first = ask(temperature=1)
        again = ask(temperature=1, seed=first.model_extra["seed"])
        return expect(first.choices[0].message.content == again.choices[0].message.content, first.model_extra["seed"])

    def strict() -> str:
        choice = {"type": "function", "function": {"name": "add"}}
        return check_arguments(
            ask(tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls[0].function.arguments
        )

    return {
        "thinking budget": budget,
        "soft budget": lambda: budget(thinking_budget_grace_period=9),
        "strict tools": strict,
        "token ids": token_ids,
        "logprobs_mode": modes,
        "timings": timings,
        "seed": seed,
    }


def openai_responses(url: str) -> dict[str, Callable[[], str]]:
    """Responses of the package `openai`."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(**fields: Any) -> Any:
        given = {"temperature": 0, "max_output_tokens": 40, **fields}
        return client.responses.create(model="any", input="What is 17 + 25?", **given)

    def strict() -> str:
        tool = {"type": "function", **TOOL["function"]}
        call = next(item for item in ask(tools=[tool], tool_choice="required").output if item.type == "function_call")
        return check_arguments(call.arguments)

    def seed() -> str:
        first = ask(temperature=1)
        again = ask(temperature=1, extra_body={"seed": first.model_extra["seed"]})
        return expect(first.output_text == again.output_text, first.model_extra["seed"])

    def budget() -> str:
        answer = ask(extra_body={"thinking_token_budget": 5})
        return expect(answer.status in ("completed", "incomplete"), "taken")

    return {
        "thinking budget": budget,
        "strict tools": strict,
        "timings": lambda: expect(ask().model_extra["timings"]["predicted_n"] > 0, "predicted_n, ..."),
        "seed": seed,
    }


def anthropic_messages(url: str) -> dict[str, Callable[[], str]]:
    """Messages of the package `anthropic`."""
    client = anthropic.Anthropic(base_url=url, api_key="none")

    def ask(**fields: Any) -> Any:
        return client.messages.with_raw_response.create(
            model="any", messages=[QUESTION], **{"max_tokens": 60, **fields}
        )

    def budget() -> str:
        raw = ask(max_tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024})
        return expect("X-Jaxis-Ignored" not in raw.headers, "taken")

    def strict() -> str:
        tool = {"name": "add", "input_schema": ADDENDS, "strict": True}
        answer = ask(tools=[tool], tool_choice={"type": "any"}).parse()
        return check_arguments(next(block.input for block in answer.content if block.type == "tool_use"))

    return {"thinking budget": budget, "strict tools": strict}


def ollama_chat(url: str) -> dict[str, Callable[[], str]]:
    """Chats and completions of the package `ollama`."""
    client = ollama.Client(url)

    def ask(**options: Any) -> Any:
        return client.chat("any", [QUESTION], options={"temperature": 0, "num_predict": 40, **options})

    def budget() -> str:
        options = {"temperature": 0, "num_predict": 40, "thinking_token_budget": 5}
        answer = client.generate("any", "Why? <think>", raw=True, options=options)
        return expect("</think>" in answer.response, repr(answer.response.partition("</think>")[0]) + ", then </think>")

    def seed() -> str:
        options = {"temperature": 1, "seed": 12}
        return expect(ask(**options).message.content == ask(**options).message.content, 12)

    return {
        "thinking budget": budget,
        "logprobs": lambda: expect(
            len(client.chat("any", [QUESTION], options={"num_predict": 4}, logprobs=True).logprobs) == 4, "4 tokens"
        ),
        "timings": lambda: expect(ask().eval_duration > 0, "eval_duration, ..."),
        "seed": seed,
    }


def trl(url: str) -> dict[str, Callable[[], str]]:
    """What TRL's async trainers post: rollouts, and scores of a teacher."""
    prompt = list(range(20, 60))

    def rollout() -> Any:
        body = {"model": "any", "prompt": prompt, "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
        body |= {"repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0}
        return post(url, "/v1/completions", {**body, "seed": random.getrandbits(63)})["choices"][0]

    def token_ids() -> str:
        choice = rollout()
        return expect(len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]), len(choice["token_ids"]))

    def teacher() -> str:
        body = {"model": "any", "prompt": prompt, "max_tokens": 1, "temperature": 0.5, "prompt_logprobs": 5}
        positions = post(url, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
        ranked = [sorted(at.values(), key=lambda entry: entry["rank"]) for at in positions[1:]]
        good = positions[0] is None and all(str(t) in at for t, at in zip(prompt[1:], positions[1:], strict=True))
        good = good and all(not math.isnan(entry["logprob"]) for entries in ranked for entry in entries)
        return expect(good and len(positions) == len(prompt), f"{len(positions)} positions")

    return {
        "token ids": token_ids,
        "logprobs": lambda: expect(all(p <= 0 for p in rollout()["logprobs"]["token_logprobs"]), "one a token"),
        "teacher's scores": teacher,
        "seed": lambda: expect(rollout()["token_ids"], "63 bits"),
    }


def verl(url: str) -> dict[str, Callable[[], str]]:
    """What verl's generation server posts."""

    def ask() -> str:
        body = {"model": "any", "messages": [QUESTION], "temperature": 1.0, "top_p": 1.0, "max_tokens": 16}
        answer = ChatCompletion(**post(url, "/v1/chat/completions", body))
        return expect(answer.choices[0].message.content, f"{answer.usage.completion_tokens} tokens")

    return {"rollout": ask}


CLIENTS = {
    "openai, chat": openai_chat,
    "openai, responses": openai_responses,
    "anthropic": anthropic_messages,
    "ollama": ollama_chat,
    "TRL's requests": trl,
    "verl's requests": verl,
}


def table(url: str) -> Seen:
    """Each client, feature, and what was seen, as far as it begins with "FAILED"."""
    for name, features_of in CLIENTS.items():
        for feature, see in features_of(url).items():
            try:
                seen = see()
            except Exception as error:
                seen = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            yield name, feature, seen


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="a server that runs already (default: one is started)")
    parsed = parser.parse_args(arguments[:split])
    if parsed.base_url:
        rows = list(table(parsed.base_url))
    else:
        with server_process([*SERVER_ARGUMENTS, *arguments[split + 1 :]]) as url:
            rows = list(table(url))
    print("| client | feature | seen |\n|---|---|---|")
    for row in rows:
        print("|", " | ".join(row), "|")
    return int(any(seen.startswith("FAILED") for _, _, seen in rows))


if __name__ == "__main__":
    sys.exit(main())

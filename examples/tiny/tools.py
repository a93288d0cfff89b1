"""Tool calls: four tools, how they are asked for, what they return, and what the assistant then says."""

import json
import random

from tiny.skills import NO_TOOL, Exchange, Message, assistant, part, user
from tiny.tables import PHRASINGS, TABLES


def _tool(name: str, description: str, **parameters: str) -> Message:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = {
    "get_weather": _tool("get_weather", "Get the weather in a city.", city="string"),
    "get_time": _tool("get_time", "Get the local time in a city.", city="string"),
    "calculate": _tool("calculate", "Calculate an expression.", expression="string"),
    "set_timer": _tool("set_timer", "Set a timer.", minutes="integer"),
}


def random_tools(rng: random.Random, *wanted: str, without: str | None = None) -> list[Message]:
    """The wanted tools among others, in random order."""
    others = [name for name in TOOLS if name not in wanted and name != without]
    names = [*wanted, *rng.sample(others, rng.choice((0, 1, 1, 2)) if wanted else 2)]
    rng.shuffle(names)
    return [TOOLS[name] for name in names]


def tool_call(rng: random.Random, held_out: bool = False) -> Exchange:
    """One question, the call, the tool's result and the closing sentence.

    The evaluation asks at the call and after the result; without the fitting tool the answer is that there is none.
    """
    name = rng.choice(list(TOOLS))
    city = rng.choice(TABLES["countries"])["capital"]
    expression = f"{rng.randint(30, 999)} {rng.choice('+-*')} {rng.randint(30, 999)}"
    minutes = rng.randint(1, 90)
    arguments, result, closing = {
        "get_weather": ({"city": city}, *_weather(rng, city)),
        "get_time": ({"city": city}, *_time(rng, city)),
        "calculate": ({"expression": expression}, *_calculation(expression)),
        "set_timer": ({"minutes": minutes}, {"status": "ok"}, f"The timer is set for {minutes} minutes."),
    }[name]
    question = rng.choice(PHRASINGS["tools"][name][part(held_out)])
    asked = user(question.format(city=city, expression=expression, minutes=minutes))
    if name != "calculate" and rng.random() < 0.12:
        return Exchange("tool_call", [asked, assistant(NO_TOOL)], random_tools(rng, without=name))
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    messages = [
        asked,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps(result)},
        assistant(closing),
    ]
    return Exchange("tool_call", messages, random_tools(rng, name))


def call_text(message: Message) -> str:
    """The text that the model writes for an assistant message with one tool call."""
    return f"<tool_call>\n{json.dumps(message['tool_calls'][0]['function'])}\n</tool_call>"


def _weather(rng: random.Random, city: str) -> tuple[dict[str, str | int], str]:
    degrees, sky = rng.randint(0, 39), rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy"))
    return {"temperature": degrees, "sky": sky}, f"It is {degrees} degrees and {sky} in {city}."


def _time(rng: random.Random, city: str) -> tuple[dict[str, str], str]:
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    return {"time": clock}, f"The time in {city} is {clock}."


def _calculation(expression: str) -> tuple[dict[str, int], str]:
    left, operator, right = expression.split()
    result = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[operator](int(left), int(right))
    return {"result": result}, f"The result is {result}."

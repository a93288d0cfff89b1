"""/v1/responses through the `openai` client: what the chat endpoint answers, in another shape."""

import pytest

QUESTION = "What is the capital of France?"


@pytest.fixture
def chat_text(client):
    messages = [{"role": "user", "content": QUESTION}]
    return client.chat.completions.create(model="jaxis-tiny", messages=messages).choices[0].message.content


@pytest.mark.parametrize(
    "question",
    [
        QUESTION,
        [{"role": "user", "content": QUESTION}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": QUESTION}]}],
    ],
)
def test_answer_is_the_chats(client, chat_text, question):
    response = client.responses.create(model="jaxis-tiny", input=question)
    assert response.output_text == chat_text
    assert "Paris" in chat_text
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_instructions_are_a_system_message(client):
    response = client.responses.create(
        model="jaxis-tiny", input=QUESTION, instructions="Be brief.", max_output_tokens=1
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model="jaxis-tiny", messages=messages, max_tokens=1)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.instructions == "Be brief."


def test_events_add_up(client, chat_text):
    events = list(client.responses.create(model="jaxis-tiny", input=QUESTION, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == chat_text
    assert events[-1].response.output_text == chat_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_an_answer_can_come_back_as_it_was_sent(client):
    first = client.responses.create(model="jaxis-tiny", input=QUESTION)
    turns = [
        {"role": "user", "content": QUESTION},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": "And of Italy?"},
    ]
    second = client.responses.create(model="jaxis-tiny", input=turns)
    assert second.usage.input_tokens > first.usage.total_tokens


def test_a_cut_answer_says_so(client):
    response = client.responses.create(model="jaxis-tiny", input=QUESTION, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")

"""Prompts as plain text and as a chat."""

from __future__ import annotations

import pytest

from lgrpo.data.prompts import load_prompts
from lgrpo.policy import character_tokenizer
from lgrpo.rewards import ExactMatch
from lgrpo.tasks import DatasetTask, Template

CHAT = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}{% if enable_thinking %}<think>{% endif %}"
)
EXAMPLES = [{"question": "1+1", "solution": "2"}, {"question": "2+2", "solution": "4"}]


@pytest.fixture
def tokenizer():
    tokenizer = character_tokenizer("0123456789+=;\n []<>aeihknstu")
    tokenizer.chat_template = CHAT
    return tokenizer


def test_examples_are_joined_in_plain_text(tokenizer):
    template = Template(prompt="{question}=", examples=EXAMPLES, example_answer=" {solution}", separator=";")
    text, ids = template.render({"question": "3+3"}, tokenizer)
    assert text == "1+1= 2;2+2= 4;3+3="
    assert tokenizer.decode(ids) == text


def test_examples_are_turns_of_a_chat(tokenizer):
    text, ids = Template(chat=True, system="hi", examples=EXAMPLES).render({"question": "3+3"}, tokenizer)
    assert text == "[s]hi[u]1+1[a]2[u]2+2[a]4[u]3+3[a]"
    assert tokenizer.decode(ids) == text


def test_chat_options_reach_the_chat_template(tokenizer):
    text, _ = Template(chat=True, chat_options={"enable_thinking": True}).render({"question": "3"}, tokenizer)
    assert text == "[u]3[a]<think>"
    with pytest.raises(ValueError, match=r"template\.chat_options require a chat"):
        Template(chat_options={"enable_thinking": True})
    with pytest.raises(ValueError, match=r"template\.chat_options may not set \['tokenize'\]"):
        Template(chat=True, chat_options={"tokenize": True})


def test_prompt_without_a_field_is_rejected():
    with pytest.raises(ValueError, match=r"reads no field of a row, so all prompts are equal: 'Solve\.'"):
        Template(prompt="Solve.")


def test_examples_with_missing_fields_are_rejected():
    with pytest.raises(ValueError, match=r"example 1 of the template has no \['solution'\], only \['question'\]"):
        Template(examples=[EXAMPLES[0], {"question": "2"}])
    with pytest.raises(ValueError, match=r"example 0 of the template has no \['problem'\]"):
        Template(prompt="{problem}", examples=EXAMPLES)
    with pytest.raises(ValueError, match="example 0 has an empty answer"):
        Template(examples=[{"question": "2", "solution": " "}])


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "si"}


class TestMessages:
    """Rows that hold a conversation, as those of TRL do."""

    @pytest.mark.parametrize(
        ("messages", "expected"),
        [
            ([user("3+3")], "[s]hi[u]3+3[a]"),
            ([SYSTEM, user("3+3")], "[s]si[u]3+3[a]"),
            ([user("1"), assistant("2"), user("3")], "[s]hi[u]1[a]2[u]3[a]"),
        ],
    )
    def test_are_the_prompt(self, tokenizer, messages, expected):
        template = Template(prompt="{prompt}", chat=True, system="hi")
        template.check_messages({"prompt": messages})
        text, ids = template.render({"prompt": messages}, tokenizer)
        assert text == expected
        assert tokenizer.decode(ids) == text

    def test_in_examples(self, tokenizer):
        examples = [{"prompt": [SYSTEM, user("1+1")], "solution": "2"}]
        template = Template(prompt="{prompt}", chat=True, examples=examples)
        text, _ = template.render({"prompt": [SYSTEM, user("3+3")]}, tokenizer)
        assert text == "[s]si[u]1+1[a]2[u]3+3[a]"

    def test_part_of_a_conversation(self, tokenizer):
        template = Template(prompt="{prompt[0][content]}=")
        template.check_messages({"prompt": [user("3+3")]})
        assert template.text({"prompt": [user("3+3")]}, tokenizer) == "3+3="

    @pytest.mark.parametrize(
        ("settings", "messages", "message"),
        [
            ({"prompt": "{prompt}"}, [user("1")], r"field 'prompt' is a list of messages: set template\.chat to true"),
            (
                {"prompt": "Solve {prompt}", "chat": True},
                [user("1")],
                r'template\.prompt .Solve \{prompt\}. would insert as Python text: set it to "\{prompt\}"',
            ),
            (
                {"prompt": "{prompt}", "chat": True},
                [user("1"), assistant("2")],
                "last message .* must have the role user",
            ),
            ({"prompt": "{prompt}", "chat": True}, [{"from": "me"}], "a message without role or content as text"),
        ],
    )
    def test_that_cannot_be_the_prompt(self, tokenizer, settings, messages, message):
        task = DatasetTask(ExactMatch(), [{"prompt": messages, "answer": "1"}], template=Template(**settings))
        with pytest.raises(ValueError, match=f"row 0 of the train set: .*{message}"):
            load_prompts(task, "train", tokenizer, max_tokens=100)

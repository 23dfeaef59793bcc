"""Parsers of tool calls: every format, text around calls, and calls that cannot be read."""

from __future__ import annotations

import json
import re
from keyword import iskeyword
from pathlib import Path

import pytest
import trl
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from lgrpo.environments import TurnError
from lgrpo.environments.tools import PARSERS, Call, PythonTool, ToolEnvironment, parser_for, tool_schema

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
WITH_PARSER = ("qwen3", "qwen2_5.", "qwen2_5_training", "llama3_1", "llama3_2", "nemotron", "lfm2_v2", "lfm2_2_5")
WITH_PARSER += ("glm4", "deepseek", "gemma4", "diffusion_gemma", "gptoss")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAME = st.from_regex(r"[a-z][a-z_0-9]{0,10}", fullmatch=True).filter(lambda name: name not in ("print", "call"))
ARGUMENTS = st.dictionaries(NAME.filter(str.isidentifier), JSON, max_size=3)
CALLS = st.lists(st.tuples(NAME, ARGUMENTS), min_size=1, max_size=3)
PIECES = [
    *'{}[]()"<>=,:;1a\n \x00',
    *["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "```python\n", "```"],
    *["<function=f>", "<parameter=a>", "</parameter>", "</function>", "<think>", "</think>", "NaN", "\\u12"],
    *["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"],
    '{"name": "f", "parameters": ',
    *["<|tool_call>", "call:f{", '<|"|>', "<tool_call|>", "<|channel>", "to=functions.f", "<|message|>", "<|call|>"],
]


def written(family: str, calls: list[tuple[str, dict]]) -> str:
    """Calls in the format of a family."""
    if family == "hermes":
        return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    if family == "llama":
        return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
    if family == "mistral":
        return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
    if family == "mistral_args":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
    parts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for name, a in calls]
    return f"[{', '.join(parts)}]" if family == "python" else "```python\n" + "\n".join(parts) + "\n```"


@pytest.mark.parametrize("family", ["hermes", "llama", "mistral", "mistral_args", "python", "python_block"])
@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_calls_are_read_as_they_were_written(family, calls):
    assume(not family.startswith("python") or not any(map(iskeyword, (word for n, a in calls for word in (n, *a)))))
    assume(family != "python_block" or "```" not in repr(calls))
    found = PARSERS[family.partition("_")[0]]().parse(written(family, calls))
    assert [(call.name, call.arguments) for call in found] == calls


@pytest.mark.parametrize("family", list(PARSERS))
@settings(max_examples=150, deadline=None)
@given(text=st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_no_text_breaks_a_parser(family, text):
    for item in PARSERS[family]().parse(text):
        assert isinstance(item, Call | TurnError)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_calls_that_a_template_writes_are_read(path):
    """The parser that is chosen by a template reads the calls that this template renders."""
    template = path.read_text(encoding="utf-8")
    if not path.name.startswith(WITH_PARSER):
        with pytest.raises(ValueError, match=f"set parser to one of {', '.join(sorted(PARSERS))}"):
            parser_for(template)
        return
    parser = parser_for(template)

    def add(a: int, b: str) -> str:
        """Add.

        Args:
            a: First.
            b: Second.
        """

    arguments = {"a": 1, "b": 'x "}</y> é'}
    content = None if path.name.startswith("deepseek") else ""
    takes_text = path.name.startswith("deepseek") and path.name != "deepseekv3_training.jinja"
    written = json.dumps(arguments) if takes_text else arguments
    call = {"type": "function", "function": {"name": "add", "arguments": written}}
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    settings = {"tools": [tool_schema(add)], "chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    (prompt,), _ = render_jinja_template(conversations=[messages[:1]], add_generation_prompt=True, **settings)
    (whole,), _ = render_jinja_template(conversations=[messages], **settings)
    (found,) = parser.parse(whole.removeprefix(prompt))
    assert found.name == "add"
    assert found.arguments == {"a": "1" if found.are_texts else 1, "b": 'x "}</y> é'}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '[TOOL_CALLS]' }}{{ tool_calls | tojson }}", "mistral"),
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call>\n<function=", "xml"),
        ("<|tool_call_start|>", "python"),
        ("<|python_tag|>", "llama"),
    ],
)
def test_parser_is_chosen_by_the_template(template, name):
    assert type(parser_for(template)) is PARSERS[name]


@pytest.mark.parametrize("template", [None, "{{ messages }}", "<atem:function_calls>"])
def test_template_of_an_unknown_format(template):
    with pytest.raises(ValueError, match="set parser to one of code, deepseek, gemma, glm, harmony, hermes"):
        parser_for(template)


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", 'I add. <tool_call>{"name": "f"}</tool_call> Done.', [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"c": "</tool_call>{"}}', [("f", {"c": "</tool_call>{"})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"c": "a\nb"}}</tool_call>', [("f", {"c": "a\nb"})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f"}\n{"name": "g"}</tool_call>', [("f", {}), ("g", {})]),
        ("hermes", '<tool_call>{"name": "f"}', [("f", {})]),
        ("hermes", '<think><tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "g"}', [("g", {})]),
        ("hermes", 'First <tool_call>{"name": "f"}</tool_call></think><tool_call>{"name": "g"}', [("g", {})]),
        ("hermes", '<think>I may <tool_call>{"name": "f"}</tool_call>', []),
        ("hermes", "The answer is {3}.", []),
        ("llama", 'Sure: {"name": "f", "parameters": {"a": {"b": 1}}}', [("f", {"a": {"b": 1}})]),
        ("llama", '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}', [("f", {"a": 1})]),
        ("llama", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        ("llama", '<|python_tag|>search.call(query="a b")', [("search", {"query": "a b"})]),
        ("llama", 'My friend is {"name": "Bob", "age": 3}.', []),
        ("llama", 'An object: {"name": of something}', []),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": 1}', [("f", {"a": 1})]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}', [("f", {"a": 1})]),
        ("mistral", "No call: [f]", []),
        (
            "python",
            "Do\n```python\nprint(f(a=[1, 'x)']))\n```\nthen\n```py\ng()\n```",
            [("f", {"a": [1, "x)"]}), ("g", {})],
        ),
        ("python", "```tool_code\nf()\n```", [("f", {})]),
        ("python", "The list [1, 2] and f(3) are no calls.", []),
        ("xml", "<tool_call><function=f><parameter=a>\nx\ny\n</parameter></function>", [("f", {"a": "x\ny"})]),
        ("xml", "<function=f></function><function=g></function>", [("f", {}), ("g", {})]),
        ("xml", "1 < 2", []),
        (
            "glm",
            "I see. <tool_call>f\n</tool_call>\n<tool_call>g<arg_key>a</arg_key>\n<arg_value>1\n2</arg_value>",
            [("f", {}), ("g", {"a": "1\n2"})],
        ),
        ("deepseek", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>', [("f", {"a": 1})]),
        ("deepseek", "No call.", []),
        (
            "gemma",
            "<|channel>thought\n<|tool_call>call:no{}<tool_call|><channel|>I look."
            '<|tool_call>call:f{a:[1,-2.5,null],b:{<|"|>c d<|"|>:<|"|>{x:1}, "y"<|"|>}}<tool_call|>'
            "<|tool_call>call:now{}<tool_call|><|tool_response>",
            [("f", {"a": [1, -2.5, None], "b": {"c d": '{x:1}, "y"'}}), ("now", {})],
        ),
        ("gemma", "No call<turn|>", []),
        (
            "harmony",
            "<|channel|>analysis<|message|>Use functions.f.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.f <|constrain|>json<|message|>{"a": "<|b|>"}<|call|>',
            [("f", {"a": "<|b|>"})],
        ),
        ("harmony", "<|channel|>final<|message|>Not to=functions.f<|return|>", []),
    ],
)
def test_texts_with_and_without_calls(family, text, expected):
    found = PARSERS[family]().parse(text)
    assert [(call.name, call.arguments) for call in found] == expected


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "cannot be read"),
        ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "cannot be read"),
        ("hermes", "<tool_call></tool_call>", "empty"),
        ("hermes", "<tool_call>", "cannot be read"),
        ("hermes", '<tool_call>["f"]</tool_call>', 'must be an object with "name"'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'must be an object with "name"'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments of f must be an object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "arguments of f must be an object"),
        ("hermes", "<tool_call>" + '{"a":' * 100_000, "cannot be read|nested"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>", "cannot be read"),
        ("llama", '{"name": "f", "parameters": {"a": 1}', "cannot be read"),
        ("llama", "<|python_tag|>import os", "calls of tools only"),
        ("mistral", '[TOOL_CALLS][{"name": "f", ]', "cannot be read"),
        ("mistral", "[TOOL_CALLS]f[ARGS]", "cannot be read"),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", "arguments of f must be an object"),
        ("python", "```python\nx = 1\n```", "calls of tools only"),
        ("python", "```python\nf(a=\n```", "cannot be read"),
        ("python", "```python\nf(a=open('x'))\n```", "plain values"),
        ("python", "```python\nf(**{'a': 1})\n```", "plain values"),
        ("python", "```python\n\n```", "empty"),
        ("python", "```python\n" + "-" * 100_000 + "1\n```", "cannot be read|nested"),
        ("python", "```python\nf(" + "-" * 900 + "x)\n```", "cannot be read|nested|plain values"),
        ("xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "not closed"),
        ("xml", '<tool_call>{"name": "f"}</tool_call>', "no <function=…>"),
        ("glm", '<tool_call>{"name": "f"}</tool_call>', "must be a name, and pairs"),
        ("gemma", "<|tool_call>call:f{a:<tool_call|>", "cannot be read"),
        ("gemma", "<|tool_call>{a:1}<tool_call|>", "a name and an object"),
        ("gemma", "<|tool_call>call:f[1]<tool_call|>", "a name and an object"),
        ("harmony", "to=functions.f<|channel|>commentary<|message|>a=1<|call|>", "cannot be read"),
        ("harmony", "to=functions.f<|message|>[1]<|call|>", "a name and an object"),
        ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>", "must be a name, and pairs"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{a}\n```", "cannot be read"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[1]\n```", "a name and an object"),
    ],
    ids=lambda value: value[:30],
)
def test_calls_that_cannot_be_read(family, text, message):
    (error,) = PARSERS[family]().parse(text)
    assert isinstance(error, TurnError)
    assert error.kind == "malformed_call"
    assert len(error.text) < 500
    assert re.search(message, error.text)


def test_a_wrong_call_does_not_hide_others():
    text = 'So: <tool_call>{"name": f}</tool_call><tool_call>{"name": "g"}</tool_call>'
    error, call = PARSERS["hermes"]().parse(text)
    assert error == ("malformed_call", 'the JSON of a call cannot be read (Expecting value): {"name": f}')
    assert call.name == "g"


def test_mistral_calls_have_identifiers():
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc123XYZ"}, {"name": "g", "arguments": {}, "id": "x"}]'
    assert [call.id for call in PARSERS["mistral"]().parse(text)] == ["abc123XYZ", "call00001"]


def test_programs_are_run_as_they_are_written():
    environment = ToolEnvironment(
        tools=[PythonTool(allow_execution=True)], parser="code", result_text="Output:\n{content}\n"
    )
    assert environment.tool_schemas() == [], "the chat template describes no tools"
    environment.reset({})
    turn = environment.step("First:\n```python\nprint('a\\n', {1: 2})\n```\nthen\n```py\n6 * 7\n```")
    assert (turn.observation, turn.done) == ("Output:\na\n {1: 2}\nOutput:\n42\n", False)
    assert environment.step("```\nprint(1)\n``` It is 42.").done, "a block of another language is no program"
    cut = environment.step("```python\nprint(1")
    assert "SyntaxError" in cut.observation

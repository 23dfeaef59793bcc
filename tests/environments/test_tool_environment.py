"""ToolEnvironment: environments written for TRL, calls in every format, errors, and copies."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import pickle
import re
import sys
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from lgrpo.environments import (
    Calculator,
    Environment,
    ErrorCounts,
    PythonTool,
    ToolEnvironment,
    Turn,
    WorkerEpisodes,
)
from lgrpo.environments.tools import HermesParser
from tests.environments import trl_style
from tests.environments.trl_style import Echo, Increment, Shop, Tables, Words


def hermes(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def contents(turn):
    assert all(message["role"] == "tool" for message in turn.observation)
    return [message["content"] for message in turn.observation]


def test_an_environment_without_reward():
    environment = ToolEnvironment(Increment, parser="hermes")
    assert environment.reset({"prompt": "Count to 3."}) is None
    turn = environment.step("I count. " + hermes("increment", step=1) + hermes("increment", step=2))
    expected = [{"role": "tool", "name": "increment", "content": content} for content in ("1", "3")]
    assert turn == Turn(expected)
    assert environment.step("3") == Turn(done=True)
    environment.reset({})
    assert contents(environment.step(hermes("increment", step=5))) == ["5"]


def test_a_tool_may_have_the_name_step():
    environment = ToolEnvironment(Echo, parser="hermes")
    environment.reset({"prompt": "Echo something."})
    assert contents(environment.step(hermes("step", message="hello"))) == ["hello"]
    assert environment.step("Done.") == Turn(reward=0.5, done=True)


def test_a_game_with_state_and_errors():
    environment = ToolEnvironment(Words, parser="hermes")
    assert environment.reset({"word": "tree", "prompt": "Play."}).startswith("The word has 4 letters. You have 3")
    assert contents(environment.step(hermes("guess", word="rate"))) == ["YXYG"]
    turn = environment.step(hermes("guess", word="trees"))
    assert contents(turn) == ["Error: guess failed with ValueError: The word has 4 letters."]
    assert [error.kind for error in turn.errors] == ["tool_failed"]
    assert not turn.done
    assert contents(environment.step(hermes("guess", word="tree"))) == ["GGGG"]
    assert "Game over." in contents(environment.step(hermes("guess", word="tree")))[0]
    assert environment.step("I won.") == Turn(reward=1.0, done=True)


def test_a_database_in_worker_processes():
    """Its connection cannot be copied, so every process makes an instance of its own."""
    row = {"genes": {"tp53": 19149, "ins": 1431}, "prompt": "Which gene is the longest?"}
    with contextlib.closing(WorkerEpisodes(ToolEnvironment(Tables, parser="hermes"))) as episodes:
        for index in range(2):
            assert episodes.reset(index, row).result(60) == "The table genes has the columns name and length."
        calls = hermes("query", sql="select name from genes order by length desc", limit=1) + hermes(
            "query", sql="drop"
        )
        turn = episodes.step(0, calls).result(60)
        assert contents(turn) == ["[('tp53',)]", "Error: query failed with PermissionError: only SELECT is allowed"]
        turn = episodes.step(1, hermes("query", sql="select age from genes")).result(60)
        assert contents(turn) == ["Error: query failed with OperationalError: no such column: age"]
        assert episodes.step(0, "It is tp53.").result(60)[1:3] == (0.5, True)
        assert episodes.step(1, "I give up.").result(60)[1:3] == (1.0, True)


def test_a_limit_ends_an_episode_with_the_reward_of_its_state():
    environment = ToolEnvironment(Words, parser="hermes")
    environment.reset({"word": "tree"})
    environment.step(hermes("guess", word="tree"))
    assert environment.truncate() == 1.0
    environment.reset({"word": "tree"})
    assert environment.truncate() == 0.0
    assert ToolEnvironment(Increment).truncate() == 0.0


def test_async_tools():
    environment = ToolEnvironment(Shop, parser="hermes")

    async def play():
        assert await environment.reset({}) == "You have 5 coins."
        calls = hermes("price", item="tea") + hermes("buy", item="tea", count=2) + hermes("weather")
        first = await environment.step(calls)
        return first, await environment.step("Bought."), await environment.truncate()

    first, last, reward = asyncio.run(play())
    assert contents(first) == ["2.5", "{'basket': ['tea', 'tea']}", "rain"]
    assert last == Turn(reward=1.0, done=True)
    assert reward == 1.0


def test_a_function_that_waits_must_be_async():
    class Hidden:
        def wait(self) -> str:
            """Wait."""
            return asyncio.sleep(0)

    environment = ToolEnvironment(Hidden, parser="hermes")
    with pytest.raises(TypeError, match="declare it so"):
        environment.step(hermes("wait"))


def test_tools_are_the_public_methods():
    schemas = ToolEnvironment(Shop).tool_schemas()
    assert [schema["function"]["name"] for schema in schemas] == ["buy", "price", "weather"]
    assert [schema["function"]["name"] for schema in ToolEnvironment(Words).tool_schemas()] == ["guess"]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        ("<tool_call>{'name'}</tool_call>", "malformed_call", "cannot be read"),
        (
            hermes("incremnt", step=1),
            "unknown_tool",
            "no tool 'incremnt': did you mean increment?; the tools are: incr",
        ),
        (hermes("increment"), "missing_argument", "lacks the argument 'step'"),
        (hermes("increment", steps=1), "unknown_argument", "no argument 'steps': did you mean step?"),
        (hermes("increment", step="1"), "wrong_type", 'must be an integer, but it is "1"'),
        (hermes("reset"), "unknown_tool", "no tool 'reset'"),
        (hermes("_hidden", secret=1), "unknown_tool", "no tool '_hidden'"),
    ],
)
def test_errors_are_observations_and_are_counted(call, kind, text):
    environment = ToolEnvironment(Increment, parser="hermes")
    environment.reset({})
    turn = environment.step(call + hermes("increment", step=1))
    first, second = contents(turn)
    assert first.startswith("Error: ")
    assert text in first
    assert second == "1"
    assert not turn.done
    counts = ErrorCounts()
    counts.add(turn.errors)
    assert counts.counts == {kind: 1}
    assert text in counts.examples[kind]


def test_counts_of_several_workers_are_merged():
    counts, other = ErrorCounts(), ErrorCounts()
    environment = ToolEnvironment(Increment, parser="hermes")
    counts.add(environment.step(hermes("f")).errors)
    other.add(environment.step(hermes("g")).errors)
    other.add(environment.step(hermes("increment")).errors)
    counts.merge(other)
    assert counts.counts == {"unknown_tool": 2, "missing_argument": 1}
    assert counts.lines()[0].startswith("2 x unknown_tool, for example: there is no tool 'f'")


def test_a_tool_that_exits_is_an_error():
    def leave() -> None:
        """Leave."""
        sys.exit(3)

    turn = ToolEnvironment(tools=[leave], parser="hermes").step(hermes("leave"))
    assert contents(turn) == ["Error: leave failed with SystemExit: 3"]


def test_limits_of_calls_and_results():
    def flood(size: int) -> str:
        """Print.

        Args:
            size: Length.
        """
        return "x" * size

    environment = ToolEnvironment(tools=[flood], parser="hermes", max_calls=2, max_result_chars=100)
    turn = environment.step(hermes("flood", size=10**6) + hermes("flood", size=100) * 2)
    first, second, third = contents(turn)
    assert len(first) < 150
    assert "[999900 characters left out]" in first
    assert second == "x" * 100
    assert third == "Error: flood was not called: at most 2 calls in a turn"
    assert [error.kind for error in turn.errors] == ["too_many_calls"]


def test_results_as_text():
    environment = ToolEnvironment(Increment, parser="python", result_text="\n{name}: {content}\n")
    other = pickle.loads(pickle.dumps(environment))
    assert other.step("[increment(1), increment(2)]").observation == "\nincrement: 1\n\nincrement: 3\n"
    with pytest.raises(ValueError, match=r"it must contain \{content\}"):
        ToolEnvironment(Increment, result_text="{result}")


def test_results_of_parts():
    def parts(kind: str) -> list:
        """Return parts.

        Args:
            kind: Kind of the second.
        """
        return [{"type": "text", "text": "a"}, {"type": kind, "text": "b"}]

    environment = ToolEnvironment(tools=[parts], parser="hermes")
    assert contents(environment.step(hermes("parts", kind="text"))) == ["ab"]
    assert contents(environment.step(hermes("parts", kind="image")))[0].startswith("Error: parts failed")


@pytest.mark.parametrize(
    "environment",
    [
        Increment,
        Increment(),
        trl_style.make_increment,
        "tests.environments.trl_style.Increment",
        "tests.environments.trl_style:Increment",
        "tests.environments.trl_style.make_increment",
        {"class_path": "tests.environments.trl_style.Increment"},
    ],
    ids=["class", "instance", "function", "name", "name with colon", "name of a function", "class_path"],
)
def test_ways_to_name_an_environment(environment):
    tools = ToolEnvironment(environment, parser=HermesParser())
    assert contents(tools.step(hermes("increment", step=2))) == ["2"]


def test_further_tools():
    tools = [trl_style.dice, Calculator(), "tests.environments.trl_style.Echo", {"class_path": "builtins.object"}]
    environment = ToolEnvironment(Increment, tools=tools, parser="hermes")
    names = [schema["function"]["name"] for schema in environment.tool_schemas()]
    assert names == ["increment", "dice", "calculate", "step"]
    environment = ToolEnvironment(tools=["tests.environments.trl_style.dice"], parser="hermes")
    assert contents(environment.step(hermes("dice", sides=1))) == ["1"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": "nowhere.Thing"}, "'nowhere.Thing' cannot be imported .*write the name as my_module"),
        ({"environment": "tests.environments.trl_style.Nothing"}, "cannot be imported"),
        ({"environment": object}, "object has no tools"),
        ({}, "has no tools"),
        ({"environment": Increment, "tools": [Increment()]}, "two tools with the name 'increment'"),
        ({"environment": Increment, "parser": "herms"}, "parser is 'herms': did you mean hermes?"),
        ({"environment": Increment, "max_calls": 0}, "max_calls is 0; it must be at least 1"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ToolEnvironment(**settings)


def test_the_parser_is_chosen_by_the_chat_template():
    environment = ToolEnvironment(Increment)
    with pytest.raises(RuntimeError, match="use_chat_template"):
        environment.step("x")
    with pytest.raises(ValueError, match="no chat template"):
        environment.use_chat_template(None)
    environment.use_chat_template("[TOOL_CALLS]")
    turn = pickle.loads(pickle.dumps(environment)).step('[TOOL_CALLS]increment[ARGS]{"step": 3}')
    assert turn.observation == [
        {"role": "tool", "name": "increment", "content": "3", "tool_call_id": "call00000"},
    ]
    given = ToolEnvironment(Increment, parser="hermes")
    given.use_chat_template("[TOOL_CALLS]")
    assert contents(given.step(hermes("increment", step=1))) == ["1"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_share_nothing(copied):
    environment = ToolEnvironment(Increment, parser="hermes")
    environment.step(hermes("increment", step=1))
    other = copied(environment)
    assert contents(other.step(hermes("increment", step=5))) == ["5"]
    assert contents(environment.step(hermes("increment", step=1))) == ["2"]


def test_types_are_known_in_other_processes():
    """A class of a notebook is pickled by value, without the names in its annotations."""
    namespace = {"__name__": "__main__"}
    exec(
        "from __future__ import annotations\n"
        "from typing import Literal\n"
        "class Lamp:\n"
        "    def switch(self, state: Literal['on', 'off']) -> str:\n"
        "        '''Switch.\n\n        Args:\n            state: State.\n        '''\n"
        "        return state\n",
        namespace,
    )
    environment = ToolEnvironment(namespace["Lamp"], parser="hermes")
    del namespace["Literal"]
    turn = copy.deepcopy(environment).step(hermes("switch", state="on") + hermes("switch", state="dim"))
    assert contents(turn)[0] == "on"
    assert [error.kind for error in turn.errors] == ["wrong_type"]


def test_it_can_be_configured():
    parser = ArgumentParser()
    parser.add_argument("--environment", type=Environment)
    config = {
        "class_path": "lgrpo.environments.ToolEnvironment",
        "init_args": {
            "environment": "tests.environments.trl_style.Words",
            "tools": [{"class_path": "lgrpo.environments.Calculator", "init_args": {"max_chars": 7}}],
            "parser": "hermes",
        },
    }
    environment = parser.instantiate(parser.parse_object({"environment": config})).environment
    assert environment.keeps_special_tokens
    assert contents(environment.step(hermes("calculate", expression="1 + 1"))) == ["2"]
    assert "longer than 7" in contents(environment.step(hermes("calculate", expression="1 + 1 + 1")))[0]


def test_tools_in_worker_processes():
    """A plain class, an async one and the sandbox of the Python tool work in the processes of episodes."""
    environment = ToolEnvironment(Shop, tools=[PythonTool(allow_execution=True), Calculator()])
    environment.use_chat_template("<tool_call>")
    with contextlib.closing(WorkerEpisodes(environment)) as episodes:
        assert [episodes.reset(index, {}).result(60) for index in range(2)] == ["You have 5 coins."] * 2
        turn = episodes.step(0, hermes("python", code="print(6 * 7)") + hermes("buy", item="tea", count=2)).result(60)
        assert contents(turn) == ["42", "{'basket': ['tea', 'tea']}"]
        turn = episodes.step(1, hermes("calculate", expression="1/0") + hermes("price", item="milk")).result(60)
        assert contents(turn) == ["Error: calculate failed with ValueError: division by zero", "1.0"]
        assert [error.kind for error in turn.errors] == ["tool_failed"]
        assert episodes.step(0, "Done.").result(60)[1:3] == (1.0, True)
        assert episodes.truncate(1).result(60) == 0.0


def test_the_class_of_the_page_runs():
    page = (Path(__file__).parents[2] / "tutorials" / "pages" / "environments.md").read_text(encoding="utf-8")
    namespace = {}
    exec(re.search(r"```python\n(class Shop.*?)```", page, re.DOTALL)[1], namespace)
    environment = ToolEnvironment(namespace["Shop"], parser="hermes")
    environment.reset({"budget": 5, "question": "Buy tea."})
    assert contents(environment.step(hermes("buy", item="tea"))) == ["You have tea."]
    assert environment.step("Done.").reward == 1.0


def test_users_need_nothing_of_lgrpo():
    assert "lgrpo" not in inspect.getsource(trl_style).replace("nothing from lgrpo", "")

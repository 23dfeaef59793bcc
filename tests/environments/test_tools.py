"""Ready-made tools: calculator, Python and search."""

from __future__ import annotations

import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lgrpo.environments import Calculator, PythonTool, Search, ToolEnvironment
from lgrpo.environments.tools.search import BM25, words


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(2 ** 10)", "-1024"),
        ("7 / 2", "3.5"),
        ("7 // 2 + 7 % 2", "4"),
        ("1 / 3", "0.333333333333"),
        ("2^0.5", "1.41421356237"),
        ("3 × 4 ÷ 6 =", "2"),
        ("sqrt(16) + max(1, 2, 3)", "7"),
        ("round(pi, 2)", "3.14"),
        ("123456789 * 987654321", "121932631112635269"),
        ("1e300 * 10", "1e+301"),
    ],
)
def test_arithmetic(expression, value):
    assert Calculator().calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 4000 * 10 ** 4000", "too large"),
        ("1e308 * 10", "not a real number"),
        ("(-1) ** 0.5", "not a real number"),
        ("exp(1000)", "too large"),
        ("2.0 ** 5000", "too large"),
        ("round(5, -99999999999)", "at most 100 digits"),
        ("sqrt(-1)", r"sqrt\(-1\) is not defined"),
        ("sqrt()", "is not defined"),
        ("round(1, ndigits=2)", "no named arguments"),
        ("two plus two", "is not an arithmetic expression"),
        ("x + 1", "'x' is not arithmetic; the functions are abs"),
        ("__import__('os').system('true')", "is not arithmetic"),
        ("(1).__class__", "is not arithmetic"),
        ("[1] * 3", "is not arithmetic"),
        ("'a' * 10", "is not arithmetic"),
        ("True + 1", "is not arithmetic"),
        ("1 << 9999999", "is not arithmetic"),
        ("1 if 1 else 2", "is not arithmetic"),
        ("(" * 400, "is not an arithmetic expression"),
        ("-" * 499 + "1", "1"),
        ("1" * 501, "longer than 500"),
        ("", "is not an arithmetic expression"),
        ("\0", "arithmetic"),
    ],
)
def test_what_is_not_arithmetic(expression, message):
    calculator = Calculator()
    if expression.startswith("----"):
        assert calculator.calculate(expression) == "-1"
        return
    with pytest.raises(ValueError, match=message):
        calculator.calculate(expression)


@settings(max_examples=200, deadline=None)
@given(st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=6,
))  # fmt: skip
def test_the_value_is_that_of_python(expression):
    assert Calculator().calculate(expression) == str(eval(expression))


@pytest.fixture(scope="module")
def python():
    return PythonTool(allow_execution=True, timeout=20, cpu_seconds=1).python


def test_python_prints_and_returns_the_last_value(python):
    assert python("print('a')\nx = 20\nx + 1") == "a\n21"
    assert python("def f(n):\n    return n * 2\nprint(f(4))") == "8"
    assert python("x = 1") == "The code printed nothing."
    assert python("import math\nmath.comb(5, 2)") == "10"
    assert python("'''\"\\n'''") == "'\"\\n'"


def test_python_shows_errors_without_the_sandbox(python):
    text = python("print(1)\ndef f():\n    return 1 / 0\nf()")
    assert text.startswith("1\nTraceback")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert "line 3, in f" in text
    assert "line 4, in <module>\n    f()" in text
    assert "run" not in text
    assert python("x = (").endswith("SyntaxError: '(' was never closed")
    assert python("import sys\nsys.exit(3)") == "The code ended with status 3."


def test_python_is_limited(python):
    assert "[" in python("print('x' * 50_000)")
    assert len(python("print('x' * 50_000)")) < 4100
    assert python("while True: pass").startswith("The code ended with status")
    assert "printed too much" in python("while True: print('x' * 1000)")
    assert python("import socket\nsocket.create_connection(('1.1.1.1', 53), 1)").startswith("Traceback")
    text = PythonTool(allow_execution=True, timeout=1.0).python("import time\ntime.sleep(60)")
    assert text == "The code was stopped after 1 seconds."


def test_python_needs_a_confirmation():
    with pytest.raises(ValueError, match="allow_execution: true"):
        PythonTool()


def test_python_as_a_tool():
    environment = ToolEnvironment(tools=[PythonTool(allow_execution=True)], parser="hermes")
    call = {"name": "python", "arguments": {"code": "sum(range(101))"}}
    turn = pickle.loads(pickle.dumps(environment)).step(f"<tool_call>{json.dumps(call)}</tool_call>")
    assert turn.observation == [{"role": "tool", "name": "python", "content": "5050"}]


DOCUMENTS = ["The red fox lives in a den.", "Blue whales live in the sea.", "A fox hunts at night; a fox is shy."]


def test_bm25_equals_its_definition():
    index, k1, b = BM25(DOCUMENTS), 1.5, 0.75
    counts = [words(document) for document in DOCUMENTS]
    mean = sum(map(len, counts)) / 3

    def score(query, own):
        total = 0.0
        for word in set(words(query)):
            holding = sum(word in other for other in counts)
            idf = math.log(1 + (3 - holding + 0.5) / (holding + 0.5))
            frequency = own.count(word)
            total += idf * frequency * (k1 + 1) / (frequency + k1 * (1 - b + b * len(own) / mean))
        return total

    for query in ("fox", "red fox", "the sea", "in a den at night"):
        expected = sorted(range(3), key=lambda i: (-score(query, counts[i]), i))
        assert index.rank(query, 3) == [i for i in expected if score(query, counts[i]) > 0]
        assert index.scores(query) == pytest.approx({i: score(query, counts[i]) for i in index.rank(query, 3)})


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text(f"{DOCUMENTS[0]}\n\n{DOCUMENTS[1]}\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"title": "Fox", "text": DOCUMENTS[2]}) + "\n\n")
    (tmp_path / "c.md").write_text("fox fox fox")
    return str(tmp_path)


def test_search_in_files(corpus):
    search = Search(corpus, num_results=2)
    assert search.search("FOX at night?") == f"[1] Fox: {DOCUMENTS[2]}\n\n[2] {DOCUMENTS[0]}"
    assert pickle.loads(pickle.dumps(search)).search("whales") == f"[1] {DOCUMENTS[1]}"
    assert search.search("zebra") == "No document has any of these words."


def test_search_shortens_documents(tmp_path):
    (tmp_path / "a.txt").write_text("fox " * 1000)
    text = Search(str(tmp_path / "a.txt"), max_chars=100).search("fox")
    assert len(text) < 150
    assert "characters left out" in text


def test_search_refuses_what_is_no_corpus(tmp_path):
    with pytest.raises(ValueError, match="it must be a file or a folder"):
        Search(str(tmp_path))
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"body": "x"}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*a\.jsonl is not a document"):
        Search(str(tmp_path))

"""Reward for programs: run the program of a completion in a sandbox and check it by tests."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, final

from lgrpo.checks import check_range
from lgrpo.rewards.base import Reward
from lgrpo.types import Completion, Prompt

_SANDBOX_MODULES = ("confinement", "sandbox")  # in the order of their imports
_START = """
import marshal, sys
for name, code in marshal.load(sys.stdin.buffer):
    sys.modules[name] = module = type(sys)(name)
    exec(code, module.__dict__)
module.main()
"""
_SANDBOX_GRACE = 10.0  # seconds a sandbox has to start and to clean up, in addition to the program's time
_FENCES = {"```python", "```python3", "```py"}


class SandboxUnavailable(RuntimeError):
    """This system does not allow programs to be confined as the settings ask."""


@dataclass(kw_only=True, frozen=True)
class Execution:
    """How a program ended."""

    ended: Literal["exit", "timeout", "output"]
    """``exit``: by itself; ``timeout`` and ``output``: killed at that limit."""
    status: int
    """Exit status; 0: success."""
    passed: bool
    """Whether Python tests ran to their end in the program's process."""
    stdout: str
    stderr: str


@final
class CodeExecution(Reward):
    """1 if the Python program of a completion passes the row's tests, else 0.

    The model's code runs on this machine, in a process with limits: without network, in an empty directory, with read
    access to the files of the system and of Python only. This is not a virtual machine:
    ``tutorials/pages/code_execution.md`` lists what is prevented and what is not. It is off unless ``allow_execution``
    is set. Linux only.

    Tests are either Python source that runs after the program in the same process (``assert add(1, 2) == 3``), or a
    list of ``{"input": …, "output": …}``. Each of these is a separate run from standard input to standard output,
    whose output is compared word by word outside the program's process.
    """

    def __init__(
        self,
        tests_field: str = "tests",
        allow_execution: bool = False,
        allow_network: bool = False,
        allow_files: bool = False,
        packages: bool = False,
        whole_text: bool = False,
        partial: bool = False,
        timeout: float = 6.0,
        cpu_seconds: int = 5,
        memory_mib: int = 1024,
        num_processes: int = 16,
        file_mib: int = 16,
        output_kib: int = 1024,
    ) -> None:
        """
        Args:
            tests_field: Field of the dataset row with the tests.
            allow_execution: Confirmation that programs of the model may run on this machine; required.
            allow_network: Let programs use the network.
            allow_files: Let programs see the file system, with your rights, instead of Python's files only.
            packages: Let programs import the packages of this Python environment, not the standard library only.
            whole_text: Take the whole completion as the program, not its last ```` ```python ```` block.
            partial: Score the fraction of input and output pairs that is right.
            timeout: Seconds a completion may take, all its pairs together. Keep it below that of the workers.
            cpu_seconds: Processor time of a process.
            memory_mib: Address space of a process.
            num_processes: Processes and threads at once.
            file_mib: Size of a file, and of all files together, that a program may write.
            output_kib: Size of the output that a program may print.
        """
        if not allow_execution:
            raise ValueError(
                "CodeExecution runs programs the model wrote on this machine, as this user; they may do harm in "
                "spite of its limits. Read tutorials/pages/code_execution.md, then set allow_execution: true"
            )
        if sys.platform != "linux":
            raise ValueError(f"CodeExecution needs Linux; this is {sys.platform}")
        limits = {"timeout": timeout, "cpu_seconds": cpu_seconds, "memory_mib": memory_mib}
        limits |= {"num_processes": num_processes, "file_mib": file_mib, "output_kib": output_kib}
        for name, value in limits.items():
            check_range(name, value, above=0)
        self.tests_field = tests_field
        self.whole_text = whole_text
        self.partial = partial
        self.timeout = timeout
        python = os.path.realpath(sys.executable)  # outside the virtual environment, whose packages it would see
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        self._request = {  # the part that is the same for all programs
            "command": [sys.executable, "-I"] if packages else [python, "-I", "-S"],
            "visible": [sys.base_prefix, sys.base_exec_prefix, python] + [sys.prefix] * packages,
            "environment": environment | ({"OMP_NUM_THREADS": "1"} if packages else {}),
            "temporary": tempfile.gettempdir(),
            "allow_network": allow_network,
            "allow_files": allow_files,
            "cpu": cpu_seconds,
            "memory": memory_mib * 2**20,
            "processes": num_processes,
            "file_size": file_mib * 2**20,
            "output": output_kib * 2**10,
        }
        self._is_sandbox_tested = False

    def required_fields(self) -> set[str]:
        return {self.tests_field}

    def check_row(self, row: Mapping[str, Any]) -> None:
        self._tests(row)
        if not self._is_sandbox_tested:  # in a worker, an unavailable sandbox would only fail a score
            self.execute("pass")
            self._is_sandbox_tested = True

    def final_answer(self, text: str) -> str | None:
        return self._program(text)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        tests, program = self._tests(prompt.row), self._program(completion.text)
        if program is None:
            return 0.0
        if isinstance(tests, str):
            execution = self.execute(program, tests)
            return float(execution.passed and execution.ended == "exit")
        deadline, num_right = time.monotonic() + self.timeout, 0
        for given, expected in tests:
            if self._is_right(program, given, expected, deadline):
                num_right += 1
            elif not self.partial:
                return 0.0
        return num_right / len(tests)

    def execute(
        self, program: str, tests: str | None = None, stdin: str = "", timeout: float | None = None
    ) -> Execution:
        """Run a program, followed by ``tests`` if given, and return how it ended. Thread-safe."""
        request = self._request | {
            "program": program.encode(errors="replace"),
            "tests": None if tests is None else tests.encode(errors="replace"),
            "stdin": stdin.encode(errors="replace"),
            "timeout": self.timeout if timeout is None else timeout,
        }
        answer = ask_sandbox(request)
        if "refused" in answer:
            raise SandboxUnavailable(
                f"this system does not let CodeExecution confine programs: {answer['refused']}. Run it where it may "
                "make namespaces (as root, in a container that allows them, in a virtual machine), or let programs "
                "use the network (allow_network: true) and the file system (allow_files: true); "
                "tutorials/pages/code_execution.md lists the risks"
            )
        texts = {name: answer[name].decode(errors="replace") for name in ("stdout", "stderr")}
        return Execution(ended=answer["ended"], status=answer["status"], passed=answer["passed"], **texts)

    def _is_right(self, program: str, given: str, expected: str, deadline: float) -> bool:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return False
        execution = self.execute(program, stdin=given, timeout=remaining)
        has_succeeded = execution.ended == "exit" and execution.status == 0
        return has_succeeded and execution.stdout.split() == expected.split()

    def _program(self, text: str) -> str | None:
        return text if self.whole_text else last_python_block(text)

    def _tests(self, row: Mapping[str, Any]) -> str | list[tuple[str, str]]:
        """Return a row's tests: Python source, or pairs of input and output."""
        tests = row[self.tests_field]
        try:
            return checked_source(tests) if isinstance(tests, str) else checked_pairs(tests)
        except ValueError as error:
            raise ValueError(f"field {self.tests_field!r} of the data holds no tests: {error}") from error


def ask_sandbox(request: dict[str, Any]) -> dict[str, Any]:
    """Start a sandbox process, send it a request and return its answer."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _START, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"LANG": "C.UTF-8"},  # none of this process's variables, which may hold secrets
    )
    message = sandbox_code() + marshal.dumps(request)
    try:
        answer, errors = process.communicate(message, request["timeout"] + _SANDBOX_GRACE)
    except BaseException:
        process.terminate()  # it kills the program and cleans up
        process.communicate(timeout=_SANDBOX_GRACE)
        raise
    if not answer:
        raise RuntimeError(f"the sandbox of a program ended: {errors.decode(errors='replace')[-500:]}")
    return marshal.loads(answer)


@cache
def sandbox_code() -> bytes:
    """Return the compiled modules of the sandbox: compiling them at every start would take a tenth of the time."""
    sources = sandbox_sources()
    return marshal.dumps([(name, compile(source, f"{name}.py", "exec")) for name, source in sources])


def sandbox_sources() -> list[tuple[str, str]]:
    """Return name and source of the sandbox's modules, in the order of their imports."""
    folder = Path(__file__).parent
    return [(f"{__package__}.{name}", (folder / f"{name}.py").read_text()) for name in _SANDBOX_MODULES]


def checked_source(tests: str) -> str:
    """Return Python source, or raise a ``ValueError`` if it is empty or does not compile."""
    if not tests.strip():
        raise ValueError("the text is empty, which every answer would pass")
    try:
        compile(tests, "tests.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"it is not valid Python ({error})") from error
    return tests


def checked_pairs(tests: Any) -> list[tuple[str, str]]:
    """Return pairs of input and output, or raise a ``ValueError`` if ``tests`` are none.

    >>> checked_pairs([{"input": "1 2", "output": "3"}])
    [('1 2', '3')]
    """
    if not isinstance(tests, list | tuple) or not tests:
        raise ValueError(f'it is neither Python source nor a list of {{"input": …, "output": …}}: {tests!r:.200}')
    for pair in tests:
        texts = [pair.get("input"), pair.get("output")] if isinstance(pair, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f'{pair!r:.200} is not an {{"input": …, "output": …}} of two strings')
    return [(pair["input"], pair["output"]) for pair in tests]


def last_python_block(text: str) -> str | None:
    """Return the content of the last closed block that is marked as Python, or None.

    >>> last_python_block("First:\\n```python\\nx = 1\\n```\\nNo:\\n```python\\nx = 2\\n```\\nand ```python")
    'x = 2'
    """
    found: str | None = None
    block: list[str] | None = None
    for line in text.split("\n"):
        if block is None:
            block = [] if line.split()[:1] and line.split()[0].lower() in _FENCES else None
        elif line.strip() == "```":
            found, block = "\n".join(block), None
        else:
            block.append(line)
    return found

"""Python tool: runs the code of a model in the sandbox."""

from __future__ import annotations

from typing import final

from lgrpo.checks import check_count
from lgrpo.environments.tools.environment import shorten
from lgrpo.rewards.code import CodeExecution

_RUNNER = """
import ast, sys

def run(source):
    tree = ast.parse(source, "<code>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    namespace = {"__name__": "__main__"}
    exec(compile(tree, "<code>", "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<code>", "eval"), namespace)
        if value is not None:
            print(repr(value))

try:
    run(SOURCE)
except Exception as error:
    import linecache, traceback
    linecache.cache["<code>"] = (len(SOURCE), None, SOURCE.splitlines(True), "<code>")
    inner = error.__traceback__.tb_next
    while inner is not None and inner.tb_frame.f_code.co_filename != "<code>":
        inner = inner.tb_next
    sys.stdout.flush()
    traceback.print_exception(error.with_traceback(inner))
    sys.exit(1)
"""
"""Program in the sandbox: prints the value of the last line, and errors without its own frames."""


@final
class PythonTool:
    """Tool that runs Python code and returns what it prints, and the value of its last line.

    Code runs in the sandbox of ``CodeExecution``, as a new process for each call: nothing is kept between calls.
    ``tutorials/pages/code_execution.md`` lists what the sandbox prevents and what not. Linux only.
    """

    def __init__(
        self,
        allow_execution: bool = False,
        packages: bool = False,
        timeout: float = 6.0,
        cpu_seconds: int = 5,
        memory_mib: int = 1024,
        max_chars: int = 4000,
    ) -> None:
        """
        Args:
            allow_execution: Confirmation that code of the model may run on this machine; required.
            packages: Let code import the packages of this Python environment, not the standard library only.
            timeout: Seconds that a call may take.
            cpu_seconds: Processor time of a process.
            memory_mib: Address space of a process.
            max_chars: Length of the output above which its middle is left out.
        """
        if not allow_execution:
            raise ValueError(
                "PythonTool runs code the model wrote on this machine, as this user; it may do harm in spite of its "
                "limits. Read tutorials/pages/code_execution.md, then set allow_execution: true"
            )
        check_count("max_chars", max_chars, at_least=100)
        self._max_chars = max_chars
        self._timeout = timeout
        self._sandbox = CodeExecution(
            allow_execution=True, packages=packages, timeout=timeout, cpu_seconds=cpu_seconds, memory_mib=memory_mib
        )
        self._sandbox.execute("pass")  # an unavailable sandbox is an error of the user, not of the model

    def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last line. Variables are not kept.

        Args:
            code: Python code.

        Returns:
            The output of the code, or the error that it raises.
        """
        execution = self._sandbox.execute(f"SOURCE = {code!r}\n{_RUNNER}")
        text = execution.stdout + execution.stderr
        if execution.ended == "timeout":
            text += f"\nThe code was stopped after {self._timeout:g} seconds."
        elif execution.ended == "output":
            text += "\nThe code was stopped because it printed too much."
        elif execution.status != 0 and not execution.stderr:
            text += f"\nThe code ended with status {execution.status}."
        return shorten(text.strip("\n"), self._max_chars) or "The code printed nothing."

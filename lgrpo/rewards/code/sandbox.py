"""Process that runs one untrusted program, confined, and reports how it ended.

``execution.py`` starts it as ``python -I -S -c START PARENT``, where PARENT is the id of the starting process. START
reads this module and ``confinement.py`` from standard input, because lgrpo cannot be imported there. Then a request is
read from standard input and an answer is written to standard output. Both are marshalled dictionaries: both ends are
the same Python, and marshal takes no time to import. Only a small part of the standard library is imported, because
this process starts for every program.

There are three processes. This one measures the time and reads the output. Its child is the first process of a PID
namespace, so all processes in the namespace end with it. The child's child drops its privileges and becomes the
program.

Linux only.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import sys
import time

from lgrpo.rewards.code.confinement import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    Confinement,
    Refused,
    build_root,
    drop_privileges,
    prctl,
    set_limits,
    write_file,
)

TYPE_CHECKING = False  # importing typing takes as long as all other imports together
if TYPE_CHECKING:
    from typing import Any

TESTS, VERDICT = 3, 4  # file descriptors of a program that is tested by Python source

HARNESS = f"""
import os, sys

def main(open=open, exec=exec, compile=compile, write=os.write):
    path = sys.argv.pop()
    module = type(sys)("answer")
    sys.modules["answer"] = module
    with open(path, "rb") as file:
        exec(compile(file.read(), "answer.py", "exec"), module.__dict__)
    with open({TESTS}, "rb", closefd=False) as file:
        token, tests = file.read(32), file.read()
    exec(compile(tests, "tests.py", "exec"), module.__dict__)
    write({VERDICT}, token)

main()
"""
"""Program that runs an answer, then its tests in the same namespace, and writes the token only after that."""


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # the parent ended before the call above
        return
    request = marshal.loads(sys.stdin.buffer.read())
    os.setsid()  # a signal to the group of a killed worker does not reach this process, so it can clean up
    try:
        answer = run(request)
    except Refused as error:
        answer = {"refused": str(error)}
    sys.stdout.buffer.write(marshal.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to clean up, and Python's own shutdown takes time


def stop(*_: object) -> None:
    sys.exit(1)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the program of a request and return the answer."""
    confinement = Confinement(request)
    try:
        return Run(request, confinement).result()
    finally:
        confinement.close()


class Run:
    """One run of a program: its pipes, its processes and its output. Call ``result`` once."""

    def __init__(self, request: dict[str, Any], confinement: Confinement) -> None:
        self.request = request
        self.confinement = confinement
        self.token = os.urandom(16).hex().encode()
        tests = request["tests"]
        self.stdin = memory_file(request["stdin"])
        self.tests = memory_file(b"" if tests is None else self.token + tests)
        # Open for writing while the first process of the namespace lives; it writes its errors there.
        self.life, self._life = os.pipe()
        self.out, self._out = os.pipe()
        self.err, self._err = os.pipe()
        self.verdict, self._verdict = os.pipe()
        self.received = {self.life: bytearray(), self.out: bytearray(), self.err: bytearray()}

    def result(self) -> dict[str, Any]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        first = os.fork()
        if first == 0:
            self._in_child(self._init_process)
        for end in (self._life, self._out, self._err, self._verdict):
            os.close(end)
        try:
            ended = self._read_until_end()
        finally:
            status = kill_and_wait(first, self.confinement.has_pid_namespace)
        self._read_rest()
        if error := self.received[self.life]:
            raise Refused(error.decode())
        return {
            "ended": ended,
            "status": status,
            "passed": os.read(self.verdict, 64) == self.token,
            "stdout": bytes(self.received[self.out]),
            "stderr": bytes(self.received[self.err]),
        }

    def _read_until_end(self) -> str:
        """Read output until the first process ends, the time is over or the output is too long."""
        deadline = time.monotonic() + self.request["timeout"]
        poll = select.poll()
        for stream in self.received:
            poll.register(stream, select.POLLIN)
        while True:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                return "timeout"
            for stream, _ in ready:
                data = os.read(stream, 2**16)
                self.received[stream] += data
                if len(self.received[stream]) > self.request["output"]:
                    return "output"
                if not data:
                    poll.unregister(stream)
                    if stream == self.life:
                        return "exit"

    def _read_rest(self) -> None:
        """Read the output that was still in the pipes when the processes were killed."""
        for stream in self.received:
            while len(self.received[stream]) <= self.request["output"] and (data := os.read(stream, 2**16)):
                self.received[stream] += data

    def _in_child(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            os.write(self._life, f"{error}"[:500].encode())
        finally:
            os._exit(125)

    def _init_process(self) -> None:
        """Run as the first process of the namespace: start the program and exit with its status."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        write_file("/proc/self/oom_score_adj", "1000")  # if memory runs out, the kernel kills this before the trainer
        if self.confinement.home:
            write_file(f"{self.confinement.home}/program.py", self.request["program"])
        else:
            build_root(self.request)
        program = os.fork()
        if program == 0:
            self._in_child(self._exec_program)
        while True:
            pid, status = os.wait()
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)

    def _exec_program(self) -> None:
        """Connect the program's files, confine this process and replace it by the program."""
        os.setsid()  # a signal to the program's process group reaches no other process
        path = f"{self.confinement.home}/program.py"
        os.chdir(f"{self.confinement.home}/tmp")
        for source, target in ((self.stdin, 0), (self._out, 1), (self._err, 2)):
            os.dup2(source, target)
        command = [*self.request["command"], path]
        if self.request["tests"] is not None:
            tests, verdict = os.dup(self.tests), os.dup(self._verdict)  # either may have the other's target number
            os.dup2(tests, TESTS)
            os.dup2(verdict, VERDICT)
            command = [*self.request["command"], "-c", HARNESS, path]
        set_limits(self.request, self.confinement)
        drop_privileges(self.confinement.user)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.access(path, os.R_OK):
            parent = os.path.dirname(self.confinement.home)
            raise Refused(f"user {os.getuid()}, as whom programs run, cannot read {parent}")
        try:
            os.execve(command[0], command, self.request["environment"])
        except OSError as error:
            raise Refused(f"user {os.getuid()}, as whom programs run, cannot start {command[0]} ({error})") from error


def kill_and_wait(first: int, has_pid_namespace: bool) -> int:
    """Kill all processes of the program and return the exit status of the first one."""
    os.kill(first, signal.SIGKILL)
    _, status = os.waitpid(first, 0)  # in a PID namespace, no other process is left when this returns
    while not has_pid_namespace:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    return os.waitstatus_to_exitcode(status)


def children() -> list[int]:
    """Return the ids of this process's children, including adopted ones whose parents ended."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                stat = file.read()
        except OSError:
            continue
        if int(stat[stat.rindex(")") :].split()[2]) == os.getpid():
            found.append(int(name))
    return found


def memory_file(content: bytes) -> int:
    file = os.memfd_create("input")
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file

"""Code execution against programs that hang, allocate, flood the output, spy, use the network and cheat."""

from __future__ import annotations

import marshal
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lgrpo import Completion, Prompt
from lgrpo.rewards import Isolated
from lgrpo.rewards.code.execution import (
    _START,
    CodeExecution,
    SandboxUnavailable,
    last_python_block,
    sandbox_sources,
)
from lgrpo.rewards.workers.isolated import Scoring

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0\n"
PAIRS = [{"input": "1 2", "output": "3"}, {"input": "-1 1", "output": "0"}]
STDIN_ADD = "print(sum(map(int, input().split())))"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code execution requires Linux")


def code(**settings):
    return CodeExecution(allow_execution=True, **settings)


def answer(program):
    return f"Let me think.\n```python\n{program}\n```\nThat is it."


def score(reward, text, tests):
    prompt = Prompt(text="", token_ids=[1], row={"tests": tests}, position=0)
    completion = Completion(token_ids=[1], logprobs=[0.0], text=text, finish_reason="stop", behaviour_step=0)
    (value,) = reward([prompt], [completion])
    return value


def living(marker):
    """Return the processes that have a marker on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            command, state = (path / "cmdline").read_bytes(), (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marker.encode() in command and state not in "ZX":
            found.append(int(path.name))
    return found


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not (is_met := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_met


@pytest.fixture
def open_path():
    """Create a directory that all users may read, unlike pytest's."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755 if os.geteuid() == 0 else 0o700)
    yield path
    subprocess.run(["rm", "-rf", path], check=True)  # shutil fails on deep trees


@pytest.fixture
def marker():
    """Return a unique number of seconds to sleep."""
    return f"{int.from_bytes(os.urandom(4), 'big')}.{os.getpid()}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (answer(ADD), 1),
        ("```python\nraise SystemExit\n```\n" + answer(ADD), 1),  # the last block counts
        (answer("from __future__ import annotations\n" + ADD), 1),
        (answer("import dataclasses, heapq, json, math, re, typing\n" + ADD), 1),
        (answer("def add(a, b):\n    return a - b"), 0),
        (answer("def add(a, b)"), 0),
        (answer("pass"), 0),
        (answer(""), 0),
        (answer("\x00"), 0),
        (answer("\ud800"), 0),
        (ADD, 0),  # not in a block
        ("```python\n" + ADD, 0),  # a block that is not closed
        ("", 0),
    ],
)
def test_programs_are_scored_by_their_tests(text, expected):
    assert score(code(), text, ADD_TESTS) == expected


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('ok'); print('passed'); raise SystemExit",
        "import os\ndef add(a, b): os._exit(0)",
        "def add(a, b): raise SystemExit(0)",
        "import os\nos.write(4, b'0' * 32)\nos._exit(0)",  # a guessed token
        "import os\nfor fd in range(10):\n    try: os.write(fd, b'1' * 32)\n    except OSError: pass\nos._exit(0)",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *_, **__: None",
        "import threading, os\nthreading.Timer(0, os._exit, [0]).start()\ndef add(a, b):\n    while True: pass",
        "import os, signal\nos.kill(0, signal.SIGKILL)",
        "import os, signal\nos.kill(1, signal.SIGKILL); os.kill(-1, signal.SIGKILL)",
        "import ctypes; ctypes.string_at(0)",
    ],
)
def test_ending_early_does_not_pass(program):
    assert score(code(), answer(program), ADD_TESTS) == 0
    assert score(code(), answer(program), PAIRS) == 0


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.write(4, os.pread(3, 32, 0))\nos._exit(0)",
        "class Yes:\n    __eq__ = lambda *_: True\nadd = lambda a, b: Yes()",
    ],
)
def test_a_determined_program_passes_source_tests_but_not_pairs(program):
    """A documented limit: source tests run in the process of the program."""
    assert score(code(), answer(program), ADD_TESTS) == 1
    assert score(code(), answer(program), PAIRS) == 0


def test_whole_text_is_the_program():
    assert score(code(whole_text=True), ADD, ADD_TESTS) == 1
    assert score(code(whole_text=True), answer(ADD), ADD_TESTS) == 0


def test_last_python_block_is_found():
    assert last_python_block("  ```Python title=x\n  a\n  ```\n```text\nb\n```") == "  a"
    assert last_python_block("```py\na\n```\n```python3\nb\n\n```") == "b\n"
    assert last_python_block("```\na\n```") is None


def test_pairs_compare_words_of_the_output():
    assert score(code(), answer(STDIN_ADD), PAIRS) == 1
    assert score(code(), answer("print('  3\\n\\n')"), PAIRS[:1]) == 1  # white space is not compared
    assert score(code(), answer("print(3)"), PAIRS) == 0
    assert score(code(partial=True), answer("print(3)"), PAIRS) == 0.5
    assert score(code(), answer("print(3)\nraise SystemExit(1)"), PAIRS[:1]) == 0  # the exit status must be 0, too
    assert score(code(), answer("if __name__ == '__main__':\n    print(3)"), PAIRS[:1]) == 1
    long = "7 " * 500_000
    echo = "import sys; sys.stdout.write(sys.stdin.read())"
    assert score(code(), answer(echo), [{"input": long, "output": long}]) == 1


def test_timeout_counts_for_all_pairs_together():
    pairs = [{"input": text, "output": "3"} for text in ("1.5", "1000", "0")]
    value = score(code(timeout=3, partial=True), answer("import time\ntime.sleep(float(input()))\nprint(3)"), pairs)
    assert value == 1 / 3  # the second used up the time


def test_endless_programs_end_at_the_timeout():
    assert code(timeout=1).execute("while True: pass").ended == "timeout"
    assert code(timeout=1).execute("import time; time.sleep(1000)").ended == "timeout"
    assert score(code(timeout=1), answer(ADD + "while True: pass"), ADD_TESTS) == 0


def test_processor_time_is_limited():
    execution = code(timeout=30, cpu_seconds=1).execute("while True: pass")
    assert (execution.ended, execution.status) == ("exit", 128 + signal.SIGKILL)


def test_number_of_processes_is_limited():
    bomb = (
        "import os, time\n"
        "forked = 0\n"
        "try:\n"
        "    for _ in range(200):\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "            os._exit(0)\n"
        "        forked += 1\n"
        "except BlockingIOError:\n"
        "    print(forked)\n"
    )
    assert 8 <= int(code(num_processes=16).execute(bomb).stdout) <= 16
    assert code(num_processes=16).execute("print(1)").stdout == "1\n"  # ended processes are not counted


def test_memory_is_limited():
    execution = code(memory_mib=256).execute("hoard = bytearray(2**28)")
    assert "MemoryError" in execution.stderr
    assert code(memory_mib=512).execute("hoard = bytearray(2**28)").status == 0


def test_output_is_limited():
    for stream in ("stdout", "stderr"):
        flood = f"import sys\nfor _ in range(1024): sys.{stream}.write('x' * 2**20)"
        execution = code(output_kib=64).execute(flood)
        assert execution.ended == "output"
        assert len(execution.stdout + execution.stderr) < 2**18
    assert score(code(output_kib=64), answer(ADD + "print('x' * 2**20)"), ADD_TESTS) == 0


def test_size_and_number_of_files_are_limited():
    one = "file = open('big', 'wb')\nfor _ in range(64): file.write(bytes(2**20))"
    assert "File too large" in code(file_mib=4).execute(one).stderr
    many = "for n in range(64): open(str(n), 'wb').write(bytes(2**20))"
    assert "No space left" in code(file_mib=4).execute(many).stderr
    empty = "for n in range(10000): open(str(n), 'wb')"
    assert "No space left" in code().execute(empty).stderr
    assert code(file_mib=4).execute("open('small', 'wb').write(bytes(2**20))").status == 0


def test_environment_variables_are_hidden(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    spy = (
        "import glob, os\n"
        "print(dict(os.environ))\n"
        "for path in glob.glob('/proc/*/environ'):\n"
        "    try: print(open(path).read())\n"
        "    except OSError: pass\n"
    )
    printed = code().execute(spy).stdout
    assert "LANG" in printed
    assert "secret" not in printed


def test_files_are_hidden(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("very secret")
    home = Path("~").expanduser()
    spy = (
        "import os\n"
        f"for path in ({str(secret)!r}, {__file__!r}, '/etc/passwd', '/etc/shadow'):\n"
        "    try: print(path, open(path).read())\n"
        "    except OSError: pass\n"
        "for path in ('/home', '/mnt', '/proc', '/run', '/sys', '/var', '.'):\n"
        "    print(*(os.listdir(path) if os.path.exists(path) else []), end='')\n"
    )
    assert code().execute(spy).stdout == ""
    visible = code().execute(f"import os\nprint(*os.listdir({str(home)!r}))")  # at most the path to Python
    assert visible.status != 0 or len(visible.stdout.split()) == 1


def test_nothing_is_written_outside_tmp(tmp_path):
    folders = [str(tmp_path), "/", "/usr", "/usr/lib", "/bin", "/dev", "/root", sys.base_prefix, "/etc"]
    vandal = (
        "import os\n"
        f"for folder in {folders!r}:\n"
        "    try: open(folder + '/vandal', 'w'); print(folder)\n"
        "    except OSError: pass\n"
        "open('/tmp/vandal', 'w')\n"
        "try: open('/program.py', 'a'); print('program')\n"
        "except OSError: pass\n"
        "print(os.getcwd(), *os.listdir())\n"
    )
    assert code().execute(vandal).stdout == "/tmp vandal\n"  # a private one, removed at the end
    assert not Path("/tmp/vandal").exists()
    assert code().execute("import os; print(os.listdir())").stdout == "[]\n"


def test_privileges_are_dropped():
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(os.getuid() != 0, os.getgid() != 0, os.getpid(), os.getppid())\n"
        "print(libc.unshare(0x10000000), libc.mount(b'a', b'/tmp', b'tmpfs', 0, b''), libc.prctl(39, 0, 0, 0, 0))\n"
        "print(*sorted(os.listdir('/dev')))\n"
    )
    assert code().execute(program).stdout.splitlines() == [
        "True True 2 1",  # not root, in a PID namespace
        "-1 -1 1",  # no user namespaces, no mounts, no new privileges
        "null random shm urandom zero",
    ]


def test_network_is_disabled_unless_allowed():
    with socket.socket() as port, socket.socket(socket.AF_UNIX) as abstract:
        port.bind(("127.0.0.1", 0))
        port.listen()
        name = f"lgrpo-{os.urandom(8).hex()}"
        abstract.bind("\0" + name)
        abstract.listen()
        call = (
            "import socket\n"
            f"for kind, to in ((socket.AF_INET, {port.getsockname()}), (socket.AF_UNIX, '\\0{name}')):\n"
            "    try: socket.socket(kind).connect(to); print('connected')\n"
            "    except OSError as error: print(type(error).__name__)\n"
        )
        assert "connected" not in code().execute(call).stdout
        assert code(allow_network=True).execute(call).stdout.split() == ["connected"] * 2


def test_background_processes_end_with_the_program(marker):
    program = (
        "import os, subprocess\n"
        f"subprocess.Popen(['sleep', '{marker}'], start_new_session=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        f"    if os.fork() == 0: os.execvp('sleep', ['sleep', '{marker}'])\n"
        "    os._exit(0)\n"
        "print('left')\n"
    )
    assert code().execute(program).stdout == "left\n"
    assert living(marker) == []
    assert code(timeout=1).execute(program + "while True: pass").ended == "timeout"
    assert living(marker) == []


@pytest.mark.slow("waits for processes to end")
def test_programs_end_with_a_killed_worker(marker):
    program = f"import subprocess\nsubprocess.run(['sleep', '{marker}'])"
    reward = Isolated(code(timeout=60), Scoring(num_workers=1, timeout=2.0, failure_score=-1.0))
    assert score(reward, answer(program), ADD_TESTS) == -1
    assert wait_until(lambda: living(marker) == [])
    assert score(reward, answer(ADD), ADD_TESTS) == 1
    reward.close()


@pytest.mark.parametrize("allow_files", [False, True])
def test_killed_trainer_leaves_no_process_and_no_directory(open_path, marker, allow_files):
    program = f"import os\nos.mkdir('a')\nos.execvp('sleep', ['sleep', '{marker}'])"
    message = to_message(sandbox_request(program, allow_files, temporary=open_path))
    script = (
        "import marshal, os, subprocess, sys\n"
        f"command = [{PYTHON!r}, '-I', '-S', '-c', {_START!r}, str(os.getpid())]\n"
        "process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)\n"
        "process.communicate(sys.stdin.buffer.read())\n"
    )
    trainer = subprocess.Popen([PYTHON, "-c", script], stdin=subprocess.PIPE)
    trainer.stdin.write(message)
    trainer.stdin.close()
    assert wait_until(lambda: living(marker))
    assert any(open_path.iterdir()) == allow_files
    trainer.kill()
    trainer.wait()
    assert wait_until(lambda: living(marker) == [] and not any(open_path.iterdir()))


def test_programs_end_with_a_killed_sandbox(marker):
    command = [PYTHON, "-I", "-S", "-c", _START, str(os.getpid())]
    sandbox = subprocess.Popen(command, stdin=subprocess.PIPE)
    program = f"import subprocess\nsubprocess.run(['sleep', '{marker}'])"
    sandbox.stdin.write(to_message(sandbox_request(program, allow_files=False)))
    sandbox.stdin.close()
    assert wait_until(lambda: living(marker))
    sandbox.kill()
    sandbox.wait()
    assert wait_until(lambda: living(marker) == [])


def test_temporary_directory_stays_clean():
    before = set(os.listdir(tempfile.gettempdir()))
    code().execute("open('file', 'w').write('x')")
    code(timeout=0.5).execute("open('file', 'w').write('x')\nwhile True: pass")
    assert not {name for name in set(os.listdir(tempfile.gettempdir())) - before if "lgrpo" in name}


def test_execution_is_thread_safe():
    reward, scores = code(), {}

    def work(number):
        tests = [{"input": f"{number} 1", "output": str(number + 1 + number % 2)}]
        scores[number] = score(reward, answer(STDIN_ADD), tests)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == {number: 1 - number % 2 for number in range(8)}


def test_packages_of_the_environment_are_hidden_unless_allowed():
    assert "No module named 'numpy'" in code().execute("import numpy").stderr
    execution = code(packages=True).execute("import numpy; print(numpy.arange(3).sum())")
    assert execution.stdout == "3\n", execution.stderr


def test_execution_is_off_by_default():
    with pytest.raises(ValueError, match=r"programs the model wrote .*code_execution\.md, then set allow_execution"):
        CodeExecution()


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("assert (", "not valid Python"),
        ("\x00", "not valid Python"),
        ([], "neither Python source nor a list"),
        (None, "neither"),
        (7, "neither"),
        ({"input": "1", "output": "2"}, "neither"),
        ([{"input": "1"}], "of two strings"),
        ([{"input": "1", "output": 2}], "of two strings"),
        (["assert True"], "of two strings"),
    ],
)
def test_malformed_tests_are_rejected(tests, message):
    with pytest.raises(ValueError, match=f"field 'tests' of the data holds no tests: .*{message}"):
        code().check_row({"tests": tests})
    with pytest.raises(ValueError, match="holds no tests"):
        score(code(), answer(ADD), tests)


def test_rows_and_settings_are_checked():
    code().check_row({"tests": ADD_TESTS})
    code(tests_field="cases").check_row({"cases": PAIRS})
    assert code(tests_field="cases").required_fields() == {"cases"}
    assert code().final_answer(answer("x = 1")) == "x = 1"
    for name in ("timeout", "cpu_seconds", "memory_mib", "num_processes", "file_mib", "output_kib"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            code(**{name: 0})


# Below, the sandbox is started directly: as other users, and where the system makes no namespaces.

PYTHON = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if Path(path).exists()), sys.executable)
AS_NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
WITHOUT_NAMESPACES = ["unshare", "-Ur", "sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces; exec "$@"', "sh"]

needs_setpriv = pytest.mark.skipif(
    shutil.which("setpriv") is None or os.geteuid() != 0, reason="only root can change the user"
)
needs_unshare = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-Ur", "true"]).returncode != 0,
    reason="no user namespaces",
)


def sandbox_request(program, allow_files, temporary="/tmp"):
    """Return a request for a Python that all users may read."""
    prefixes = subprocess.run(
        [PYTHON, "-I", "-c", "import os, sys; print(sys.base_prefix, os.path.realpath(sys.executable))"],
        capture_output=True,
        text=True,
        check=True,
    )
    prefix, python = prefixes.stdout.split()
    settings = code(allow_files=allow_files, allow_network=allow_files)._request
    settings = settings | {"command": [python, "-I", "-S"], "visible": [prefix, python], "temporary": str(temporary)}
    return settings | {"program": program.encode(), "tests": None, "stdin": b"", "timeout": 20.0}


def to_message(request):
    """Return the input of a sandbox: its source, which every version of Python reads, and a request."""
    return marshal.dumps(sandbox_sources()) + marshal.dumps(request)


def ask(launcher, request):
    command = [*launcher, PYTHON, "-I", "-S", "-c", _START, str(os.getpid())]
    done = subprocess.run(command, input=to_message(request), capture_output=True, cwd="/", timeout=60)
    assert done.stdout, done.stderr.decode()
    return marshal.loads(done.stdout)


@needs_setpriv
def test_programs_of_an_unprivileged_user_are_confined(open_path, marker):
    program = (
        "import ctypes, os, socket, subprocess\n"
        f"subprocess.Popen(['sleep', '{marker}'], start_new_session=True)\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(os.getuid(), os.getpid(), libc.unshare(0x10000000), libc.mount(b'a', b'/tmp', b'tmpfs', 0, b''))\n"
        "print([name for _, name in socket.if_nameindex()], os.path.exists('/etc/passwd'))\n"
        f"for folder in ('/', '/usr', '/dev', '/etc', {str(open_path)!r}):\n"
        "    try: open(folder + '/vandal', 'w'); print(folder)\n"
        "    except OSError as error: print(error.strerror)\n"
        "forked = 0\n"
        "try:\n"
        "    while os.fork(): forked += 1\n"
        "    import time; time.sleep(60)\n"
        "except BlockingIOError: print(forked < 20)\n"
    )
    request = sandbox_request(program, allow_files=False)
    open_path.chmod(0o777)  # the user may write there, but the mount is read-only
    result = ask(AS_NOBODY, request | {"visible": [*request["visible"], str(open_path)]})
    assert result["stdout"].decode().splitlines() == [
        "65534 2 -1 -1",
        "['lo'] False",
        *["Read-only file system"] * 5,
        "True",
    ], result
    assert living(marker) == []
    suicide = ask(AS_NOBODY, sandbox_request("import os, signal\nos.kill(0, signal.SIGKILL)", allow_files=False))
    assert (suicide["ended"], suicide["status"]) == ("exit", 128 + signal.SIGKILL)


@needs_unshare
def test_missing_namespaces_raise_an_error(monkeypatch, tmp_path):
    """Both at the first score and at the check of the first row; programs never run with less confinement."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(WITHOUT_NAMESPACES)} {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrapper))
    for settings in ({}, {"allow_network": True}, {"allow_files": True}):
        with pytest.raises(SandboxUnavailable, match=r"no namespaces .*allow_network: true.*allow_files: true"):
            score(code(**settings), answer(ADD), ADD_TESTS)
    with pytest.raises(SandboxUnavailable, match="no namespaces"):
        code().check_row({"tests": ADD_TESTS})


@needs_unshare
def test_allowed_execution_without_namespaces_is_limited_and_clean(open_path, marker):
    program = (
        "import os, subprocess\n"
        f"subprocess.Popen(['sleep', '{marker}'], start_new_session=True)\n"
        "print(os.getcwd() != '/tmp', os.listdir(), dict(os.environ))\n"
        "status = open('/proc/self/status').read()\n"
        "print(*[int(line.split()[1], 16) for line in status.splitlines() if line[:6] in ('CapPrm', 'CapBnd')])\n"
        "for _ in range(1500):\n"
        "    os.mkdir('deep'); os.chdir('deep')\n"
        "os.chmod('.', 0)\n"
    )
    result = ask(WITHOUT_NAMESPACES, sandbox_request(program, allow_files=True, temporary=open_path))
    folder, capabilities = result["stdout"].decode().split("\n")[:2]
    assert folder.startswith("True [] {'PATH'"), result
    assert capabilities == "0 0"
    assert living(marker) == []
    assert list(open_path.iterdir()) == []


@needs_setpriv
def test_root_always_changes_the_user(tmp_path):
    program = "import os; print(os.getuid())\ntry: os.listdir('/root')\nexcept PermissionError: print('closed')"
    result = ask([], sandbox_request(program, allow_files=True))
    user, closed = result["stdout"].decode().split()
    assert 60000 < int(user) < 65534
    assert closed == "closed"
    unreadable = sandbox_request("pass", allow_files=True) | {"command": [f"{tmp_path}/python", "-I"]}
    assert f"cannot start {tmp_path}/python" in ask([], unreadable)["refused"]
    closed_home = sandbox_request("pass", allow_files=True, temporary=tmp_path)
    assert f"cannot read {tmp_path}" in ask([], closed_home)["refused"]

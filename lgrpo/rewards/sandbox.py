"""Runs one program of a stranger, away from everything, and says how it ended.

Run as ``python -I -S sandbox.py PARENT``, where PARENT is the id of the process that started it. A request comes on
the standard input and an answer goes to the standard output, both marshalled dictionaries: both ends are one Python,
and marshal takes no time to import. Nothing but the standard library is imported, and little of that: this starts for
every program.

Three processes: this one keeps the time and reads the output; its child is the first process of a namespace, so that
everything in there dies with it; the child's child gives up its rights and becomes the program.

Linux only. Not here: a filter of system calls, a limit on the memory of all processes together (control groups).
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import signal
import sys
import time

TYPE_CHECKING = False  # typing takes as long to import as all the others together
if TYPE_CHECKING:
    from typing import Any

NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 0x40000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, AT_RECURSIVE = 1, 2, 4, 0x8000
MOUNT_SETATTR = 442  # the same number on every architecture
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 24, 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
MNT_DETACH = 2

NOBODY = 65534
TESTS, VERDICT = 3, 4  # files of a program that is tested from within
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime"]
NETWORK = ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]

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
"""Runs an answer, then its tests where the answer's names are, and only then hands back the token."""

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The system does not let the program be shut off."""


def main() -> None:
    signal.signal(signal.SIGTERM, stop)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it was gone before we could ask to be told
        return
    request = marshal.loads(sys.stdin.buffer.read())
    os.setsid()  # a worker that is killed with its group leaves this one time to clean up
    try:
        answer = run(request)
    except Refused as error:
        answer = {"refused": str(error)}
    sys.stdout.buffer.write(marshal.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # there is nothing left to take apart, and Python would take its time


def stop(*_: object) -> None:
    sys.exit(1)


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request."""
    place = Place(request)
    try:
        return Run(request, place).result()
    finally:
        if place.home:
            remove(place.home)


class Place:
    """Where a program runs: away from the network, the files and the other processes, as far as was asked for."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.user = stranger() if can_change_user() else None
        """Who the program is, where that is not us."""
        self.has_namespace = True
        """Of processes: all end with its first one."""
        self.home = ""
        """Directory on the disk, where the program has no file system of its own."""
        self._enter_namespaces(request)
        if request["allow_files"]:
            self._make_home(request["temporary"])

    def _enter_namespaces(self, request: dict[str, Any]) -> None:
        wanted = NEWPID | NEWIPC
        wanted |= 0 if request["allow_network"] else NEWNET
        wanted |= 0 if request["allow_files"] else NEWNS
        user, group = os.geteuid(), os.getegid()
        if self.user is not None and libc.unshare(wanted) == 0:
            return
        if libc.unshare(wanted | NEWUSER) != 0:
            self.has_namespace = False
            if wanted & (NEWNET | NEWNS):
                raise Refused(f"it makes no namespaces ({os.strerror(ctypes.get_errno())})")
            return
        self.user = None
        try:
            write("/proc/self/setgroups", "deny")
            write("/proc/self/uid_map", f"{user or NOBODY} {user} 1")  # never root: then exec drops every capability
            write("/proc/self/gid_map", f"{group or NOBODY} {group} 1")
        except OSError as error:
            raise Refused(f"it sets up no user namespace ({error.strerror})") from error

    def _make_home(self, temporary: str) -> None:
        self.home = f"{temporary}/lgrpo-code-{os.urandom(8).hex()}"
        os.mkdir(self.home, 0o755)
        os.mkdir(f"{self.home}/tmp", 0o700)
        if self.user is not None:
            os.chown(f"{self.home}/tmp", self.user, self.user)


def can_change_user() -> bool:
    """Whether this is a root that can become somebody else."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(first <= NOBODY - 1000 and first + count >= NOBODY for first, _, count in ranges)


def stranger() -> int:
    """A user nobody is, and not the same for every program: the kernel counts processes by user."""
    return NOBODY - 1 - os.getpid() % 1000


class Run:
    """A program at work."""

    def __init__(self, request: dict[str, Any], place: Place) -> None:
        self.request = request
        self.place = place
        self.token = os.urandom(16).hex().encode()
        tests = request["tests"]
        self.stdin = memory_file(request["stdin"])
        self.tests = memory_file(b"" if tests is None else self.token + tests)
        self.life, self._life = (
            os.pipe()
        )  # open as long as the first process of the namespace lives; takes its troubles
        self.out, self._out = os.pipe()
        self.err, self._err = os.pipe()
        self.verdict, self._verdict = os.pipe()
        self.heard = {self.life: bytearray(), self.out: bytearray(), self.err: bytearray()}

    def result(self) -> dict[str, Any]:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        first = os.fork()
        if first == 0:
            self._in_child(self._be_first)
        for end in (self._life, self._out, self._err, self._verdict):
            os.close(end)
        try:
            ended = self._listen()
        finally:
            status = bury(first, self.place.has_namespace)
        self._drain()
        if trouble := self.heard[self.life]:
            raise Refused(trouble.decode())
        return {
            "ended": ended,
            "status": status,
            "passed": os.read(self.verdict, 64) == self.token,
            "stdout": bytes(self.heard[self.out]),
            "stderr": bytes(self.heard[self.err]),
        }

    def _listen(self) -> str:
        """Reads until the first process ends, the time is over or the output too long."""
        deadline = time.monotonic() + self.request["timeout"]
        waiting = select.poll()
        for stream in self.heard:
            waiting.register(stream, select.POLLIN)
        while True:
            ready = waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                return "timeout"
            for stream, _ in ready:
                data = os.read(stream, 2**16)
                self.heard[stream] += data
                if len(self.heard[stream]) > self.request["output"]:
                    return "output"
                if not data:
                    waiting.unregister(stream)
                    if stream == self.life:
                        return "exit"

    def _drain(self) -> None:
        """What was still in the pipes of those who are dead now."""
        for stream in self.heard:
            while len(self.heard[stream]) <= self.request["output"] and (data := os.read(stream, 2**16)):
                self.heard[stream] += data

    def _in_child(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            os.write(self._life, f"{error}"[:500].encode())
        finally:
            os._exit(125)

    def _be_first(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        write("/proc/self/oom_score_adj", "1000")  # where memory runs out, the trainer is not what is killed
        if self.place.home:
            write(f"{self.place.home}/program.py", self.request["program"])
        else:
            build_root(self.request)
        program = os.fork()
        if program == 0:
            self._in_child(self._be_program)
        while True:
            pid, status = os.wait()
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)

    def _be_program(self) -> None:
        os.setsid()  # so that a signal to its own group reaches nobody else
        os.chdir(f"{self.place.home}/tmp")
        for there, here in ((self.stdin, 0), (self._out, 1), (self._err, 2)):
            os.dup2(there, here)
        command = [*self.request["command"], f"{self.place.home}/program.py"]
        if self.request["tests"] is not None:
            tests, verdict = os.dup(self.tests), os.dup(self._verdict)  # out of the way of the numbers they shall have
            os.dup2(tests, TESTS)
            os.dup2(verdict, VERDICT)
            command = [*self.request["command"], "-c", HARNESS, f"{self.place.home}/program.py"]
        limit(self.request, self.place)
        give_up_rights(self.place.user)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if not os.access(f"{self.place.home}/program.py", os.R_OK):
            raise Refused(f"user {os.getuid()}, as whom programs run, cannot read {os.path.dirname(self.place.home)}")
        try:
            os.execve(command[0], command, self.request["environment"])
        except OSError as error:
            raise Refused(f"user {os.getuid()}, as whom programs run, cannot start {command[0]} ({error})") from error


def build_root(request: dict[str, Any]) -> None:
    """Changes to a root of its own: the system and Python to read, an empty ``/tmp`` in memory to write.

    The program is left in a chroot of it on purpose: from there the kernel makes no further user namespaces.
    """
    paths = SYSTEM + request["visible"] + (NETWORK if request["allow_network"] else [])
    shown = [(os.path.realpath(path), at) for path in paths for at in (path, os.path.realpath(path))]
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    size = len(request["program"]) + 2**20
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,size={size}")
    os.chdir("/tmp")
    for name in ("old", "new", "new/tmp", "new/dev"):
        os.mkdir(name, 0o755)
    check(libc.pivot_root(b".", b"old"), "pivot_root")
    os.chdir("/")
    mount("tmpfs", "/new/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0777,size={request['file_size']},nr_inodes=4096")
    for source, target in shown:  # into /tmp too, for a Python that lives there
        if os.path.exists(f"/old{source}") and not os.path.lexists(f"/new{target}"):
            show(f"/old{source}", f"/new{target}")
            set_attributes(f"/new{target}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, AT_RECURSIVE)
    for device in DEVICES:
        show(f"/old{device}", f"/new{device}")
    os.symlink("/tmp", "/new/dev/shm")
    write("/new/program.py", request["program"])
    check(libc.umount2(b"/old", MNT_DETACH), "umount /old")
    set_attributes("/", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0)
    os.chroot("/new")


def show(source: str, target: str) -> None:
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        write(target, "")
    mount(source, target, "", MS_BIND | MS_REC)


def remove(home: str) -> None:
    """Removes a directory, however deep a program has nested it and whatever it has forbidden.

    Each directory is moved to the top before it is emptied: no path grows too long, and no call too deep.
    """
    directories = [home]
    for directory in directories:  # grows on the way
        os.chmod(directory, 0o700)
        for entry in list(os.scandir(directory)):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                directories.append(f"{home}/{len(directories)}-{os.urandom(8).hex()}")
                os.rename(entry.path, directories[-1])
            else:
                os.unlink(entry.path)
    for directory in reversed(directories):
        os.rmdir(directory)


def limit(request: dict[str, Any], place: Place) -> None:
    """What a process of the program may take. Each process: only their number is limited for all together."""
    processes = request["processes"]
    if place.user is None:  # the kernel counts by user: there are the two of us, or else all that is ours
        processes += 2 if place.has_namespace else running_tasks()
    for name, value in (
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_CPU, request["cpu"]),
        (resource.RLIMIT_FSIZE, request["file_size"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(name)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(name, (value, value))


def running_tasks() -> int:
    """Threads of this user, in the whole system."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            ours = os.stat(f"/proc/{name}").st_uid == os.getuid()
            count += len(os.listdir(f"/proc/{name}/task")) if ours else 0
        except OSError:  # it ended meanwhile
            continue
    return count


def give_up_rights(user: int | None) -> None:
    for capability in range(64):  # the kernel knows fewer; and who may not drop them loses them with exec
        libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), *[ctypes.c_ulong(0)] * 3)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def bury(first: int, has_namespace: bool) -> int:
    """Kills what is left; the exit status of the first process."""
    os.kill(first, signal.SIGKILL)
    _, status = os.waitpid(first, 0)  # in a namespace of processes, nobody else is left when this returns
    while not has_namespace:
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    return os.waitstatus_to_exitcode(status)


def children() -> list[int]:
    """Processes that are ours, or became ours when their parents died."""
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


def write(path: str, content: str | bytes) -> None:
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    done = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(done, f"mount {target}")


def set_attributes(path: str, attributes: int, flags: int) -> None:
    class MountAttributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]

    wanted = MountAttributes(set=attributes)
    size = ctypes.c_size_t(ctypes.sizeof(wanted))
    call = ctypes.c_long(MOUNT_SETATTR)
    check(libc.syscall(call, -100, path.encode(), flags, ctypes.byref(wanted), size), f"mount_setattr {path}")


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    check(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), "prctl")


def check(returned: int, call: str) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


if __name__ == "__main__":
    main()

"""Linux system calls that confine a process: namespaces, root directory, resource limits, privileges.

Part of the sandbox (``sandbox.py``): it imports nothing but the standard library, and little of that.
Not here: a filter of system calls, a limit on the memory of all processes together (control groups).
"""

from __future__ import annotations

import ctypes
import os
import resource

TYPE_CHECKING = False  # importing typing takes as long as all other imports together
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
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime"]
NETWORK = ["/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/pki"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]

libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The system does not allow the requested confinement."""


class Confinement:
    """Namespaces, user and working directory of a program, as far as the request confines it.

    Creating one moves the calling process into the namespaces. ``close`` removes the working directory.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.user = unused_uid() if can_change_user() else None
        """User id the program runs as; None: that of this process."""
        self.has_pid_namespace = True
        """Whether the program runs in a PID namespace, where all processes end with the first one."""
        self.home = ""
        """Directory on disk with the program; empty if the program has its own root directory."""
        self._enter_namespaces(request)
        if request["allow_files"]:
            self._make_home(request["temporary"])

    def close(self) -> None:
        if self.home:
            remove_tree(self.home)

    def _enter_namespaces(self, request: dict[str, Any]) -> None:
        flags = NEWPID | NEWIPC
        flags |= 0 if request["allow_network"] else NEWNET
        flags |= 0 if request["allow_files"] else NEWNS
        user, group = os.geteuid(), os.getegid()
        if self.user is not None and libc.unshare(flags) == 0:
            return
        if libc.unshare(flags | NEWUSER) != 0:
            self.has_pid_namespace = False
            if flags & (NEWNET | NEWNS):
                raise Refused(f"it makes no namespaces ({os.strerror(ctypes.get_errno())})")
            return
        self.user = None
        try:
            write_file("/proc/self/setgroups", "deny")
            # Never map to root: then exec drops every capability.
            write_file("/proc/self/uid_map", f"{user or NOBODY} {user} 1")
            write_file("/proc/self/gid_map", f"{group or NOBODY} {group} 1")
        except OSError as error:
            raise Refused(f"it sets up no user namespace ({error.strerror})") from error

    def _make_home(self, temporary: str) -> None:
        self.home = f"{temporary}/lgrpo-code-{os.urandom(8).hex()}"
        os.mkdir(self.home, 0o755)
        os.mkdir(f"{self.home}/tmp", 0o700)
        if self.user is not None:
            os.chown(f"{self.home}/tmp", self.user, self.user)


def can_change_user() -> bool:
    """Return whether this process is root and may switch to the ids of ``unused_uid``."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map") as file:
        ranges = [[int(word) for word in line.split()] for line in file]
    return any(first <= NOBODY - 1000 and first + count >= NOBODY for first, _, count in ranges)


def unused_uid() -> int:
    """Return a user id without an account, different for concurrent programs: the kernel counts processes by user."""
    return NOBODY - 1 - os.getpid() % 1000


def build_root(request: dict[str, Any]) -> None:
    """Change to a new root directory: the system and Python read-only, an empty in-memory ``/tmp`` writable.

    The program stays in a chroot inside it on purpose: the kernel allows no user namespaces from a chroot.
    """
    paths = SYSTEM + request["visible"] + (NETWORK if request["allow_network"] else [])
    sources = [(os.path.realpath(path), target) for path in paths for target in (path, os.path.realpath(path))]
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    size = len(request["program"]) + 2**20
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,size={size}")
    os.chdir("/tmp")
    for name in ("old", "new", "new/tmp", "new/dev"):
        os.mkdir(name, 0o755)
    check(libc.pivot_root(b".", b"old"), "pivot_root")
    os.chdir("/")
    mount("tmpfs", "/new/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0777,size={request['file_size']},nr_inodes=4096")
    for source, target in sources:  # also below /tmp, in case Python is installed there
        if os.path.exists(f"/old{source}") and not os.path.lexists(f"/new{target}"):
            bind_mount(f"/old{source}", f"/new{target}")
            set_attributes(f"/new{target}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, AT_RECURSIVE)
    for device in DEVICES:
        bind_mount(f"/old{device}", f"/new{device}")
    os.symlink("/tmp", "/new/dev/shm")
    write_file("/new/program.py", request["program"])
    check(libc.umount2(b"/old", MNT_DETACH), "umount /old")
    set_attributes("/", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0)
    os.chroot("/new")


def remove_tree(home: str) -> None:
    """Remove a directory, regardless of its depth and of its permissions.

    Each directory is moved to the top level before it is emptied, so that no path grows too long.
    """
    directories = [home]
    for directory in directories:  # grows during the loop
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


def set_limits(request: dict[str, Any], confinement: Confinement) -> None:
    """Limit the resources of each process of the program; only the number of processes is a common limit."""
    processes = request["processes"]
    if confinement.user is None:  # the kernel counts by user: two processes of the sandbox, or all of this user
        processes += 2 if confinement.has_pid_namespace else running_tasks()
    for name, value in (
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_CPU, request["cpu"]),
        (resource.RLIMIT_FSIZE, request["file_size"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard_limit = resource.getrlimit(name)[1]
        value = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        resource.setrlimit(name, (value, value))


def running_tasks() -> int:
    """Return the number of threads of this user in the whole system."""
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            is_ours = os.stat(f"/proc/{name}").st_uid == os.getuid()
            count += len(os.listdir(f"/proc/{name}/task")) if is_ours else 0
        except OSError:  # it has ended
            continue
    return count


def drop_privileges(user: int | None) -> None:
    """Drop all capabilities and, if ``user`` is given, switch to that user id."""
    for capability in range(64):  # more than the kernel has; exec drops them if this process may not
        libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), *[ctypes.c_ulong(0)] * 3)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def write_file(path: str, content: str | bytes) -> None:
    with open(path, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def bind_mount(source: str, target: str) -> None:
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source):
        write_file(target, "")
    mount(source, target, "", MS_BIND | MS_REC)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    status = libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    check(status, f"mount {target}")


def set_attributes(path: str, attributes: int, flags: int) -> None:
    """Set the attributes of a mount; the C library has no function for this system call."""

    class MountAttributes(ctypes.Structure):
        _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]

    argument = MountAttributes(set=attributes)
    size = ctypes.c_size_t(ctypes.sizeof(argument))
    call = ctypes.c_long(MOUNT_SETATTR)
    check(libc.syscall(call, -100, path.encode(), flags, ctypes.byref(argument), size), f"mount_setattr {path}")


def prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    check(libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), "prctl")


def check(status: int, call: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")

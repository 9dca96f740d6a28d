"""Runs beside the evaluation: a clean interpreter that executes each check in namespaces of its own.

Started by `sandbox` as a script, so that it imports nothing of the product: no torch, little memory to inherit. It reads one
JSON request a line ({"function", "arguments", "limit_s", "memory_bytes"}), forks, and answers with one line: {"value"};
{"error": "timeout", "memory" or "died"}, which the check brought upon itself; or {"fault"}, which is ours.

The forked child becomes an unprivileged user in its own user, pid, mount, network and IPC namespaces whose files are the
interpreter's and the system's, read-only, and an empty /tmp; it holds no capability. The check's own process is process 1
there, which nothing inside can end, and only it can write the answer.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

_NEW_USER, _NEW_PID, _NEW_NET, _NEW_NS, _NEW_IPC, _NEW_UTS = (
    0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000, 0x04000000,
)
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)
_KEPT_FLAGS = {  # statvfs's -> mount's; the last three are noatime, nodiratime, relatime
    1: _MS_RDONLY, 2: _MS_NOSUID, 4: _MS_NODEV, 8: _MS_NOEXEC, 1024: 1024, 2048: 2048, 4096: 1 << 21,
}
_PR_DEATHSIG, _PR_DUMPABLE, _PR_BOUNDING_DROP, _PR_NO_NEW_PRIVS = 1, 4, 24, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SET_SECCOMP, _FILTER_MODE = 22, 2
# What a check's processes may not call: signals to others, their memory, more namespaces and mounts.
_FORBIDDEN = {
    "x86_64": (62, 200, 234, 101, 310, 311, 165, 166, 272, 308, 321, 155, 161, *range(424, 434), 442),
    "aarch64": (129, 130, 131, 117, 270, 271, 40, 39, 97, 268, 280, 41, 51, *range(424, 434), 442),
}  # kill, tkill, tgkill, ptrace, process_vm_readv and writev, mount, umount2, unshare, setns, bpf, pivot_root, chroot;
#    pidfd_send_signal, io_uring's three, the newer mount calls
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NOBODY, _INSIDE = 65534, 1000
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_TMP_BYTES, _FILE_BYTES, _MAX_PROCESSES, _ANSWER_BYTES = 128 << 20, 64 << 20, 64, 64 << 20
_POLL_S = 0.1
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Answer requests until stdin ends; argv: "isolated" or "bare", the module with the functions, more to import."""
    _libc.prctl(_PR_DEATHSIG, signal.SIGKILL)  # nothing goes on when the evaluation has gone
    isolated = sys.argv[1] == "isolated"
    functions, *_ = [importlib.import_module(name) for name in sys.argv[2:]]
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # a library's greeting is no answer
    for line in requests:
        request = json.loads(line)
        print(json.dumps(_supervise(functions, request, isolated)), file=answers, flush=True)


def _supervise(functions: Any, request: dict[str, Any], isolated: bool) -> dict[str, Any]:
    """Fork the check and read its answer; whatever it started is ended with it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _be_child(functions, request, isolated, write)  # does not return
    os.close(write)
    deadline, limit_bytes = time.monotonic() + request["limit_s"], request["memory_bytes"]
    parts: list[bytes] = []
    error = None
    while True:
        ready, _, _ = select.select([read], [], [], _POLL_S)
        if ready:
            part = os.read(read, 1 << 16)
            if not part:
                break
            parts.append(part)
            if sum(map(len, parts)) > _ANSWER_BYTES:
                error = "the answer is too long"
        if time.monotonic() > deadline:
            error = "timeout"
        elif _resident_bytes(child) > limit_bytes:
            error = "memory"
        if error:
            break
    os.close(read)
    _end(child)
    if error:
        return {"error": error}
    try:
        return json.loads(b"".join(parts))
    except ValueError:
        return {"error": "died"}


def _resident_bytes(pid: int) -> int:
    """Memory of a process and all below it; in its pid namespace orphans stay below."""
    total = 0
    waiting = [pid]
    while waiting:
        number = waiting.pop()
        try:
            with open(f"/proc/{number}/statm") as file:
                total += int(file.read().split()[1]) * _PAGE_BYTES
            for thread in os.listdir(f"/proc/{number}/task"):
                with open(f"/proc/{number}/task/{thread}/children") as file:
                    waiting += map(int, file.read().split())
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    return total


def _end(child: int) -> None:
    """Kill the child and all below it; the end of a namespace's process 1 ends everything in it."""
    try:
        below = psutil.Process(child).children(recursive=True)
    except psutil.Error:
        below = []
    for process in below:
        try:
            process.kill()
        except psutil.Error:
            continue
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    psutil.wait_procs(below, timeout=10)


def _be_child(functions: Any, request: dict[str, Any], isolated: bool, answer: int) -> None:
    try:
        _close_all_but(answer)
        max_processes = _num_threads_of_user() + _MAX_PROCESSES
        if isolated:
            _enter_namespaces(answer)
        else:
            _libc.prctl(_PR_DEATHSIG, signal.SIGKILL)
        _limit_resources(request["memory_bytes"], max_processes)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would let the others interrupt process 1
        os.register_at_fork(after_in_child=lambda: _become_untrusted(answer))
        reply = {"value": getattr(functions, request["function"])(**request["arguments"])}
    except BaseException as error:
        reply = {"fault": f"{type(error).__name__}: {error}"[:1000]}
    data = json.dumps(reply).encode()
    while data:
        data = data[os.write(answer, data) :]
    os._exit(0)


def _become_untrusted(answer: int) -> None:
    """In each process that a check starts, before it runs anything: no way to the answer, and no forbidden system call."""
    os.close(answer)
    _libc.prctl(_PR_NO_NEW_PRIVS, 1, 0, 0, 0)
    arch, forbidden = _AUDIT_ARCH.get(os.uname().machine), _FORBIDDEN.get(os.uname().machine, ())
    if arch is None:
        return
    load, equal, at_least, answer_with = 0x20, 0x15, 0x35, 0x06  # of classic BPF: a word of the call, jumps, return
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer_with, 0, 0, kill), (load, 0, 0, 0)]
    program.append((at_least, len(forbidden) + 1, 0, 0x40000000))  # x32's numbers for the same calls
    for i, number in enumerate(forbidden):
        program.append((equal, len(forbidden) - i, 0, number))
    program += [(answer_with, 0, 0, allow), (answer_with, 0, 0, refuse)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    _libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.create_string_buffer(header, len(header)), 0, 0)


def _close_all_but(keep: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.closerange(3, keep)
    os.closerange(keep + 1, 4096)


def _enter_namespaces(answer: int) -> None:
    """Return as process 1 of new namespaces, without privileges; the calling process waits for it and leaves."""
    as_root = os.getuid() == 0
    if as_root:
        os.setgroups([])
        map_users = _start_mapper()  # only a process outside may give the new namespace a second user
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _NEW_USER | _NEW_PID | _NEW_NET | _NEW_NS | _NEW_IPC | _NEW_UTS)
    if as_root:
        map_users()
    else:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"{_INSIDE} {gid} 1")
        _write("/proc/self/uid_map", f"{_INSIDE} {uid} 1")
    _libc.prctl(_PR_DEATHSIG, signal.SIGKILL)
    first = os.fork()
    if first:
        os.close(answer)
        os.waitpid(first, 0)
        os._exit(0)
    try:
        _write("/proc/sys/user/max_user_namespaces", "0")  # of those within this one
    except OSError:
        pass
    _build_root()
    for capability in range(64):
        _libc.prctl(_PR_BOUNDING_DROP, capability)  # EINVAL beyond the kernel's last
    if as_root:  # limits on processes do not bind root
        os.setresgid(_INSIDE, _INSIDE, _INSIDE)
        os.setresuid(_INSIDE, _INSIDE, _INSIDE)
    _call("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    _libc.prctl(_PR_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_DUMPABLE, 0)  # the others may not look into process 1
    _libc.prctl(_PR_DEATHSIG, signal.SIGKILL)


def _start_mapper() -> Callable[[], None]:
    """A helper that maps root, for the mounts, and nobody, for the check, into the caller's coming user namespace."""
    caller, (read, write) = os.getpid(), os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(write)
        os.read(read, 1)
        for kind in ("gid", "uid"):
            _write(f"/proc/{caller}/{kind}_map", f"0 0 1\n{_INSIDE} {_NOBODY} 1\n")
        os._exit(0)
    os.close(read)

    def map_users() -> None:
        os.close(write)
        _, status = os.waitpid(helper, 0)
        if status:
            raise OSError("root may not map users into a namespace here")

    return map_users


def _visible_folders() -> list[str]:
    """Folders that the interpreter and its packages need, none inside another."""
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    python = [sys.prefix, sys.base_prefix, *sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    found = sorted({os.path.abspath(path) for path in (*_SYSTEM, *python) if path and os.path.isdir(path)})
    home = os.path.expanduser("~")
    # Packages may stand anywhere, as a .pth file or PYTHONPATH has it; but never the whole home, nor our own checkout.
    found = [p for p in found if not f"{home}/".startswith(f"{p.rstrip('/')}/") and p != checkout]
    found = [p for p in found if not p.startswith(f"{checkout}/cluster_ds")]
    return [path for path in found if not any(path.startswith(other + "/") for other in found)]


def _build_root() -> None:
    """A file system of the visible folders, read-only, four devices, an empty /tmp, /proc where the kernel lets us."""
    root = "/tmp"  # of this mount namespace alone
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH) for path in (*_visible_folders(), *_DEVICES)}  # before /tmp is covered
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    writable = (f"{root}/tmp", f"{root}/dev/shm")  # multiprocessing keeps its locks in the second
    for folder in writable:
        os.makedirs(folder)
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={_TMP_BYTES},nr_inodes=10000,mode=1777")
    for path, descriptor in sources.items():
        if path in _DEVICES:
            os.close(os.open(root + path, os.O_CREAT | os.O_WRONLY))
        else:
            os.makedirs(root + path, exist_ok=True)
        _mount(f"/proc/self/fd/{descriptor}", root + path, None, _MS_BIND | _MS_REC)
        os.close(descriptor)
    os.makedirs(f"{root}/proc", exist_ok=True)
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split()[4] for line in file]
    try:
        _mount("proc", f"{root}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except OSError:  # in a container whose own /proc is partly hidden; an empty folder serves
        pass
    for mount in mounts:
        if mount.startswith(root + "/") and mount not in writable:
            _make_read_only(mount)
    os.makedirs(f"{root}/old", exist_ok=True)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"no sandbox on {os.uname().machine} yet")
    _call("syscall", number, root.encode(), f"{root}/old".encode())
    os.chdir("/")
    _call("umount2", b"/old", 2)  # MNT_DETACH
    os.rmdir("/old")
    _make_read_only("/")
    os.mkdir("/tmp/home")
    os.chmod("/tmp/home", 0o777)
    os.chdir("/tmp/home")
    os.environ["HOME"] = "/tmp/home"


def _make_read_only(mount: str) -> None:
    kept = sum(ms for st, ms in _KEPT_FLAGS.items() if os.statvfs(mount).f_flag & st)  # a user may not take flags away
    try:
        _mount("none", mount, None, kept | _MS_REMOUNT | _MS_BIND | _MS_RDONLY)
    except OSError:
        if os.access(mount, os.W_OK):
            raise


def _limit_resources(memory_bytes: int, max_processes: int) -> None:
    _lower(resource.RLIMIT_NPROC, max_processes)
    _lower(resource.RLIMIT_AS, memory_bytes)
    _lower(resource.RLIMIT_FSIZE, _FILE_BYTES)
    _lower(resource.RLIMIT_NOFILE, 256)
    _lower(resource.RLIMIT_CORE, 0)


def _num_threads_of_user() -> int:
    """Kernels before 5.14 count a user's processes over the whole machine, later ones inside the user namespace alone."""
    uid = os.getuid() or _NOBODY
    mine = (p for p in psutil.process_iter(["uids", "num_threads"]) if p.info["uids"] and p.info["uids"].real == uid)
    return sum(process.info["num_threads"] or 0 for process in mine)


def _lower(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [text.encode() if text is not None else None for text in (source, target, kind)]
    _call("mount", *arguments, ctypes.c_ulong(flags), data.encode() if data else None)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        words = " ".join(a.decode() for a in arguments if isinstance(a, bytes))
        raise OSError(number, f"{name} {words}: {os.strerror(number)}")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()

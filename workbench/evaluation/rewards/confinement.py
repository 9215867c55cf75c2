"""Confinement of untrusted code: this file runs as its own program, drops its rights, and then runs the code.

It needs no administrator rights: Landlock restricts the visible files, a seccomp filter the system calls, and resource
limits the processor time and memory. The filter lets only calls pass that computing needs: no sockets, no programs, no
processes, no signals to others, no file permissions. The file imports nothing but the standard library, and runs
without site-packages.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Iterator
from typing import Any

Instruction = tuple[int, int, int, int]
"""An instruction of a filter: code, instructions to skip if a comparison is true, and if it is false, a number."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the index of its number in a pair of call numbers, and its identifier in a filter."""
# Numbers of system calls on x86_64 and aarch64; -1: there is none.
_COMPUTING = (
    *((0, 63), (1, 64), (3, 57), (4, -1), (5, 80), (6, -1), (262, 79), (332, 291), (8, 62)),  # read ... statx, lseek
    *((9, 222), (10, 226), (11, 215), (12, 214), (25, 216), (28, 233)),  # memory of its own
    *((13, 134), (14, 135), (15, 139), (131, 132)),  # its signals
    *((17, 67), (18, 68), (19, 65), (20, 66), (21, -1), (269, 48), (439, 439)),  # pread64 ... access
    *((22, -1), (293, 59), (23, -1), (270, 72), (7, -1), (271, 73), (24, 124)),  # pipes, select, poll, sched_yield
    *((32, 23), (33, -1), (292, 24)),  # dup
    *((35, 101), (230, 115), (36, 102), (38, 103), (37, -1)),  # sleep and timers
    *((39, 172), (186, 178), (110, 173), (60, 93), (231, 94), (61, 260), (63, 160)),  # getpid ... exit, wait4, uname
    *((74, 82), (75, 83), (77, 46), (217, 61), (79, 17), (80, 49), (81, 50)),  # fsync, ftruncate, folders
    *((82, -1), (264, 38), (316, 276), (83, -1), (258, 34), (84, -1), (87, -1), (263, 35)),  # rename, mkdir, unlink
    *((88, -1), (266, 36), (89, -1), (267, 78), (95, 166)),  # symbolic links, umask
    *((96, 169), (97, 163), (98, 165), (99, 179), (100, 153), (102, 174), (107, 175), (104, 176), (108, 177)),
    *((111, -1), (121, 155), (124, 156), (137, 43), (138, 44), (158, -1)),  # groups, statfs, arch_prctl
    *((202, 98), (204, 123), (273, 99), (334, 293), (218, 96), (324, 283)),  # threads
    *((291, 20), (233, 21), (232, -1), (281, 22), (290, 19)),  # epoll, eventfd
    *((318, 278), (228, 113), (229, 114), (201, -1), (436, 436), (219, 128)),  # getrandom, clocks, close_range
)
_OPEN, _OPENAT, _CLONE, _TGKILL, _KILL = (2, -1), (257, 56), (56, 220), (234, 131), (62, 129)
_PRLIMIT, _IOCTL, _FCNTL, _PRCTL = (302, 261), (16, 29), (72, 25), (157, 167)
_UNKNOWN = ((435, 435), (437, 437))
"""clone3, openat2: a filter cannot see their flags, which are in memory; libraries fall back to the older calls."""
_TERMINAL = (0x5401, 0x5413, 0x5450, 0x5451)
"""Requests of ioctl: is a file a terminal, how wide is it, and does execve close it."""
_DESCRIPTORS = (0, 1, 2, 3, 4, 1030)  # harmless commands of fcntl; F_SETOWN would send signals to others
_PR_SET_NAME = 15
_EPERM, _ENOTTY, _ENOSYS = 1, 25, 38
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
_CLONE_THREAD, _O_TRUNC_AND_MODE = 0x10000, 0x203
_EMPTYING = (0x200, 0x203)  # O_TRUNC with reading, and with the mode 3, which neither reads nor writes

_RIGHTS = (13, 14, 15, 15, 16)  # number of file rights in Landlock's versions 1, 2, 3, 4, and from 5 on
_REFER, _NEEDS_FOLDER = 1 << 13, 0b1_1111_1111_1000 | 1 << 13
_READ_FILE, _READ_FOLDER, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 3, 1 << 1, 1 << 14
_CHANGES = 1 << 5 | 1 << 8 | 1 << 12
"""Rights to remove files, and to make files and symbolic links. Not folders: thousands of nested ones can neither be
measured nor deleted, and an unlistable one hides its content."""


def main() -> None:
    """Run the code that comes over the first descriptor, then tests as they come, and answer over the second.

    A test comes when what came before has run, and so does the word that its result is told with: neither can be read
    before. From then on this uses what stands in its own frame alone, because the code may replace any name elsewhere.
    """
    asks, tells = int(sys.argv[1]), int(sys.argv[2])
    pipe = os.fdopen(asks, "rb", buffering=0)
    wanted: dict[str, Any] = json.loads(pipe.readline())
    try:
        confine(os.getcwd(), seconds=wanted["seconds"], memory=wanted["memory"], output=wanted["output"])
    except (OSError, ValueError) as error:  # ValueError: a limit of this machine is lower
        os.write(tells, b"refused " + str(error).encode() + b"\n")
        os._exit(3)
    execute, build, write, leave, read, size = exec, compile, os.write, os._exit, pipe.readline, len
    threads, trace, profile, anything, text = sys._current_frames, sys.settrace, sys.setprofile, BaseException, bytes
    names: dict[str, Any] = {"__name__": "answer"}
    write(tells, b"confined\n")
    try:  # noqa: SIM105 - the code may replace what suppresses
        execute(build(wanted["code"], "<answer>", "exec"), names)
    except anything:  # whatever it raises, the tests tell what it is worth
        pass
    write(tells, b"ran\n")
    while test := read():
        passed = False
        try:
            execute(build(text.fromhex(test.decode()), "<answer>", "exec"), names)
            passed = True
        except anything:
            pass
        trace(None)
        profile(None)
        if size(threads()) > 1:  # one that is left could read the word
            leave(4)
        write(tells, b"ran\n")
        write(tells, read().strip() + (b" passed\n" if passed else b" failed\n"))
    leave(0)


def confine(folder: str, *, seconds: int, memory: int, output: int) -> None:
    """Drop all rights that computing does not need, for good; files may be written in `folder` alone. Raises OSError:
    the machine cannot confine this process; nothing untrusted may run; ValueError: a limit is above what the machine
    allows.

    Args:
        seconds: Processor time.
        memory: Bytes of address space.
        output: Bytes of a file.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
        raise OSError(f"{sys.platform} on {platform.machine()} has no filter here, Linux on x86_64 and aarch64 has")
    number, architecture = _ARCHITECTURES[platform.machine()]
    parent = os.getppid()
    _called("prctl PR_SET_PDEATHSIG", libc.prctl(1, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        raise ProcessLookupError("the process that started this has ended")
    for name, limit in {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: output,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }.items():
        hard = limit + 1 if name == resource.RLIMIT_CPU else limit  # SIGKILL a second after SIGXCPU, which is caught
        resource.setrlimit(name, (limit, hard))
    _called("prctl PR_SET_NO_NEW_PRIVS", libc.prctl(38, 1, 0, 0, 0))
    # Landlock: Python and shared libraries may be read, and `folder` written.
    version = _called("landlock_create_ruleset", libc.syscall(444, None, ctypes.c_size_t(0), 1))
    handled = (1 << _RIGHTS[min(version, len(_RIGHTS)) - 1]) - 1
    attributes = ctypes.create_string_buffer(struct.pack("=Q", handled), 8)
    rules = _called("landlock_create_ruleset", libc.syscall(444, attributes, ctypes.c_size_t(8), 0))
    library = os.path.dirname(os.__file__)
    folders = (library, f"{sys.base_prefix}/lib", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo")
    files = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/null")
    rights_by_path = {os.path.realpath(path): _READ_FILE | _READ_FOLDER for path in (*folders, *files)}
    rights_by_path["/dev/null"] |= _WRITE_FILE | _TRUNCATE
    rights_by_path[folder] = _READ_FILE | _READ_FOLDER | _WRITE_FILE | _TRUNCATE | _CHANGES
    for path, rights in rights_by_path.items():
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # missing or unreadable: it stays hidden
        rights &= handled if os.path.isdir(path) else handled & ~_NEEDS_FOLDER
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor), 12)
        _called("landlock_add_rule", libc.syscall(445, rules, 1, rule, 0))
        os.close(descriptor)
    _called("landlock_restrict_self", libc.syscall(446, rules, 0))
    os.close(rules)
    program = list(instructions(number, architecture, own=os.getpid()))
    packed = b"".join(struct.pack("=HBBI", *each) for each in program)
    code = ctypes.create_string_buffer(packed, len(packed))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    _called("prctl PR_SET_SECCOMP", libc.prctl(22, 2, header, 0, 0))


def instructions(number: int, architecture: int, *, own: int) -> Iterator[Instruction]:
    """The filter of system calls.

    Args:
        number: Index of the machine in pairs of call numbers.
        architecture: The machine's identifier in a filter.
        own: Id of this process, which may signal itself.
    """
    deny = (_RETURN, 0, 0, _ERRNO | _EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    emptying = [each for mode in _EMPTYING for each in ((_EQUAL, 0, 1, mode), deny)]
    yield from ((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL_PROCESS), (_LOAD, 0, 0, 0))
    special: list[tuple[tuple[int, int], Iterable[Instruction]]] = [(call, (allow,)) for call in _COMPUTING]
    special += [(call, ((_RETURN, 0, 0, _ERRNO | _ENOSYS),)) for call in _UNKNOWN]
    special += [
        (_CLONE, (_argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), allow, deny)),
        # O_TRUNC empties a file that is not opened for writing, which the first versions of Landlock do not stop.
        (_OPEN, (_argument(1), (_AND, 0, 0, _O_TRUNC_AND_MODE), *emptying, allow)),
        (_OPENAT, (_argument(2), (_AND, 0, 0, _O_TRUNC_AND_MODE), *emptying, allow)),
        (_TGKILL, _one_of(0, (own,), _EPERM)),
        (_KILL, _one_of(0, (own,), _EPERM)),
        (_IOCTL, _one_of(1, _TERMINAL, _ENOTTY)),
        (_FCNTL, _one_of(1, _DESCRIPTORS, _EPERM)),
        (_PRCTL, _one_of(0, (_PR_SET_NAME,), _EPERM)),
        # Limits may be read but not set.
        (_PRLIMIT, (_argument(2), (_EQUAL, 0, 3, 0), _argument(2, 4), (_EQUAL, 0, 1, 0), allow, deny)),
    ]
    for call, then in special:
        if call[number] >= 0:
            block = tuple(then)
            yield (_EQUAL, 0, len(block), call[number])
            yield from block
    yield deny


def _argument(number: int, half: int = 0) -> Instruction:
    """Load the lower half of an argument; the upper half with `half=4`."""
    return (_LOAD, 0, 0, 16 + 8 * number + half)


def _one_of(argument: int, values: Iterable[int], error: int) -> Iterator[Instruction]:
    yield _argument(argument)
    for value in values:
        yield from ((_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW))
    yield (_RETURN, 0, 0, _ERRNO | error)


def _called(name: str, result: int) -> int:
    """The result of a system call; raises OSError with its name where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    main()

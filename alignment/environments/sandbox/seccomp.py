"""A seccomp filter: system calls that a snippet of Python has no use for, and that attacks on a kernel begin with.

It also forbids new processes (threads are allowed), which ends fork bombs where RLIMIT_NPROC does not hold: for root.
The rules are those of classic BPF, as bubblewrap's `--seccomp` takes them; see seccomp(2).
"""

import platform
import struct

from alignment.environments.errors import InfrastructureFailure

LOAD, JUMP_EQUAL, JUMP_GREATER_OR_EQUAL, JUMP_IF_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little endian
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x00010000
X32_CALLS = 0x40000000  # x86-64's second table of calls
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE3 = 435

# Name → number on x86-64 and on ARM64; None where it does not exist.
FORBIDDEN: dict[str, tuple[int, int | None]] = {
    "socket": (41, 198),
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount": (165, 40),
    "umount2": (166, 39),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "finit_module": (313, 273),
    "memfd_create": (319, 279),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "memfd_secret": (447, 447),
}
CLONE = (56, 220)


def build_filter(machine: str | None = None) -> bytes:
    """Return the filter for a machine, by default this one. Raises InfrastructureFailure for other architectures."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCHITECTURES:
        raise InfrastructureFailure(f"the sandbox has no seccomp filter for {machine}, only for x86_64 and aarch64")
    column = list(AUDIT_ARCHITECTURES).index(machine)
    instructions = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(JUMP_EQUAL, AUDIT_ARCHITECTURES[machine], then=1),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        instructions += _refuse_if(JUMP_GREATER_OR_EQUAL, X32_CALLS, EPERM)
    for numbers in FORBIDDEN.values():
        if (number := numbers[column]) is not None:
            instructions += _refuse_if(JUMP_EQUAL, number, EPERM)
    # Its flags are behind a pointer, which a filter cannot follow. The C library then uses clone.
    instructions += _refuse_if(JUMP_EQUAL, CLONE3, ENOSYS)
    instructions += [
        _instruction(JUMP_EQUAL, CLONE[column], otherwise=3),
        _instruction(LOAD, FIRST_ARGUMENT),
        _instruction(JUMP_IF_BIT, CLONE_THREAD, then=1),
        _instruction(RETURN, ERRNO | EPERM),
        _instruction(RETURN, ALLOW),
    ]
    return b"".join(instructions)


def _refuse_if(jump: int, value: int, errno: int) -> list[bytes]:
    return [_instruction(jump, value, otherwise=1), _instruction(RETURN, ERRNO | errno)]


def _instruction(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Return a struct sock_filter. The jumps skip as many instructions."""
    return struct.pack("HBBI", code, then, otherwise, value)

"""Programs that try to leave a sandbox. Each prints ESCAPED if it succeeds, as it does in a bare process."""

from dataclasses import dataclass

FORK = """
import os
if (pid := {fork}) == 0:
    os._exit(0)
if pid > 0:
    os.waitpid(pid, 0)
    print("ESCAPED")
"""
READ = """
with open({path}, "rb") as file:
    print("ESCAPED" if {wanted} in file.read() else "")
"""
CALL = """
import ctypes
libc = ctypes.CDLL(None)
print("ESCAPED" if {call} >= 0 else "")
"""


def read(path: str, wanted: str = "b''") -> str:
    return READ.format(path=path, wanted=wanted)


@dataclass(frozen=True)
class Host:
    """What there is on the host to reach. `marker` is a file that does not exist yet."""

    secret: str
    marker: str
    port: int
    pid: int
    repository: str
    packages: str


# In the programs, HOST is a Host.
ATTEMPTS: dict[str, str] = {
    "read a file of the system": read("'/etc/passwd'", "b'root:'"),
    "read a file of the host": read("HOST.secret", "b'the secret'"),
    "read the service's source": read("HOST.repository + '/pyproject.toml'", "b'attune-server'"),
    "read upwards": read("'../' * 30 + HOST.secret.lstrip('/')", "b'the secret'"),
    "read through a symbolic link": "import os\nos.symlink(HOST.secret, 'link')" + read("'link'", "b'the secret'"),
    "read through a hard link": "import os\nos.link(HOST.secret, HOST.marker)" + read("HOST.marker", "b'the secret'"),
    "read through the root of a process": read("f'/proc/{HOST.pid}/root{HOST.secret}'", "b'the secret'"),
    "read through an own root": read("f'/proc/self/root{HOST.secret}'", "b'the secret'"),
    "read the environment of the parent": read("f'/proc/{HOST.pid}/environ'", "b'='"),
    "read the command of the parent": read("f'/proc/{HOST.pid}/cmdline'", "b'python'"),
    "read the maps of memory": read("f'/proc/{HOST.pid}/maps'", "b'python'"),
    "find other processes": """
import os
others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
print("ESCAPED" if others else "")
""",
    "list the packages of the service": """
import os
print("ESCAPED" if os.listdir(HOST.packages) else "")
""",
    "write a file of the host": """
with open(HOST.marker, "w") as file:
    file.write("x")
print("ESCAPED")
""",
    "write to shared memory": """
import os
with open("/dev/shm/attune-escape", "w") as file:
    file.write("x")
os.unlink("/dev/shm/attune-escape")
print("ESCAPED")
""",
    "delete a file of the host": """
import os
os.unlink(HOST.secret)
print("ESCAPED")
""",
    "connect to a port of the host": """
import socket
socket.create_connection(("127.0.0.1", HOST.port), 2).close()
print("ESCAPED")
""",
    "fetch a page": """
import urllib.request
try:
    urllib.request.urlopen(f"http://127.0.0.1:{HOST.port}", timeout=1)
except TimeoutError:
    print("ESCAPED")  # it was connected
""",
    "listen": """
import socket
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    print("ESCAPED")
""",
    "open a Unix socket": """
import socket
socket.socket(socket.AF_UNIX).close()
print("ESCAPED")
""",
    "signal a process of the host": "import os\nos.kill(HOST.pid, 0)\nprint('ESCAPED')",
    "start a process": FORK.format(fork="os.fork()"),
    "start a process by a system call": f"import ctypes, os\n{FORK.format(fork='ctypes.CDLL(None).fork()')}",
    "start a program": """
import subprocess, sys
subprocess.run([sys.executable, "-c", "print('ESCAPED')"], check=True)
""",
    "start a shell": "import os\nos.system('echo ESCAPED')",
    "take memory": "data = bytearray(300 << 20)\nprint('ESCAPED' if len(data) else '')",
    "take memory in a file": """
import os
fd = os.memfd_create("x")
print("ESCAPED" if os.write(fd, b"x") else "")
""",
    "write a large file": """
with open("large", "wb") as file:
    for _ in range(6):
        file.write(bytes(1 << 20))
print("ESCAPED")
""",
    "write many files": """
for number in range(12):
    with open(f"part-{number}", "wb") as file:
        file.write(bytes(1 << 20))
print("ESCAPED")
""",
    "raise a limit": """
import resource
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("ESCAPED")
""",
    "enter a user namespace": CALL.format(call="libc.unshare(0x10000000)"),
    "trace": CALL.format(call="libc.ptrace(0, 0, 0, 0)"),
    "change the root": """
import os
os.chroot(".")
print("ESCAPED")
""",
}


def program(name: str, host: Host) -> str:
    """Return the program of an attempt. Monty has no `class` with defaults, so the host is written as plain values."""
    code = ATTEMPTS[name]
    for attribute in ("secret", "marker", "port", "pid", "repository", "packages"):
        code = code.replace(f"{{HOST.{attribute}}}", str(getattr(host, attribute)))
        code = code.replace(f"HOST.{attribute}", repr(getattr(host, attribute)))
    return code

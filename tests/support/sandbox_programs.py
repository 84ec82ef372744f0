"""Programs that try to leave the sandbox, to stall the judge,
or to get a reward without an answer.
"""

from dataclasses import dataclass, field
from typing import Any

SECRET = "the host's own text"
STDIN = {"inputs": ["1\n"], "outputs": ["no program prints this\n"], "fn_name": None}
CALL = {"inputs": [[1]], "outputs": [["no program returns this"]], "fn_name": "f"}


@dataclass(frozen=True)
class Attack:
    """`FOLDER`, `PORT` and `PARENT` in the code are a folder, a listening server and a process of
    the host.
    """

    code: str
    tests: dict[str, Any] = field(default_factory=lambda: STDIN)
    reward: float = 0.0


def escapes(code: str) -> Attack:
    """A program whose test passes only if the attempt `code` leaves `ok` false."""
    return Attack(
        f"ok = False\ntry:\n    {code}\nexcept BaseException:\n    pass\nprint('held' "
        "if not ok else 'ESCAPED')",
        {"inputs": [""], "outputs": ["held"]},
        1.0,
    )


PROGRAMS: dict[str, Attack] = {
    # --------------------------------------------------------------------------------------------
    # stalling the judge
    "fork_bomb": Attack(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    ),
    "thread_bomb": Attack(
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
        "args=(99,)).start()"
    ),
    "sleep": Attack("import time\ntime.sleep(10**6)"),
    "spin": Attack("while True: pass"),
    "deaf": Attack(
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except Exception: pass\nwhile True:\n    try: time.sleep(99)\n    except "
        "BaseException: pass"
    ),
    "daemon": Attack(
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n"
        "    os.closerange(0, 64)\n    time.sleep(999)\nprint('done')"
    ),
    "keeps_pipe": Attack("import os, time\nif os.fork() == 0: time.sleep(999)\nprint('done')"),
    "stops_itself": Attack("import os\nos.kill(os.getpid(), 19)"),
    "stops_all": Attack("import os\nos.kill(-1, 19)"),
    "kills_all": Attack("import os\nos.kill(-1, 9)"),
    "kills_runner": Attack("import os\nos.kill(os.getppid(), 9)"),
    "stops_runner": Attack("import os\nos.kill(os.getppid(), 19)\nprint('x')"),
    "output_flood": Attack("while True: print('x' * 10**6)"),
    "error_flood": Attack("import sys\nwhile True: sys.stderr.write('x' * 10**6)"),
    "escaped_flood": Attack(
        "import sys\nwhile True: sys.stdout.buffer.write(bytes(range(256)) * 4096)"
    ),
    "memory": Attack("x = []\nwhile True: x.append(bytearray(10**7))"),
    "memory_of_forks": Attack(
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0: break\nx = bytearray(3 * "
        "10**8)\ntime.sleep(99)"
    ),
    "fills_tmp": Attack("for n in range(10**6):\n    open(f'/tmp/{n}', 'wb').write(b'x' * 10**7)"),
    "compile_bomb": Attack("x = " + "(" * 5000 + "1" + ")" * 5000),
    "huge_power": Attack("print(9 ** 9 ** 9)"),
    "deep_recursion": Attack("def f(n): return f(n + 1) + 1\nprint(f(0))"),
    "segfault": Attack("import ctypes\nctypes.string_at(0)"),
    "regex_bomb": Attack("import re\nre.match('(a+)+$', 'a' * 64 + 'b')"),
    # ----------------------------------------------------------------------------------------------
    # leaving the sandbox
    "network": escapes(
        "import socket; socket.create_connection(('127.0.0.1', PORT), 1); ok = True"
    ),
    "name_lookup": escapes("import socket; socket.getaddrinfo('example.org', 80); ok = True"),
    "reads_host_file": escapes("open('FOLDER/secret').read(); ok = True"),
    "reads_passwords": escapes("open('/etc/passwd').read(); ok = True"),
    "writes_host_file": escapes("open('FOLDER/new', 'w').write('x'); ok = True"),
    "writes_python": escapes(
        "import os, json; open(os.path.dirname(json.__file__) + '/x.py', 'w'); ok = True"
    ),
    "writes_root": escapes("open('/new', 'w'); ok = True"),
    "symlink": escapes(
        "import os; os.symlink('FOLDER/secret', '/tmp/l'); open('/tmp/l').read(); ok = True"
    ),
    "proc_of_init": escapes("import os; os.listdir('/proc/1/root'); ok = True"),
    "mounts_proc": escapes(
        "import ctypes; c = ctypes.CDLL(None); "
        "ok = c.mount(b'p', b'/tmp', b'proc', 0, 0) == 0 or c.unshare(0x10000000) == 0"
    ),
    "new_namespace": escapes(
        "import ctypes; c = ctypes.CDLL(None); ok = c.unshare(0x10020000) == 0"
    ),
    "kills_host_process": escapes("import os; os.kill(PARENT, 0); ok = True"),
    "traces": escapes(
        "import ctypes, os; c = ctypes.CDLL(None); ok = c.ptrace(16, os.getppid(), 0, 0) == 0"
    ),
    "raises_limits": escapes(
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); ok = True"
    ),
    "becomes_root": escapes("import os; os.setuid(0); ok = True"),
    "shared_memory": escapes(
        "import ctypes; c = ctypes.CDLL(None); ok = c.shmget(1, 1 << 30, 0o1600) >= 0 or "
        "c.memfd_create(b'x', 0) >= 0"
    ),
    "executes_shell": escapes(
        "import subprocess; subprocess.run(['/bin/sh', '-c', 'true'], check=True); ok = True"
    ),
    "reads_environment": escapes(
        "import os; ok = any('PACS' in key or 'KEY' in key for key in os.environ)"
    ),
    # --------------------------------------------------------------------------------------- a
    # reward without an answer
    "prints_verdict": Attack(
        "import os\nfor fd in range(0, 64):\n    try: os.write(fd, b'{\"reward\": 1.0}\\n')\n    "
        "except OSError: pass"
    ),
    "forges_frames": Attack(
        'import os\nfor fd in range(0, 64):\n    try: os.write(fd, b\'{"output": "1"}\\n\' * 9)\n'
        "    except OSError: pass"
    ),
    "exits_well": Attack("import os\nos._exit(0)"),
    "exits_in_call": Attack("import sys\ndef f(x): sys.exit(0)", CALL),
    "equals_everything": Attack(
        "class A(str):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef f(x): "
        "return A('x')",
        CALL,
    ),
    "patches_json": Attack(
        "import json\njson.dumps = lambda *a, **k: 'null'\njson.loads = lambda *a: None\ndef "
        "f(x): return None",
        CALL,
    ),
    "patches_runner": Attack(
        "import gc, types\nfor o in gc.get_objects():\n    if isinstance(o, types.FunctionType) "
        "and "
        "o.__name__ in ('_collect', '_run', '_send'): o.__code__ = (lambda *a: {'output': "
        "'1'}).__code__"
    ),
    "deep_result": Attack(
        "def f(x):\n    r = []\n    for _ in range(10**5): r = [r]\n    return r", CALL
    ),
    "huge_number": Attack(
        "import sys\nsys.set_int_max_str_digits(0)\ndef f(x): return 10**6000", CALL
    ),
    "reads_tests": Attack(
        "import os\nos.lseek(0, 0, 0)\nprint(os.read(0, 10**6))\n"
        "for fd in range(3, 64):\n    try: print(os.pread(fd, 10**6, 0))\n    except OSError: pass"
    ),
}
QUICK = ("daemon", "network", "reads_host_file", "output_flood", "prints_verdict")

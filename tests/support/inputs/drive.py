"""drive.py FILE SIGNALS COMMAND: starts a command in a session of its own, and once FILE exists,
sends it the signals.

A number in SIGNALS is a pause in seconds; a minus sends the signal to the whole group.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

file, signals, *command = sys.argv[1:]
process = subprocess.Popen(command, start_new_session=True)
for _ in range(1500):
    if os.path.exists(file) or process.poll() is not None:
        break
    time.sleep(0.1)
for word in signals.split(","):
    if word[0].isdigit():
        time.sleep(float(word))
        continue
    number = getattr(signal, "SIG" + word.lstrip("-"))
    send = os.killpg if word[0] == "-" else os.kill
    with contextlib.suppress(ProcessLookupError):
        send(process.pid, number)
code = process.wait()
sys.exit(code if code >= 0 else 128 - code)

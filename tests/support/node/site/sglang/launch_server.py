"""One stand-in server: its place is taken by a server inside the modelled host's process, until
this process is killed.
"""

import os
import sys

from node_link import call, connect

with connect() as link:
    server = {
        "args": sys.argv[1:],
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "pid": os.getpid(),
    }
    answer = call(link, {"op": "serve", **server})
print(answer["reason"], flush=True)
sys.exit(answer["code"])

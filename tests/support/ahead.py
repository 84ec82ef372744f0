"""A run that samples ahead and is stopped inside a step."""

from __future__ import annotations

STOPPED_IN_STEP_3 = """
import os, signal, sys
from pacs_megatron.policy.engine import MegatronPolicy
from pacs_megatron.training import main
real = MegatronPolicy.update
def update(policy, *arguments):
    if policy.version == 4:  # two updates a step
        os.kill(os.getpid(), signal.SIGTERM)
    return real(policy, *arguments)
MegatronPolicy.update = update
sys.exit(main.main(sys.argv[1:]))
"""

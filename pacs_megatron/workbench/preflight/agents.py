"""Checks of `rollout.agent`: the chat template between turns, the function, and the tools."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import numpy as np

from pacs_megatron.agents.pool import AgentPool, Callbacks
from pacs_megatron.config.agent_options import AgentOptions
from pacs_megatron.config.load import LoadedConfig
from pacs_megatron.data import load_tokenizer
from pacs_megatron.rollout.agent_rounds import build_encoder
from pacs_megatron.workbench.preflight.check import Check, attempt


def check_agents(loaded: LoadedConfig, model_dir: Path) -> Iterator[Check]:
    """Whether messages have the same markers in every conversation, and the agent and its tools
    load.

    Args:
        loaded: configuration of the run.
        model_dir: with the tokenizer.
    """
    config = loaded.config
    options = config.rollout.agents
    if options is None:
        return
    tokenizer = load_tokenizer(str(model_dir), config.model.trust_remote_code)

    def read_markers() -> str:
        encoder = build_encoder(options, config.data, tokenizer, datetime.now())
        source = "chat template" if options.turn_markers is None else "turn_markers"
        return f"{source}: messages of role {', '.join(encoder.markers.before)}"

    markers = attempt("rollout.agent (markers of messages)", read_markers)
    yield markers
    if markers.level != "ok":
        return

    def start() -> str:
        encoder = build_encoder(options, config.data, tokenizer, datetime.now())
        callbacks = Callbacks(_ignore, _ignore, lambda: None, _ignore)
        first = options.model_copy(update={"workers": 1, "tool_workers": 1})
        with AgentPool(first, encoder, [], _no_text, callbacks):
            return _described(options)

    yield attempt("rollout.agent", start)


def _described(options: AgentOptions) -> str:
    tools = ", ".join(f"{name} ({tool.kind})" for name, tool in options.tools.items())
    return f"{options.function} loads; tools: {tools or 'none'}"


def _ignore(_value: object) -> None:
    """No trajectory is started."""


def _no_text(_ids: np.ndarray) -> str:
    return ""

"""Files whose content changes what an agent does: its code, and those of its tools."""

import hashlib
from pathlib import Path

from pacs_megatron.config.agent_options import AgentOptions, CustomTool, RetrievalTool
from pacs_megatron.config.text import local_path
from pacs_megatron.errors import ConfigError
from pacs_megatron.rewards.imports import imported_beside


def agent_digests(options: AgentOptions) -> dict[str, str]:
    """Name -> digest of each file that the configuration names, and of the modules beside it that
    it imports. A function of an installed module has none.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        files = _files(options)
        return {
            name: hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
            for name, path in files.items()
        }
    except OSError as error:
        raise ConfigError(
            f"rollout.agent: {error.filename}: {error.strerror}; correct the path of the function "
            "or tool"
        ) from error


def _files(options: AgentOptions) -> dict[str, Path]:
    files: dict[str, Path] = {}
    functions = [options.function]
    for tool in options.tools.values():
        if isinstance(tool, CustomTool):
            functions.append(tool.function)
        elif isinstance(tool, RetrievalTool):
            files[tool.path] = local_path(tool.path)
    for function in functions:
        where, _, _ = function.rpartition(":")
        if where.endswith(".py"):
            file = local_path(where)
            files[where] = file
            files |= {f"{where}: {name}": path for name, path in imported_beside(file).items()}
    return files

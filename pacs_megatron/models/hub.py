"""What the hub's names look like, and which files of a repository are a model: the same everywhere.

The hub's client calls a snapshot incomplete, and refuses it offline, when it is asked for more than was fetched.
"""

import re

HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


def is_hub_id(name: str) -> bool:
    """Whether the hub could have it: `name` or `owner/name`."""
    return _ID.fullmatch(name) is not None

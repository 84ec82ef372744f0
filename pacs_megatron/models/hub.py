"""Which files of a hub repository are a model: the same list everywhere.

The hub's client calls a snapshot incomplete, and refuses it offline, when it is asked for more than was fetched.
"""

HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")

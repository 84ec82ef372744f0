"""Types of the schema's strings by meaning.

Strings for file names, shells and batch scripts have one of these types.
"""

import os
import re
import unicodedata
from itertools import islice
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from pacs_megatron.errors import did_you_mean, shown

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
"""A repository of the Hugging Face hub: `name` or `owner/name`."""
_MAX_FILES = 1000
"""Files of a folder that are compared with a missing one"""
MAX_PATH_BYTES = 4095
MAX_NAME_BYTES = 255
MAX_RUN_NAME_BYTES = 200
"""Maximum length of a name, which leaves space for the suffixes of a sweep and of Slurm's logs in a
file name.
"""


def local_path(text: str | Path) -> Path:
    """The path with `~` replaced by a home folder.

    For an unknown user the path stays, unlike `Path.expanduser`.
    """
    return Path(os.path.expanduser(text))


def near_file(path: Path) -> str:
    """The end of a message about a missing file: the end of a broken link, or a file of its folder
    with a like name.
    """
    try:
        if path.is_symlink():
            return f"; it is a link to {os.readlink(path)}, which does not exist"
        with os.scandir(path.parent) as entries:
            names = [entry.name for entry in islice(entries, _MAX_FILES)]
    except OSError:
        return ""
    return did_you_mean(path.name, names)


def encodable_bytes(text: str) -> int:
    """Length in UTF-8.

    Raises ValueError for lone surrogates, which no file name or script can contain.
    """
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ValueError(
            "expected text that UTF-8 can encode, got a lone surrogate; remove it"
        ) from None


def _check_line(text: str) -> str:
    if not text.strip():
        raise ValueError("expected text, got an empty string; write a value or remove the key")
    encodable_bytes(text)
    for letter in text:
        if unicodedata.category(letter) in ("Cc", "Zl", "Zp"):
            raise ValueError(f"expected one line, got the control character {letter!r}; remove it")
    return text


def _check_path(text: str) -> str:
    _check_line(text)
    _check_length(text, "a path", MAX_PATH_BYTES)
    longest_name = max(text.split("/"), key=encodable_bytes)
    _check_length(longest_name, "file names", MAX_NAME_BYTES)
    return str(local_path(text)) if text.startswith("~") else text


def _with_home(text: str) -> str:
    return str(local_path(text)) if text == "~" or text.startswith("~/") else text


def _check_length(text: str, kind: str, max_bytes: int) -> None:
    num_bytes = encodable_bytes(text)
    if num_bytes > max_bytes:
        raise ValueError(
            f"expected {kind} of at most {max_bytes} bytes, got {num_bytes}; correct the path"
        )


def _matching(pattern: str, expected: str, max_bytes: int = MAX_NAME_BYTES) -> AfterValidator:
    compiled = re.compile(pattern, re.ASCII)

    def check(text: str) -> str:
        num_bytes = encodable_bytes(text)
        if num_bytes > max_bytes:
            raise ValueError(f"expected at most {max_bytes} bytes, got {num_bytes}; shorten it")
        if not compiled.fullmatch(text):
            raise ValueError(f"expected {expected}, got {shown(text)}; correct it")
        return text

    return AfterValidator(check)


_HOST = re.compile(
    r"(?=.{1,253}$)([\w-]{1,63}(\.[\w-]{1,63})*\.?|[0-9a-fA-F:.]*:[0-9a-fA-F:.]*)", re.ASCII
)
"""A host name (its labels), or an IPv6 address."""


def _check_url(text: str) -> str:
    expected = "expected http://<host>:<port>"
    _check_line(text)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{expected}, got {text!r} ({error}); correct it") from None

    is_http = parts.scheme in ("http", "https")
    if not is_http or not _HOST.fullmatch(parts.hostname or "") or port == 0:
        raise ValueError(f"{expected}, got {text!r}; correct it")
    if "@" in parts.netloc:  # not printed: it contains a secret
        raise ValueError(
            f"{expected} without user or password; name the key by an environment variable"
        )
    if parts.query or parts.fragment or not re.fullmatch(r"[\w./~-]*", parts.path, re.ASCII):
        raise ValueError(f"{expected} without query or fragment, got {text!r}; correct it")
    return text


def _check_server(text: str) -> str:
    parts = urlsplit(_check_url(text))
    if parts.scheme != "http" or parts.port is None or parts.path not in ("", "/"):
        raise ValueError(f"expected http://<host>:<port>, got {text!r}; correct it")
    return f"http://{parts.netloc.lower()}"


def _check_pattern(text: str) -> str:
    try:
        re.compile(text, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"expected a regular expression of Python, got {shown(text)} ({error}); correct it"
        ) from None
    return text


Line = Annotated[str, AfterValidator(_check_line)]
"""Not empty, without control characters."""

Word = Annotated[str, AfterValidator(_check_line), AfterValidator(_with_home)]
"""A `Line` that may be a path: `~/` at its start becomes the home folder, as in a shell."""

PathText = Annotated[str, AfterValidator(_check_path)]
"""A path that the file system can contain; `~` at its start becomes a home folder."""

Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A regular expression of Python."""

Url = Annotated[str, AfterValidator(_check_url)]
"""http or https, without user, query and fragment."""

ServerUrl = Annotated[str, AfterValidator(_check_server)]
"""http://<host>:<port>, in a normalised form."""

Identifier = Annotated[str, _matching(r"[A-Za-z0-9_][\w.:@+-]*", "letters, digits and . : @ + - _")]
"""A name of Slurm: account, partition, qos."""

_RUN_NAME = "letters, digits and . _ - + = , @ :, starting with a letter or digit"
RunName = Annotated[str, _matching(r"[^\W][\w.+=,@:-]*", _RUN_NAME, MAX_RUN_NAME_BYTES)]
"""Name of a folder and of a Slurm job."""

EnvironmentName = Annotated[str, _matching(r"[A-Za-z_]\w*", "the name of an environment variable")]

HostName = Annotated[str, _matching(r"[A-Za-z0-9:][A-Za-z0-9.:_-]*", "a host name or an address")]

_INTERFACES = r"[\^=]?[A-Za-z0-9][\w.:@-]*(,[A-Za-z0-9][\w.:@-]*)*"
Interface = Annotated[str, _matching(_INTERFACES, "a network interface, such as ib0")]
"""One or several network interfaces, in the syntax of NCCL_SOCKET_IFNAME."""

Constraint = Annotated[
    str, _matching(r"[\w.:@+,&|()\[\]*!-]+", "node features, such as a100&nvlink")
]

MemorySize = Annotated[
    str, _matching(r"\d{1,12}[KMGT]?", "a size as Slurm writes it, such as 0 or 200G")
]

CpuBind = Annotated[str, _matching(r"[\w:,.*x+-]+", "a value of srun's --cpu-bind, such as cores")]

Devices = Annotated[str, _matching(r"[\w,:./-]*", "a value of CUDA_VISIBLE_DEVICES, such as 0,1")]

ModuleName = Annotated[
    str, _matching(r"[\w.+@][\w./:+@-]*", "the name of a module, such as cuda/12.9")
]

_MOUNT = r"/[^:,\x00-\x1f\x7f]*(:/[^:,\x00-\x1f\x7f]*)?(:[a-z+]+)?"
Mount = Annotated[str, _matching(_MOUNT, "/path or /host/path:/container/path", MAX_PATH_BYTES)]

_TIME = r"(\d{1,3}-([01]?\d|2[0-3])|\d{1,3}):[0-5]\d:[0-5]\d"
TimeLimit = Annotated[str, _matching(_TIME, "[days-]hours:minutes:seconds, such as 04:00:00")]

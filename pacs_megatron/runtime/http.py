"""HTTP requests with limits of time and size; redirects are not followed, and responses are not
decompressed.
"""

from collections.abc import Mapping
from typing import Any

import aiohttp

CONNECTION_ERRORS = (aiohttp.ClientError, OSError)
"""Errors of a failed connection; aiohttp wraps most of them, but not all."""


class ResponseTooLongError(aiohttp.ClientPayloadError):
    """A response beyond the limit of its request."""


def open_session(**options: Any) -> aiohttp.ClientSession:
    """A session without the environment's proxies and without compression (a few bytes could expand
    to gigabytes).
    """
    return aiohttp.ClientSession(
        trust_env=False,
        read_bufsize=1 << 20,
        auto_decompress=False,
        skip_auto_headers=("Accept-Encoding",),
        **options,
    )


async def exchange(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    limit: int,
) -> tuple[int, bytes]:
    """Sends a request and reads its response.

    Args:
        session: From `open_session`.
        url: Address of the request.
        body: JSON of a POST; None sends a GET.
        headers: Added to the header of the content type.
        timeout_s: Seconds for request and response together.
        limit: Maximum size of the response, in bytes.

    Returns:
        The HTTP status and the bytes of the response.

    Raises:
        TimeoutError: The exchange takes longer than `timeout_s`.
        ResponseTooLongError: A response with status 200 exceeds `limit`.
        aiohttp.ClientError: The connection or the response fails; some failures are an OSError
            (CONNECTION_ERRORS).
    """
    async with session.request(
        "GET" if body is None else "POST",
        url,
        data=body,
        headers={"Content-Type": "application/json", **headers},
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        allow_redirects=False,  # a redirect would send prompts and key to another address
    ) as response:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise aiohttp.ClientPayloadError(
                "the response is compressed; turn compression off in the server"
            )
        if response.content_length is not None and response.content_length <= limit:
            return response.status, await response.read()

        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > limit:
                if response.status != 200:
                    break  # the status is the reason of the failure
                raise ResponseTooLongError(f"response longer than {limit} bytes")
        return response.status, bytes(data)

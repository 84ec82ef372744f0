"""The request for one sample, and the limit of open connections."""

import logging
import resource
from typing import Any

import numpy as np
import orjson

from pacs_megatron.contracts.samples import SampleRequest

logger = logging.getLogger(__name__)
OTHER_FILES = 256
"""Open files besides the connections: logs, workers, data."""
MAX_FILES = 1 << 20


def allow_connections(num: int) -> None:
    """Raises this process's limit of open files to the host's maximum; warns if that is not enough for `num`
    connections, because further connections would fail and look like server faults."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < highest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    if num + OTHER_FILES > max(soft, highest) and soft != resource.RLIM_INFINITY:
        logger.warning(
            "%d requests in flight need more files than the %d that this host allows a process (ulimit -n); lower "
            "rollout.max_in_flight",
            num,
            highest,
        )


def request_body(request: SampleRequest, rid: str, *, with_routes: bool = False) -> bytes:
    """The JSON of `/generate` for one sample, under the id `rid`. `with_routes`: with the experts of its tokens."""
    params = request.params
    sampling: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "max_new_tokens": params.max_response_tokens,
        "sampling_seed": request.seed,
        "no_stop_trim": True,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    body = {
        "rid": rid,
        "input_ids": np.ascontiguousarray(request.token_ids),
        "sampling_params": sampling,
        "return_logprob": True,
    }
    if with_routes:
        body["return_routed_experts"] = True
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)

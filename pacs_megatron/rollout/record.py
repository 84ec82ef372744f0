"""`rollouts/step_000012.safetensors`: the samples of a step, bit for bit; a run can train the step again from them.

int32 token ids, float32 log-probs, the reason of each response's end, and its spans with version and digest of their
weights (`sample_arrays`), with the sample ids in the metadata. A sample's seed follows from its id and the run's seed
(`seeds`). Eight bytes per token; written with `logging.save_tokens`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pacs_megatron.contracts import Sample
from pacs_megatron.errors import DataError
from pacs_megatron.rollout.sample_arrays import samples_from_message, samples_to_message
from pacs_megatron.runtime.files import write_atomically
from pacs_megatron.runtime.json_reader import as_object, parse_json

_HEADER = "samples"


def write_record(path: Path, samples: Sequence[Sample]) -> None:
    """Samples without their verdicts, in the given order; equal samples give equal bytes."""
    from safetensors.numpy import save

    header, arrays = samples_to_message(samples)
    write_atomically(path, [save(arrays, metadata={_HEADER: json.dumps(header)})])


def read_record(path: Path) -> list[Sample]:
    """Inverse of `write_record`. Raises DataError for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = (file.metadata() or {}).get(_HEADER)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{path}: not a record of samples ({error}); it is written with logging.save_tokens") from error
    if header is None:
        raise DataError(f"{path}: no ids of samples in it; it is written with logging.save_tokens")
    found = as_object(parse_json(header, str(path), any_text=True), str(path))
    try:
        return samples_from_message(found, arrays)
    except (KeyError, ValueError, IndexError, TypeError) as error:
        raise DataError(
            f"{path}: ids and arrays do not match ({type(error).__name__}: {error}); write it again"
        ) from error

"""The seed of one sample: a function of the request, not of the server or of the batch that it is sampled in."""

from hashlib import blake2b


def sample_seed(run_seed: int, step: int, prompt_id: str, index: int, *, purpose: str = "train") -> int:
    """63-bit seed (0 <= seed < 2**63) of sample `index` of `prompt_id` in `step`.

    `purpose` ("train", "eval") separates an evaluation from the training step with the same number.
    """
    # prompt_id is last: it is the only free text, so different requests never give the same bytes.
    key = f"{purpose}|{run_seed}|{step}|{index}|{prompt_id}".encode()
    return int.from_bytes(blake2b(key, digest_size=8, person=b"pacs-sample").digest(), "big") >> 1

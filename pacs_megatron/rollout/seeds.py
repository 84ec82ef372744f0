"""The seed of one sample: a function of what is asked for, never of who answers or with whom it is batched."""

from hashlib import blake2b


def sample_seed(run_seed: int, step: int, prompt_id: str, index: int, *, purpose: str = "train") -> int:
    """63-bit seed (0 <= seed < 2**63) of sample `index` of `prompt_id` in `step`.

    `purpose` ("train", "eval") keeps the draws of an evaluation apart from those of the training step of the same number.
    """
    # prompt_id comes last: it alone is free text, so no two different requests give the same bytes.
    key = f"{purpose}|{run_seed}|{step}|{index}|{prompt_id}".encode()
    return int.from_bytes(blake2b(key, digest_size=8, person=b"pacs-sample").digest(), "big") >> 1

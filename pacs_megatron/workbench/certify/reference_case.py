"""The recorded samples of a case, for `certify`'s reference.

It imports nothing of pacs_megatron.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(kw_only=True)
class Step:
    """The samples of one step's rollout batch, in the order of steps.npz."""

    number: int
    """from 1"""
    ids: list[str]
    groups: np.ndarray
    """int64 [n], number of each sample's group"""
    labels: Tensor
    """float64 [n]"""
    rewards: Tensor
    """float64 [n]"""
    truncated: np.ndarray
    """bool [n]"""
    token_ids: list[np.ndarray]
    """int32 [prompt + response] of each sample"""
    prompt_lens: list[int]
    is_policy: list[Tensor]
    """bool [response, with tokens of the environment] of each sample: whether the policy wrote it;
    other tokens are context
    """
    noise: list[np.ndarray]
    """float64 [response tokens of the policy] of each sample: log-probs of the sampler minus those
    of the policy
    """
    sampler_logprobs: list[Tensor]
    """float64 [response tokens of the policy] of each sample; empty before `Reference.prepare`"""
    routes: list[Tensor] | None
    """int64 [prompt + response - 1, layers, top k] of each sample, the sampler's experts; None: not
    recorded"""

    @property
    def rows(self) -> range:
        """All samples."""
        return range(len(self.ids))


def read_case(folder: Path) -> dict[str, Any]:
    """The content of case.json."""
    content: dict[str, Any] = json.loads((folder / "case.json").read_text())
    return content


def read_steps(folder: Path) -> dict[int, Step]:
    """The steps of steps.npz, by their numbers."""
    with np.load(folder / "steps.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    ids = read_case(folder)["ids"]
    return {int(number): _step(int(number), ids[number], arrays) for number in ids}


def _step(number: int, ids: list[str], arrays: dict[str, np.ndarray]) -> Step:
    def array(name: str) -> np.ndarray:
        return arrays[f"{number}.{name}"]

    prompt_lens = array("prompt_lens")
    response_lens = array("response_lens")
    whole_lens = response_lens + array("environment_lens")
    lens = prompt_lens + whole_lens

    sampler_logprobs: list[Tensor] = []
    if f"{number}.sampler" in arrays:
        sampler_logprobs = per_sample(array("sampler"), response_lens)

    routes = None
    if f"{number}.routes" in arrays:
        # For every input token; the last token of a sample is no input.
        routes = [torch.from_numpy(part).long() for part in _split(array("routes"), lens - 1)]

    return Step(
        number=number,
        ids=ids,
        groups=array("groups"),
        labels=torch.from_numpy(array("labels")),
        rewards=torch.from_numpy(array("rewards")),
        truncated=array("truncated"),
        token_ids=_split(array("tokens"), lens),
        prompt_lens=prompt_lens.tolist(),
        is_policy=[torch.from_numpy(part) for part in _split(array("is_policy"), whole_lens)],
        noise=_split(array("noise"), response_lens),
        sampler_logprobs=sampler_logprobs,
        routes=routes,
    )


def per_sample(values: np.ndarray, lens: np.ndarray) -> list[Tensor]:
    """One float64 tensor for each sample, of `values` [t]."""
    return [torch.from_numpy(part) for part in _split(values.astype(np.float64), lens)]


def _split(values: np.ndarray, lens: np.ndarray) -> list[np.ndarray]:
    """One array for each sample."""
    return np.split(values, np.cumsum(lens)[:-1])


def write_sampler(folder: Path, sampler_logprobs: dict[int, np.ndarray]) -> None:
    """Adds the sampler's log-probs of each step, float32 [t], to steps.npz."""
    with np.load(folder / "steps.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    for number, logprobs in sampler_logprobs.items():
        arrays[f"{number}.sampler"] = logprobs
    np.savez(folder / "steps.npz", **arrays)

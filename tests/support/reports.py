"""Files that a report reads, and the report as a parser sees it."""

import math
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.contracts import Prompt, Sample, Stop
from pacs_megatron.observability.rollout_log import rollout_path, write_rollouts

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e&amp; \udc80 <!-- "
)
VOID = {"meta", "img", "br", "input", "link"}


class Page(HTMLParser):
    """Collects elements and text; fails for a tag that is closed but not open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def step_row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "reward/mean": 0.5 + 0.4 * math.sin(step),
        "objective/loss": 0.6931,
        "optimizer/grad_norm": 4.0 + step % 3,
        "policy/entropy": 1.0 / (step + 1),
        "response/len_mean": 20.0 + step,
        "response/len_max": 32,
        "pacs/residual_mean": 0.5,
        "pacs/psi_mean_pos": None if step % 2 else 0.1,
        "pacs/psi_mean_neg": -0.1,
        "time/rollout_s": 1.0,
        "time/update_s": 2.0,
        "time/update/forward_s": 0.5,
        "time/step_s": 3.5,
        "tokens_per_s": 1000.0,
        "custom/thing": float(step),
    }


def write_samples(
    run_dir: Path, step: int, text: str, num: int = 8, details: Mapping[str, Any] | None = None
) -> None:
    prompt = Prompt(
        id="p/0", text=text, token_ids=np.array([1], np.int32), answer=text, problem=text
    )
    samples = [
        Sample(
            id=f"{step}:p/0#{i}",
            prompt_id="p/0",
            token_ids=np.array([1, 2], np.int32),
            prompt_len=1,
            sampler_logprobs=np.array([-0.1], np.float32),
            spans=(),
            stop=Stop.EOS,
            reward=None if i == 1 else 1.0,
            label=None if i == 1 else i % 2,
            failure=text if i == 1 else None,
            reward_details=details,
        )
        for i in range(num)
    ]
    write_rollouts(rollout_path(run_dir, step), samples, {"p/0": prompt}, lambda _: text)

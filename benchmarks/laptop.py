"""One training step beside a plain PyTorch + transformers loop on the same model, in one run.

    python benchmarks/laptop.py [--steps 10] [--updates 4 --rounds 3]

Both: the quickstart's model (random weights), 16 prompts x 8 samples, 48 new tokens at most, fp32,
one thread, PACS with `reference: step_start`. The plain loop is a simple script: `model.generate`
on the left-padded batch, one padded forward over all samples, PACS's loss by autograd through BCE,
clip, AdamW. Half of the plain loop's steps run before and half after this package's steps, so that
a slow change of the load affects both. On a busy machine the CPU seconds (of the main process) are
a better comparison than the wall clock.

`--updates 4` instead compares steps of four updates without generation: PACS with a score pass
(`batch.groups: apart`), PACS with whole groups (`together`) and GRPO, in turn, each in a process of
its own, in `--rounds` rounds. The learning rate is so small that every variant has the same tokens
in the same step. A step's time is its shortest over the rounds: other work on the host only ever
adds to it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step_overhead import make_inputs, run_loop

PROMPTS = 16
SAMPLES = 8
NEW_TOKENS = 48
SAME = ("batch.updates_per_step=1", "objective.clip_grad=1.0")
"""as in the plain loop, not as in the quickstart"""
SUFFIX = r"Answer in \boxed{}."

VARIANTS = {
    "PACS, groups apart": ("batch.groups=apart",),
    "PACS, groups together": ("batch.groups=together",),
    "GRPO": ("objective={name: grpo, clip_grad: 0.0}",),
}
FIXED = ("optimizer.lr=1e-12", "admission.truncated=judge")
"""the same tokens in the same step of every variant; labels by the reward, so that most groups have
both classes
"""
NOT_MEASURED = ("mismatch.score_noise_every=null", "mismatch.max_score_noise=null")


# -------------------------------------------------------------------------------------- plain loop
class PlainLoop:
    """generate, reward, one forward, BCE on the leave-one-out score, AdamW."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0
        )
        rows = json.loads((folder / "data" / "train.json").read_text())
        self.problems = [row["problem"] for row in rows]
        self.position = 0

    def next_prompts(self) -> Any:
        """A left-padded batch of PROMPTS x SAMPLES rows."""
        texts = []
        for problem in self.problems[self.position : self.position + PROMPTS]:
            text = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": f"{problem} {SUFFIX}"}],
                tokenize=False,
                add_generation_prompt=True,
            )
            texts += [text] * SAMPLES
        self.position = (self.position + PROMPTS) % (len(self.problems) - PROMPTS)
        return self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)

    def generate(self, prompts: Any) -> torch.Tensor:
        """Samples a response to each prompt.

        Returns:
            int64 [n, prompt + response], token ids.
        """
        with torch.inference_mode():
            ids = self.model.generate(
                **prompts,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=NEW_TOKENS,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        return ids.clone()

    def labels(self, responses: torch.Tensor) -> torch.Tensor:
        """0 or 1 by the text: a random model has no correct answers.

        Args:
            responses: int64 [n, response], token ids.

        Returns:
            fp32 [n].
        """
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return torch.tensor([float(sum(text.encode()) % 2) for text in texts])

    def update(self, prompts: Any, ids: torch.Tensor, labels: torch.Tensor) -> None:
        """One forward and backward pass over all samples, and one optimizer step.

        Args:
            prompts: of `next_prompts`.
            ids: int64 [n, prompt + response], token ids.
            labels: fp32 [n].
        """
        start = prompts["input_ids"].shape[1]
        responses = ids[:, start:]
        # 1 up to the first end of sequence, that token included.
        is_end = responses == self.tokenizer.eos_token_id
        mask = ((is_end.cumsum(1) - is_end.long()) == 0).float()

        attention = torch.cat([prompts["attention_mask"], mask.long()], dim=1)
        output = self.model(input_ids=ids[:, :-1], attention_mask=attention[:, :-1])
        logits = output.logits[:, start - 1 :].float()
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, responses[:, :, None])[:, :, 0]

        # PACS's loss: binary cross-entropy of leave-one-out scores, weighted by class.
        proxy = ((logprobs - logprobs.detach()) * mask).sum(1).view(PROMPTS, SAMPLES)
        psi = (proxy - proxy.mean(1, keepdim=True)) * SAMPLES / (SAMPLES - 1)
        y = labels.view(PROMPTS, SAMPLES)
        positives = y.sum(1, keepdim=True)
        own_class = torch.where(y == 1, positives, SAMPLES - positives)
        weights = torch.where(own_class == SAMPLES, 1.0, SAMPLES / (2 * own_class))
        losses = F.binary_cross_entropy_with_logits(psi, y, reduction="none")
        loss = (weights * losses).mean()

        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def step(self) -> dict[str, float]:
        """Seconds of one step and of its generation, and its CPU seconds."""
        begin = time.perf_counter()
        begin_cpu = time.process_time()
        prompts = self.next_prompts()
        ids = self.generate(prompts)
        generated = time.perf_counter()
        responses = ids[:, prompts["input_ids"].shape[1] :]
        self.update(prompts, ids, self.labels(responses))
        return {
            "step": time.perf_counter() - begin,
            "generation": generated - begin,
            "cpu": time.process_time() - begin_cpu,
        }


# --------------------------------------------------------------------------- steps of many updates
def compare_updates(folder: Path, steps: int, updates: int, rounds: int) -> None:
    """Prints CPU seconds of a step without generation, and their ratio to GRPO's, by round and for
    the shortest steps.
    """
    context = multiprocessing.get_context("spawn")
    common = (
        f"batch.updates_per_step={updates}",
        f"batch.prompts_per_step={PROMPTS}",
        *FIXED,
        *NOT_MEASURED,
    )
    seconds: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    print(
        f"CPU seconds a step without generation, {steps} steps of {updates} updates; the ratio to "
        "GRPO"
    )
    for number in range(rounds):
        for name, overrides in VARIANTS.items():
            run_dir = folder / f"{number} {name}"
            with ProcessPoolExecutor(1, context) as pool:
                job = pool.submit(run_one, run_dir, folder, steps, (*common, *overrides))
                rows = job.result()
            seconds[name].append([row["cpu"] - row["generation_cpu"] for row in rows])
        medians = {name: statistics.median(of_rounds[-1]) for name, of_rounds in seconds.items()}
        print_ratios(f"median of round {number + 1}", medians)

    shortest = {}
    for name, of_rounds in seconds.items():
        shortest_steps = [min(step) for step in zip(*of_rounds, strict=True)]
        shortest[name] = statistics.mean(shortest_steps)
    print_ratios(f"shortest of {rounds} rounds", shortest)


def print_ratios(title: str, seconds: dict[str, float]) -> None:
    """One line: the seconds of each variant and their ratio to GRPO's."""
    ratios = [
        f"{name}: {value:.3f} s ({value / seconds['GRPO']:.3f})" for name, value in seconds.items()
    ]
    print(f"{title}:  {'  '.join(ratios)}", flush=True)


def run_one(
    run_dir: Path, folder: Path, steps: int, overrides: tuple[str, ...]
) -> list[dict[str, float]]:
    """`run_loop` in a new process, with one thread."""
    torch.set_num_threads(1)
    return run_loop(folder, steps, *overrides, f"run.dir={run_dir}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        if options.updates > 1:
            compare_updates(folder, options.steps, options.updates, options.rounds)
            return 0
        plain = PlainLoop(folder)
        plain.step()
        before = [plain.step() for _ in range(options.steps // 2)]
        ours = run_loop(folder, options.steps, f"batch.prompts_per_step={PROMPTS}", *SAME)
        after = [plain.step() for _ in range(options.steps - options.steps // 2)]
    our_medians = median_seconds(ours)
    plain_medians = median_seconds(before + after)

    print(f"seconds a step, median of {options.steps}; one rank, one thread, {torch.__version__}")
    print(f"{'':<22} {'this package':>14} {'plain loop':>12} {'ratio':>7}")
    for name, our_s in our_medians.items():
        plain_s = plain_medians[name]
        print(f"{name:<22} {our_s:>14.3f} {plain_s:>12.3f} {our_s / plain_s:>7.2f}")
    return 0


def median_seconds(steps: list[dict[str, float]]) -> dict[str, float]:
    """Title of a row -> median over the steps."""
    return {
        "with generation": statistics.median(step["step"] for step in steps),
        "without generation": statistics.median(
            step["step"] - step["generation"] for step in steps
        ),
        "CPU, with generation": statistics.median(step["cpu"] for step in steps),
    }


if __name__ == "__main__":
    sys.exit(main())

"""Writes authors_golden.json: losses and gradients of REAL, PSR, NSR, W-REINFORCE, REINFORCE++,
STEER and VIMPO in their authors' code, advantages of MaxRL, DGPO and UCAS, numbers of samples of
DARS.

Not a test, and none of this code is in the project. DIR holds checkouts of the commits in COMMITS,
named as there:
    python tests/golden/make_authors_golden.py DIR

Modules that these files import for other functions are empty. Float64, except for OpenRLHF's mean
and variance, the targets of REAL's BCE variant, and STEER, which allows no other.
"""

import argparse
import importlib
import json
import math
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

COMMITS = {
    "REAL": "1c30726a1c7606e717091b4b8cf1fc156a06039f",  # Red-RL/REAL
    "RLVR-Decomposed": "a5d4e7c1df6016ebd7396bd6db83d885120adb6d",  # TianHongZXY/RLVR-Decomposed
    "OpenRLHF": "3c3be6234e0cb353e76bb8019947db9dfe99fca7",  # OpenRLHF/OpenRLHF
    "maxrl": "c0698ebb439a81ae1c6b01a842df3f2541816b4d",  # tajwarfahim/maxrl
    "MathForge": "83edda024759f052a4a715eb2c2e553fb9da25ca",  # AMAP-ML/MathForge
    "UCAS": "b122ff20b4277e2fe72ebff54b9cd8c4cbd1f83f",  # xvolcano02/UCAS
    "DARS": "9b21b71486614b609df241d8a1aa31cffe40b7f2",  # yangzhch6/DARS
    "VIMPO": "2aa83bcb9568a46be0af8fa943c4345b3d7c53d1",  # backprop07/VIMPO
    "STEER": "b31df71652cd103ddc3512656a430c39ba15dd13",  # zz-haooo/STEER
}
EMPTY = (
    "einops",
    "ray",
    "deepspeed",
    "tensordict",
    "vllm",
    "openrlhf.trainer.ray",
    "openrlhf.utils",
    "verl.protocol",
    "omegaconf",
    "verl.trainer.config",
    "verl.workers.config",
)
LENS = [3, 5, 1, 4, 2, 5, 2, 3, 4]
GROUPS = [0, 0, 0, 1, 1, 1, 2, 2, 2]
LABELS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]  # the last group has one class
CLIP = 0.2
TAU = 0.5
POSITIVE_WEIGHT = 0.1
BETA = 0.2
ACTOR_COEF = 0.3
MASK = (torch.arange(max(LENS))[None] < torch.tensor(LENS)[:, None]).double()
SCORES = (
    MASK
    * (torch.arange(max(LENS))[None] == torch.tensor(LENS)[:, None] - 1)
    * torch.tensor(LABELS)[:, None]
)


class Empty:
    """Finds the modules of EMPTY, and those below them, as mocks."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return (
            ModuleSpec(name, self)
            if any(f"{name}.".startswith(f"{one}.") for one in EMPTY)
            else None
        )  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None:
        pass


@contextmanager
def package(folder: Path) -> Iterator[None]:
    """Imports from this folder only; the packages' own `__init__` files, which import everything,
    do not run.
    """
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    for path in filter(Path.is_dir, folder.rglob("*")):
        name = ".".join(path.relative_to(folder).parts)
        if not any(f"{name}.".startswith(f"{one}.") for one in EMPTY):
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(path)]
    yield
    sys.path.remove(str(folder))
    for name in set(sys.modules) - known:
        del sys.modules[name]


def flat(values: Any) -> list[float]:
    found: list[float] = values[MASK.bool()].tolist()
    return found


def real(folder: Path, tokens: dict[str, torch.Tensor]) -> dict[str, Any]:
    with package(folder / "verl"):
        algos = importlib.import_module("verl.trainer.ppo.core_algos")
        found = {}
        for name in ("real", "bce"):
            logps = tokens["logps"].clone().requires_grad_(True)
            loss, *_ = getattr(algos, f"compute_policy_loss_{name}")(
                tokens["old"],
                logps,
                None,
                MASK,
                torch.tensor(GROUPS),
                torch.tensor(LABELS),
                1e-4,
                TAU,
            )
            loss.backward()
            found["real" if name == "real" else "real_bce"] = {
                "loss": float(loss.detach()),
                "gradient": flat(logps.grad),
            }
    return found


def w_reinforce(folder: Path, tokens: dict[str, torch.Tensor]) -> dict[str, Any]:
    """PSR and NSR train on a subset, which the authors' trainer cuts out of the batch."""
    rows = {"positive": torch.tensor(LABELS) == 1, "negative": torch.tensor(LABELS) == 0}
    with package(folder):
        algos = importlib.import_module("verl.trainer.ppo.core_algos")
        found = {}
        for name, advantage in (
            ("psr", "positive"),
            ("nsr", "negative"),
            ("w_reinforce", "weighted"),
        ):
            kept = rows.get(advantage, torch.ones(len(LABELS), dtype=torch.bool))
            scores = SCORES[kept]
            mask = MASK[kept]
            advantages, _ = algos.compute_psr_nsr_outcome_advantage(
                scores, scores, mask, 1.0, advantage, POSITIVE_WEIGHT
            )
            logps = tokens["logps"].clone().requires_grad_(True)
            loss, *_ = algos.compute_policy_loss(
                tokens["old"][kept], logps[kept], advantages, mask, CLIP, scores
            )
            loss.backward()
            found[name] = {"loss": float(loss.detach()), "gradient": flat(logps.grad)}
    return found


def reinforce_pp(folder: Path, tokens: dict[str, torch.Tensor]) -> dict[str, Any]:
    with package(folder):
        maker = importlib.import_module(
            "openrlhf.trainer.ppo_utils.experience_maker"
        ).RemoteExperienceMaker
        policy_loss = importlib.import_module("openrlhf.models.loss").PolicyLoss(CLIP, CLIP)
        found = {}
        for name, estimator in (
            ("reinforce_pp", "reinforce"),
            ("reinforce_pp-group", "reinforce_baseline"),
        ):
            own = SimpleNamespace(estimator=estimator, gamma=1.0, no_std_norm=False)
            args = SimpleNamespace(
                algo=SimpleNamespace(advantage=own),
                rollout=SimpleNamespace(n_samples_per_prompt=3),
                reward=SimpleNamespace(
                    clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None
                ),
            )
            batch = SimpleNamespace(
                index=list(range(len(LENS))),
                rewards=torch.tensor(LABELS).double(),
                kl=torch.zeros_like(MASK),
                action_mask=MASK,
                info={},
                values=None,
            )
            self = SimpleNamespace(
                strategy=SimpleNamespace(args=args),
                kl_ctl=SimpleNamespace(value=0.0),
                advantage_estimator=estimator,
            )
            self.get_cumulative_returns = lambda *given, own=self: maker.get_cumulative_returns(
                own, *given
            )
            maker.compute_advantages_and_returns(self, [batch])
            logps = tokens["logps"].clone().requires_grad_(True)
            loss, *_ = policy_loss(logps, tokens["old"], batch.advantages, MASK)
            loss.backward()
            found[name] = {"loss": float(loss.detach()), "gradient": flat(logps.grad)}
    return found


def maxrl(folder: Path) -> dict[str, Any]:
    with package(folder):
        algos = importlib.import_module("verl.trainer.ppo.core_algos")
        advantages, _ = algos.compute_maxrl_outcome_advantage(
            SCORES.clone(), MASK, torch.tensor(GROUPS).numpy()
        )
    return {"maxrl": {"advantages": flat(advantages)}}


def dgpo(folder: Path) -> dict[str, Any]:
    """The lines of the trainer's method that compute the advantages, for one process."""
    source = (folder / "trl-0.20.0/trl/trainer/grpo_trainer.py").read_text()
    start = source.index("        main_rewards = rewards_per_func[:, 0]")
    end = source.index("        # Slice to keep only the local part of the data", start)

    found = {}
    for name, has_weights in (("dgpo", True), ("dgpo-unweighted", False)):
        args = SimpleNamespace(enable_dgpo=True, enable_dgpo_dqw=has_weights, dgpo_dqw_temp=2.0)
        scope = {
            "torch": torch,
            "gather": lambda values: values,
            "device": "cpu",
            "rewards_per_func": torch.tensor(LABELS).double()[:, None],
            "completion_mask": MASK,
            "self": SimpleNamespace(
                args=args,
                num_generations=3,
                scale_rewards=True,
                reward_weights=torch.ones(1).double(),
                accelerator=SimpleNamespace(num_processes=1),
            ),
        }
        exec(textwrap.dedent(source[start:end]), scope)  # noqa: S102  # the authors' code
        found[name] = {"advantages": flat(scope["advantages"][:, None] * MASK)}
    return found


def steer(folder: Path, tokens: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One micro-batch, so its largest change is that of the mini-batch."""
    with package(folder):
        algos = importlib.import_module("verl.trainer.ppo.core_algos")
        advantages, _ = algos.compute_grpo_outcome_advantage(
            SCORES.clone(), MASK, torch.tensor(GROUPS).numpy()
        )
        found = {}
        for name, ratio_max in (("steer", 10.0), ("steer-bounded", 1.3)):
            logps = tokens["logps"].float().requires_grad_(True)
            loss, *_ = algos.compute_policy_loss_with_entropy(
                tokens["old"].float(),
                logps,
                advantages.float(),
                MASK.float(),
                tokens["entropy"].float(),
                cliprange_low=CLIP,
                cliprange_high=0.28,
                clip_ratio_c=ratio_max,
                token_weight_min=0.8,
                token_weight_max=1.0,
                linear=False,
            )
            loss.backward()
            found[name] = {"loss": float(loss.detach()), "gradient": flat(logps.grad)}
    return found


def vimpo(folder: Path, tokens: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One update from the step's start; the actor's loss is verl's."""
    with package(folder):
        utils: Any = sys.modules["verl.utils"]
        utils.as_torch_index = utils.group_mean_std = None  # of other estimators
        algos = importlib.import_module("recipe.vimpo.vimpo_core_algos")
        losses = importlib.import_module("verl.trainer.ppo.core_algos")
        found = {}
        for name, estimator, lam in (("vimpo", "k3", 1.0), ("vimpo-k2", "k2", 0.9)):
            start = tokens["logps"].clone().requires_grad_(True)
            reference = tokens["old"]
            kl = algos.compute_sampled_token_kl_from_log_probs(start, reference, estimator, True)
            advantages, *_ = algos.compute_detached_vimpo_ppo_targets(
                start, reference, kl, MASK, BETA, 1.0, lam
            )
            ratio = torch.exp(start - start.detach())
            of_tokens = -advantages * ratio
            actor = losses.agg_loss(of_tokens, MASK, "token-mean")
            baseline = algos.compute_reward_baseline_by_uid(SCORES, MASK, GROUPS)
            value, *_ = algos.compute_vimpo_loss(
                start, reference, kl, SCORES, MASK, BETA, 1.0, baseline, "token-mean", {}
            )
            loss, _ = algos.compose_vimpo_policy_loss(
                actor, value, False, True, ACTOR_COEF, torch.device("cpu")
            )
            loss.backward()
            found[name] = {
                "loss": float(loss.detach()),
                "gradient": flat(start.grad),
                "estimates": flat(advantages),
            }
    return found


def ucas(folder: Path, tokens: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Any certainties and logits: the old log-probs and the entropies."""
    with package(folder):
        algos = importlib.import_module("verl.trainer.ppo.core_algos")
        advantages, _ = algos.compute_ucas_advantage(
            SCORES.clone(),
            tokens["old"] * MASK,
            tokens["entropy"].clone(),
            MASK,
            torch.tensor(GROUPS).numpy(),
        )
    return {"ucas": {"advantages": flat(advantages)}}


def dars(folder: Path) -> list[list[Any]]:
    """[number correct, samples, schedule, by_std, further samples] of both schedules."""
    source = (folder / "verl/verl/trainer/ppo/ray_dars_trainer.py").read_text()
    start = source.index("def schedule_ET")
    scope: dict[str, Any] = {"math": math}
    exec(source[start : source.index("def select_resample_func")], scope)  # noqa: S102  # theirs
    found = []
    for name, schedule, largest in (("equal", "schedule_ET", 32), ("hardness", "schedule_HW", 64)):
        for num_samples in (4, 8, 16):
            for num_correct in range(num_samples + 1):
                for by_std in (False, True):
                    accuracy = num_correct / num_samples
                    number = scope[schedule](accuracy, num_samples, largest, by_std)
                    found.append([num_correct, num_samples, name, by_std, number])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args().folder
    sys.meta_path.insert(0, Empty())  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn((2, len(LENS), max(LENS)), generator=generator, dtype=torch.float64)
    logps = -noise[0].abs() - 0.05
    entropy = 2.0 * torch.rand(logps.shape, generator=generator, dtype=torch.float64)
    tokens = {"logps": logps, "old": logps - 0.3 * noise[1], "entropy": entropy}
    content = {
        "commits": COMMITS,
        "torch": version("torch"),
        "lens": LENS,
        "groups": GROUPS,
        "labels": LABELS,
        "tokens": {name: flat(values) for name, values in tokens.items()},
        "cases": real(folder / "REAL", tokens)
        | w_reinforce(folder / "RLVR-Decomposed", tokens)
        | reinforce_pp(folder / "OpenRLHF", tokens)
        | maxrl(folder / "maxrl")
        | dgpo(folder / "MathForge")
        | steer(folder / "STEER", tokens)
        | vimpo(folder / "VIMPO", tokens)
        | ucas(folder / "UCAS", tokens),
        "dars": dars(folder / "DARS"),
    }
    Path(__file__).with_name("authors_golden.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()

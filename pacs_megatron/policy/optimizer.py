"""Megatron's optimizer and schedule, with clipping by the global norm and a check for non-finite gradients."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from pacs_megatron.config.schema import OptimizerOptions
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.parallel import cpu_redirects


class Optimizer:
    """Takes one optimizer update per call of `step`."""

    def __init__(
        self,
        options: OptimizerOptions,
        chunks: list[DistributedDataParallel],
        config: TransformerConfig,
        *,
        clip_grad: float,
        total_updates: int,
        megatron_options: Mapping[str, Any],
    ) -> None:
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=clip_grad,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            **megatron_options,
        )
        with cpu_redirects.cuda_type_names():
            self.megatron: MegatronOptimizer = get_megatron_optimizer(
                optimizer_config, chunks, use_gloo_process_groups=torch.cuda.is_available()
            )
        for part in self.optimizers():
            if isinstance(part, DistributedOptimizer) and part.data_parallel_group_gloo is None:
                part.data_parallel_group_gloo = part.data_parallel_group  # on CPU it is a gloo group
        self._clip_grad = clip_grad
        self._create_state()
        warmup = min(options.warmup_updates, max(total_updates - 1, 0))
        self.schedule = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.lr if options.schedule == "constant" else options.min_lr,
            lr_warmup_steps=warmup,
            # The last update has min_lr. A rate of 0 comes after it, or the last update would change nothing.
            lr_decay_steps=max(total_updates, 1) + (options.min_lr == 0),
            lr_decay_style=options.schedule,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=max(total_updates, 1),
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    @property
    def num_updates(self) -> int:
        """Position of the schedule: updates so far, counting planned updates that had no groups."""
        return int(self.schedule.num_steps)

    def optimizers(self) -> Iterator[Any]:
        """Megatron's optimizers; a model with experts has several."""
        yield from getattr(self.megatron, "chained_optimizers", [self.megatron])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Master weights and Adam's state of this rank; in fp32 the master weights are the model's own parameters."""
        for group in self._groups():
            yield from group["params"]
        for part in self.optimizers():
            if part.optimizer is not None:
                yield from (v for state in part.optimizer.state.values() for v in state.values() if torch.is_tensor(v))

    def advance_schedule(self, position: int) -> None:
        """Moves the schedule to `position`, in planned updates: a step with fewer groups than updates skips some."""
        self.schedule.step(increment=max(0, position - self.num_updates))

    @property
    def adam_step(self) -> int:
        """Adam's updates since its moments were 0, for the bias correction."""
        steps = [
            int(entry["step"])
            for part in self.optimizers()
            if part.optimizer is not None
            for entry in (*part.optimizer.state.values(), *part.optimizer.param_groups)
            if "step" in entry
        ]
        return max(steps, default=0)

    def _groups(self) -> list[dict[str, Any]]:
        return [
            group for part in self.optimizers() if part.optimizer is not None for group in part.optimizer.param_groups
        ]

    def set_adam_step(self, step: int) -> None:
        """Inverse of `adam_step`. torch's AdamW counts per parameter, a fused Adam per parameter group."""
        for part in self.optimizers():
            for group in [] if part.optimizer is None else part.optimizer.param_groups:
                if "fused" not in group:
                    group["step"] = step
                    continue
                for parameter in group["params"]:
                    part.optimizer.state[parameter]["step"] = torch.tensor(float(step))

    def _create_state(self) -> None:
        """Creates the moments, so a checkpoint of step 0 has the same tensors as any other."""
        for part in self.optimizers():
            if part.optimizer is None:
                continue
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter.data)
                        state["exp_avg_sq"] = torch.zeros_like(parameter.data)
        self.set_adam_step(0)

    def reset_moments(self) -> None:
        """Adam's moments and step to 0 (after a reference reset); master weights and schedule stay."""
        for part in self.optimizers():
            if part.optimizer is None:
                continue
            for state in part.optimizer.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
        self.set_adam_step(0)

    def zero_grad(self, chunks: list[DistributedDataParallel]) -> None:
        """Call before the backward passes of an update."""
        for chunk in chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> tuple[float, float]:
        """Clip by the global norm and update. Returns (norm before clipping, learning rate used). Collective.

        Raises NonFiniteError on every rank, before any weight changes, when the norm is not finite.
        """
        found_inf = self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if found_inf or not math.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm is {norm} at update {self.num_updates + 1}; no weight was changed; look at the last "
                "rows of metrics.jsonl (score drift, lengths), lower optimizer.lr, or train in fp32 to find the cause"
            )
        self.schedule.step(increment=1)
        if self.clips(norm):
            self._scale_gradients(self._clip_grad / (norm + 1e-6))
        self.megatron.step_with_ready_grads()
        return norm, float(self.schedule.get_lr(self.megatron.param_groups[0]))

    def clips(self, norm: float) -> bool:
        """Whether an update whose gradient has this global norm is scaled down."""
        return 0 < self._clip_grad < norm

    def _scale_gradients(self, factor: float) -> None:
        for part in self.optimizers():
            gradients = [p.grad for p in part.get_parameters() if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)

"""Megatron's optimizer and schedule, with clipping by the global norm.

An update with a gradient that is not finite is rejected before any weight changes.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from pacs_megatron.config.schema import OptimizerOptions
from pacs_megatron.errors import NonFiniteError
from pacs_megatron.parallel import cpu_redirects


class Optimizer:
    """Adam and the schedule of one model on this rank; one update per call of `step`."""

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
        """Builds Megatron's optimizer with moments of 0, and its schedule.

        Args:
            options: of the section `optimizer`.
            chunks: this rank's model chunks.
            config: Megatron's config of the model.
            clip_grad: maximum global gradient norm; 0 disables clipping.
            total_updates: planned updates of the run.
            megatron_options: further fields of Megatron's OptimizerConfig.
        """
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
            # Checkpoints have fp32 weights, so every optimizer can read the checkpoints of every
            # other optimizer.
            store_param_remainders=False,
            **megatron_options,
        )
        with cpu_redirects.cuda_type_names():
            self.megatron: MegatronOptimizer = get_megatron_optimizer(
                optimizer_config, chunks, use_gloo_process_groups=False
            )
        self._clip_grad = clip_grad
        self._create_state()

        # The last update uses min_lr. A min_lr of 0 comes one update later: a rate of 0 changes
        # nothing.
        num_updates = max(total_updates, 1)
        decay_updates = num_updates + 1 if options.min_lr == 0 else num_updates
        self.schedule = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.lr if options.schedule == "constant" else options.min_lr,
            lr_warmup_steps=min(options.warmup_updates, max(total_updates - 1, 0)),
            lr_decay_steps=decay_updates,
            lr_decay_style=options.schedule,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=num_updates,
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

    def adams(self) -> Iterator[Any]:
        """The optimizers inside Megatron's.

        One that is partly off-loaded to the CPU has several.
        """
        for part in self.optimizers():
            if part.optimizer is not None:
                yield from getattr(part.optimizer, "sub_optimizers", [part.optimizer])

    def tensors(self) -> Iterator[torch.Tensor]:
        """Master weights and Adam's state of this rank.

        In fp32 the master weights are the model's own parameters.
        """
        for adam in self.adams():
            for group in adam.param_groups:
                yield from group["params"]
            for state in adam.state.values():
                for value in state.values():
                    if torch.is_tensor(value):
                        yield value

    def advance_schedule(self, position: int) -> None:
        """Moves the schedule forward to `position`, in planned updates.

        A step with too few groups skips some of its updates, and the schedule counts them too.
        """
        missing = max(0, position - self.num_updates)
        self.schedule.step(increment=missing)

    @property
    def adam_step(self) -> int:
        """Number of Adam's updates since its moments were 0, for the bias correction."""
        largest = 0
        for adam in self.adams():
            for entry in (*adam.state.values(), *adam.param_groups):
                largest = max(largest, int(entry.get("step", 0)))
        return largest

    def set_adam_step(self, step: int) -> None:
        """Inverse of `adam_step`.

        torch's AdamW counts per parameter, a fused Adam per parameter group.
        """
        for adam in self.adams():
            for group in adam.param_groups:
                if not isinstance(adam, torch.optim.AdamW):
                    group["step"] = step
                    continue
                for parameter in group["params"]:
                    adam.state[parameter]["step"] = torch.tensor(float(step))

    def _create_state(self) -> None:
        """Creates the moments, so a checkpoint of step 0 has the same tensors as any other."""
        for adam in self.adams():
            for group in adam.param_groups:
                for parameter in group["params"]:
                    _create_moments(adam, parameter)
        self.set_adam_step(0)
        self.share_state(is_loaded=False)

    def share_state(self, *, is_loaded: bool = True) -> None:
        """Copies the state of a partly off-loaded optimizer to the second record of checkpoints.

        Args:
            is_loaded: copy from the second record first, because a checkpoint has filled it.
        """
        for part in self.optimizers():
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                if is_loaded:
                    part.optimizer._sync_hdo_state_to_sub_optimizers()
                part.optimizer._sync_sub_optimizers_state_to_hdo()

    def reload_weights(self) -> None:
        """Sets the master weights to the model's weights."""
        self.megatron.reload_model_params()
        for adam in self.adams():
            for parameter, state in adam.state.items():
                # Megatron does not reload the master weights of FusedAdam.
                if "master_param" in state and state["master_param"] is not parameter:
                    state["master_param"].copy_(parameter.detach())

    def reset_moments(self) -> None:
        """Sets Adam's moments and step to 0, after a reset of the reference.

        Master weights and schedule stay.
        """
        for adam in self.adams():
            for state in adam.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].zero_()
        self.set_adam_step(0)

    def zero_grad(self, chunks: list[DistributedDataParallel]) -> None:
        """Sets the gradient buffers to 0, before a forward_backward."""
        for chunk in chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    @torch.no_grad()
    def step(self) -> tuple[float, float]:
        """Clips by the global norm and updates the weights. Collective.

        Returns:
            The gradient norm before clipping.
            The learning rate of this update.

        Raises:
            NonFiniteError: on every rank, before any weight changes, if the norm is not finite.
        """
        found_inf = self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if found_inf or not math.isfinite(norm):
            raise NonFiniteError(
                f"gradient norm is {norm} at update {self.num_updates + 1}; no weight was changed; "
                "check the last rows of metrics.jsonl (score drift, lengths), lower optimizer.lr, "
                "or train in fp32 to find the cause"
            )

        # The schedule sets the rate of this update, so it moves first.
        self.schedule.step(increment=1)
        if self.clips(norm):
            self._scale_gradients(self._clip_grad / (norm + 1e-6))
        self.megatron.step_with_ready_grads()

        lr = self.schedule.get_lr(self.megatron.param_groups[0])
        return norm, float(lr)

    def clips(self, norm: float) -> bool:
        """Whether an update whose gradient has this global norm is scaled down."""
        return 0 < self._clip_grad < norm

    def _scale_gradients(self, factor: float) -> None:
        for part in self.optimizers():
            # The precision-aware optimizer's gradient has another type than its weight.
            name = "decoupled_grad" if part.config.use_precision_aware_optimizer else "grad"
            gradients = []
            for parameter in part.get_parameters():
                gradient = getattr(parameter, name, None)
                if gradient is not None:
                    gradients.append(gradient)
            if gradients:
                torch._foreach_mul_(gradients, factor)


def _create_moments(adam: Any, parameter: torch.Tensor) -> None:
    """Creates the state of one parameter, if it has none."""
    state = adam.state[parameter]
    if state:
        return
    if getattr(adam, "master_weights", False):
        adam.initialize_state(parameter, store_param_remainders=False)
    else:
        state["exp_avg"] = torch.zeros_like(parameter.data)
        state["exp_avg_sq"] = torch.zeros_like(parameter.data)

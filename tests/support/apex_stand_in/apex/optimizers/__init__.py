"""Apex's fused optimizers."""

from collections.abc import Callable, Iterable
from typing import Any

import amp_C
import torch

from apex.multi_tensor_apply import multi_tensor_applier


class FusedAdam(torch.optim.Optimizer):
    """Adam whose update of all parameters of a group is one kernel; its step counts by group."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad or capturable or master_weights:
            raise RuntimeError("the stand-in has none of these modes")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self.capturable = capturable
        self.master_weights = master_weights
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int)

    def zero_grad(self) -> None:  # type: ignore[override]  (Apex's has no argument)
        if not self.set_grad_none:
            super().zero_grad()
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        if any(value is not None for value in (grads, output_params, scale, grad_norms)):
            raise RuntimeError("FusedAdam.step has no arguments")
        loss = None if closure is None else closure()
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        """One kernel for each type of the group's parameters."""
        lists: dict[torch.dtype, list[list[torch.Tensor]]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter.data).float()
                state["exp_avg_sq"] = torch.zeros_like(parameter.data).float()
            of_type = lists.setdefault(parameter.dtype, [[], [], [], []])
            tensors = (parameter.grad.data, parameter.data, state["exp_avg"], state["exp_avg_sq"])
            for one, tensor in zip(of_type, tensors, strict=True):
                one.append(tensor)

        beta1, beta2 = group["betas"]
        for tensor_lists in lists.values():
            multi_tensor_applier(
                amp_C.multi_tensor_adam,
                self._dummy_overflow_buf,
                tensor_lists,
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["step"],
                self.adam_w_mode,
                1 if group["bias_correction"] else 0,
                group["weight_decay"],
            )


class FusedSGD(torch.optim.SGD):
    """Megatron-Core imports the name; no run here uses it."""

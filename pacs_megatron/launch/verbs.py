"""The table of verbs: the function that runs each one.

Its module is imported when the verb runs, so `--help` is fast.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from pacs_megatron.runtime.waiting import report_wait

VerbFunction: TypeAlias = Callable[..., "str | Iterable[str] | int | tuple[str, int]"]
"""Receives the parsed arguments by name.

Returns the text or lines to print, the exit code, or both.
"""

VERBS: Mapping[str, str] = {
    "train": "launch.train:run_train",
    "eval": "workbench.evaluation.command:run_eval",
    "compare": "workbench.compare.command:run_compare",
    "diversity": "workbench.diversity:run_diversity",
    "export": "launch.runs:export",
    "config show": "config.explain:show",
    "config explain": "config.explain:explain",
    "config schema": "config.explain:schema_json",
    "data preview": "workbench.evaluation.preview:preview_text",
    "convert to-megatron": "convert.commands:to_megatron",
    "convert to-hf": "convert.commands:to_hf",
    "convert verify": "convert.commands:verify",
    "plan": "workbench.plan.command:run_plan",
    "preflight": "workbench.preflight.command:run_preflight",
    "doctor": "workbench.preflight.doctor:report",
    "certify": "workbench.certify.command:run_certify",
    "fetch": "launch.fetch:fetch",
    "submit": "launch.submit:run_submit",
    "status": "launch.runs:status",
    "logs": "launch.runs:log_lines",
    "cancel": "launch.runs:cancel",
    "paper": "workbench.paper.command:run_paper",
}
"""verb -> `module:function` of this package"""

FIT_ON_GPU = "workbench.plan.command:fit_on_gpu"
"""The function of `plan` that `submit` calls, by the same rule as a verb"""

PLAN_TRACE = "workbench.trace.command:trace_plan"
"""The function of `plan --trace`, by the same rule as a verb"""


def function_of(place: str) -> Any:
    """Imports the module of `place`, a value of `VERBS`, and returns the function."""
    module, _, name = place.partition(":")
    with report_wait("for the modules of this command to load"):
        return getattr(importlib.import_module(f"pacs_megatron.{module}"), name)

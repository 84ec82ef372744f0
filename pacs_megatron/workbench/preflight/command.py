"""`preflight`: the checks of a host, or of every rank of a job, before a run."""

from typing import Any

from pacs_megatron.errors import ExitCode
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.workbench.preflight.ranks import run_everywhere
from pacs_megatron.workbench.preflight.run import render


def run_preflight(*, as_json: bool, **options: Any) -> tuple[str, int] | int:
    """Runs all checks.

    Args:
        as_json: whether the text is JSON.
        options: arguments of `run_everywhere`.

    Returns:
        The text to print and the exit code, or the exit code alone on a rank that prints nothing.
    """
    with report_wait("for the checks, which are printed together"):
        checks = run_everywhere(**options)
    failed = any(check.level == "fail" for check in checks)
    code = ExitCode.MISCONFIGURED if failed else ExitCode.OK
    if not checks:
        return code
    return render(checks, as_json=as_json), code

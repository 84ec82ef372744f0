"""`certify`: a tiny run of a configuration beside a reference."""

from typing import Any

from pacs_megatron.errors import ExitCode
from pacs_megatron.workbench.certify.run import certify


def run_certify(**options: Any) -> tuple[str, int] | int:
    """The result in one line with the exit code, or the exit code alone on a rank that does not
    report.
    """
    certificate = certify(**options)
    if certificate is None:
        return ExitCode.OK
    return certificate.line(), ExitCode.OK if certificate.is_green else ExitCode.FAILED

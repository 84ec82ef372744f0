"""Errors injected into the product, for tests of `certify`: each must turn a certificate red, by a
number.
"""

import math
import re

from tests.support.policies.injected_errors.adapters import ADAPTER_ERRORS
from tests.support.policies.injected_errors.batching import BATCHING_ERRORS
from tests.support.policies.injected_errors.conversion import CONVERSION_ERRORS
from tests.support.policies.injected_errors.injection import InjectedError
from tests.support.policies.injected_errors.model import MODEL_ERRORS
from tests.support.policies.injected_errors.objectives import OBJECTIVE_ERRORS
from tests.support.policies.injected_errors.optimizer import OPTIMIZER_ERRORS
from tests.support.policies.injected_errors.passes import PASS_ERRORS
from tests.support.policies.injected_errors.resume import RESUME_ERRORS

INJECTED_ERRORS: dict[str, InjectedError] = {
    **OBJECTIVE_ERRORS,
    **BATCHING_ERRORS,
    **MODEL_ERRORS,
    **PASS_ERRORS,
    **OPTIMIZER_ERRORS,
    **RESUME_ERRORS,
    **CONVERSION_ERRORS,
    **ADAPTER_ERRORS,
}


def is_number(first_deviation: str) -> bool:
    """Whether a certificate's first deviation is a quantity above its tolerance, and not an
    exception, a missing metric or a value that is not finite.
    """
    match = re.search(r" differ by (\S+) \(.*; tolerance \S+\)$", first_deviation)
    return match is not None and math.isfinite(float(match[1]))

import math

import pytest

from pacs_megatron.errors import RewardError
from pacs_megatron.rewards import check_failures, label_of


def test_without_threshold():
    assert label_of(1.0, None) == 1
    assert label_of(0.0, None) == 0
    with pytest.raises(RewardError, match="label_threshold"):
        label_of(0.5, None)


@pytest.mark.parametrize(("reward", "label"), [(0.5, 1), (0.49, 0), (-3.0, 0), (7.0, 1)])
def test_with_threshold(reward, label):
    assert label_of(reward, 0.5) == label


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_non_finite_is_rejected(reward, threshold):
    with pytest.raises(RewardError, match="finite"):
        label_of(reward, threshold)


def test_failure_cap():
    check_failures(["a"] * 5, 100, 0.05)
    check_failures([], 0, 0.0)
    with pytest.raises(
        RewardError, match=r"6 of 100 samples .*share 0\.060.*0\.05.*first reason: timed out"
    ):
        check_failures(["timed out"] * 6, 100, 0.05)
    with pytest.raises(RewardError, match="1 of 1"):
        check_failures(["x"], 1, 0.0)


@pytest.mark.parametrize(
    ("reason", "is_limit"),
    [
        ("no verdict within 0.2 s; the worker was killed", True),
        ("3 attempts failed; the last one: no response within 40 s", True),
        ("raised AttributeError: 'Prompt' object has no attribute 'target'", False),
    ],
)
def test_the_time_limit_is_named_only_where_it_is_the_reason(reason, is_limit):
    with pytest.raises(RewardError) as caught:
        check_failures([reason], 1, 0.0)
    assert ("raise reward.timeout_s" in str(caught.value)) == is_limit

"""Seeds of samples."""

from itertools import product

from pacs_megatron.rollout.requests import sample_seed


def test_every_argument_matters_and_the_value_is_fixed():
    cases = list(
        product([0, 1], [0, 1, 10], ["a", "a|1", "1|a", "0"], [0, 1, 11], ["train", "eval"])
    )
    seeds = {
        sample_seed(run, step, prompt, index, purpose=purpose)
        for run, step, prompt, index, purpose in cases
    }
    assert len(seeds) == len(cases)
    assert all(0 <= seed < 2**63 for seed in seeds)
    # A resumed run must draw the same samples with any later version of this package.
    assert sample_seed(1, 2, "deepscaler/3", 4) == 6690512792925744490

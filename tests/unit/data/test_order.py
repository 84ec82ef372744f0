import itertools
import json
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.data import Ingredient, MixedOrder, PromptOrder
from pacs_megatron.errors import CheckpointError, ConfigError


@st.composite
def runs(draw):
    size = draw(st.integers(1, 30))
    takes = draw(st.lists(st.integers(0, size), max_size=20))
    return size, takes, draw(st.integers(0, 2**40)), draw(st.booleans())


@given(runs())
def test_each_epoch_has_each_prompt_once_and_no_take_repeats_one(run):
    size, takes, seed, shuffle = run
    order = PromptOrder(size, seed, shuffle)
    stream = []
    for n in takes:
        taken = order.take(n)
        assert len(taken) == n
        assert len(set(taken)) == n
        stream += taken
    for start in range(0, len(stream), size):
        epoch = stream[start : start + size]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(size))


@given(runs(), st.data())
def test_resuming_anywhere_continues_the_same_order(run, data):
    size, takes, seed, shuffle = run
    cut = data.draw(st.integers(0, len(takes)))
    undisturbed = PromptOrder(size, seed, shuffle)
    expected = [undisturbed.take(n) for n in takes]
    first = PromptOrder(size, seed, shuffle)
    got = [first.take(n) for n in takes[:cut]]
    second = PromptOrder(size, seed, shuffle)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [second.take(n) for n in takes[cut:]]
    assert got == expected
    assert second.state_dict() == undisturbed.state_dict()


def test_an_epoch_depends_on_seed_and_epoch_only():
    def epochs(seed, sizes):
        order = PromptOrder(60, seed, shuffle=True)
        return [order.take(60) for _ in range(sizes)]

    first = epochs(1, 3)
    assert epochs(1, 3) == first
    assert len({tuple(epoch) for epoch in first + epochs(2, 3)}) == 6
    by_fours = PromptOrder(60, 1, shuffle=True)
    epochs = []
    for _ in range(3):
        takes = [by_fours.take(4) for _ in range(15)]
        epochs.append(list(itertools.chain.from_iterable(takes)))
    assert epochs == first


def test_without_shuffle_the_files_order():
    order = PromptOrder(5, 0, shuffle=False)
    assert [order.take(3) for _ in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]
    assert order.epoch == 1


def test_a_prompt_skipped_at_the_epochs_end_comes_first_in_the_next_take():
    order = PromptOrder(3, 0, shuffle=False)
    assert [order.take(2) for _ in range(4)] == [[0, 1], [2, 0], [1, 2], [0, 1]]
    order = PromptOrder(4, 0, shuffle=False)
    assert [order.take(3) for _ in range(4)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3]]


def test_crossing_skips_what_the_take_holds():
    seeds = [
        seed
        for seed in range(50)
        if PromptOrder(4, seed, True).take(4)[3] in _second_epoch(4, seed)[:2]
    ]
    assert seeds, "no seed exercises the skip"
    for seed in seeds:
        order = PromptOrder(4, seed, shuffle=True)
        order.take(3)
        crossing = order.take(3)
        assert len(set(crossing)) == 3
        assert order.take(3)[0] == crossing[0]


def _second_epoch(size, seed):
    order = PromptOrder(size, seed, shuffle=True)
    order.take(size)
    return order.take(size)


def test_bad_requests():
    with pytest.raises(ConfigError, match="needs 6 different prompts but the data set has 5"):
        PromptOrder(5, 0, True).take(6)


@pytest.mark.parametrize(
    ("change", "name"),
    [((6, 0, True), "num_prompts"), ((5, 1, True), "seed"), ((5, 0, False), "shuffle")],
)
def test_state_of_another_run_is_rejected(change, name):
    state = PromptOrder(5, 0, True).state_dict()
    with pytest.raises(CheckpointError, match=f"the checkpoint has {name}="):
        PromptOrder(*change).load_state_dict(state)


@pytest.mark.parametrize(("saved", "now"), [("a", "b"), ("a", ""), ("", "a")])
def test_state_of_other_content_is_rejected(saved, now):
    with pytest.raises(
        CheckpointError, match=r"has digest='.?', .*, chat template, tokenizer and run\.seed"
    ):
        PromptOrder(5, 0, True, now).load_state_dict(PromptOrder(5, 0, True, saved).state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": 2**70},
        {"position": -5},
        {"position": 6},
        {"position": 1.5},
        {"skipped": [5]},
    ],
)
def test_a_position_outside_of_the_data_is_an_error(change):
    with pytest.raises(
        (ValueError, TypeError, IndexError)
    ):  # the driver's `parsing` names the file
        PromptOrder(5, 0, True).load_state_dict(PromptOrder(5, 0, True).state_dict() | change)


def test_needs_no_torch():
    code = (
        "import sys, pacs_megatron.data.order, pacs_megatron.rewards; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(runs(), st.data())
def test_what_is_put_back_comes_next_and_no_take_repeats_a_prompt(run, data):
    size, takes, seed, shuffle = run
    order = PromptOrder(size, seed, shuffle)
    owed = []
    for n in takes:
        taken = order.take(n)
        assert len(taken) == n == len(set(taken))
        assert set(taken) >= set(owed[:n])
        owed = [prompt for prompt in owed if prompt not in taken]
        back = data.draw(st.lists(st.sampled_from(taken), unique=True)) if taken else []
        order.put_back(back)
        # What an epoch's end left over waits in front of it.
        owed = list(dict.fromkeys(order.state_dict()["skipped"]))


# ---------------------------------------------------------------------------------------- mixtures
@st.composite
def mixtures(draw):
    """(sizes, weights, takes, seed) of which every take fits the data sets."""
    count = draw(st.integers(2, 6))
    weights = draw(
        st.lists(
            st.one_of(st.integers(1, 20).map(float), st.floats(0.01, 100)),
            min_size=count,
            max_size=count,
        )
    )
    sizes = draw(st.lists(st.integers(8, 30), min_size=count, max_size=count))
    takes = draw(st.lists(st.integers(0, 8), max_size=20))
    return sizes, weights, takes, draw(st.integers(0, 2**40))


def mix(sizes, weights, seed, shuffle=True):
    ingredients = []
    for stream, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        order = PromptOrder(size, seed, shuffle, stream=stream)
        ingredients.append(Ingredient(f"set{stream}", weight, order))
    return MixedOrder(ingredients)


@given(mixtures())
def test_a_mixture_has_the_shares_of_its_weights_at_every_prompt(mixture):
    """Tijdeman's theorem: no set is ever a whole prompt away from its share."""
    sizes, weights, takes, seed = mixture
    order = mix(sizes, weights, seed)
    prompts = list(itertools.chain.from_iterable(order.take(n) for n in takes))
    bounds = list(itertools.accumulate(sizes, initial=0))
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    for number, share in enumerate(shares):
        given = 0
        for position, prompt in enumerate(prompts, start=1):
            given += bounds[number] <= prompt < bounds[number + 1]
            assert abs(given - share * position) <= 1 - Fraction(1, 2 * len(sizes) - 2)


@given(mixtures())
def test_each_set_of_a_mixture_has_its_own_order(mixture):
    """For all weights: they only choose the set that is next."""
    sizes, weights, takes, seed = mixture
    order = mix(sizes, weights, seed)
    start = 0
    by_take = [order.take(n) for n in takes]
    for stream, size in enumerate(sizes):
        alone = PromptOrder(size, seed, True, stream=stream)
        for taken in by_take:
            own = [prompt - start for prompt in taken if start <= prompt < start + size]
            assert own == alone.take(len(own))
        start += size


@given(mixtures(), st.data())
def test_a_mixture_resumes_anywhere(mixture, data):
    sizes, weights, takes, seed = mixture
    cut = data.draw(st.integers(0, len(takes)))
    undisturbed = mix(sizes, weights, seed)
    expected = [undisturbed.take(n) for n in takes]
    first = mix(sizes, weights, seed)
    got = [first.take(n) for n in takes[:cut]]
    second = mix(sizes, weights, seed)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [second.take(n) for n in takes[cut:]]
    assert got == expected
    assert second.state_dict() == undisturbed.state_dict()


def test_equal_sets_of_a_mixture_are_shuffled_differently():
    order = mix([30, 30], [1.0, 1.0], seed=5)
    taken = order.take(60)
    first = [prompt for prompt in taken if prompt < 30]
    second = [prompt - 30 for prompt in taken if prompt >= 30]
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert first == PromptOrder(30, 5, True).take(30)


def test_what_a_mixture_gets_back_counts_as_not_given():
    order = mix([8, 8], [3.0, 1.0], seed=0, shuffle=False)
    first = order.take(4)
    assert sorted(first) == [0, 1, 2, 8]
    order.put_back([8, 1])
    second = order.take(2)
    assert sorted(second) == [1, 8]
    assert order.epoch == 0
    order.take(8)
    order.take(8)
    assert order.epoch == 1


def test_other_prompts_of_a_mixture_end_with_its_data():
    order = mix([3, 2], [1.0, 1.0], seed=0, shuffle=False)
    step = order.take(2)
    others = order.take_others(10, step)
    assert sorted([*step, *others]) == [0, 1, 2, 3, 4]
    assert order.take_others(1, [0, 1, 2, 3, 4]) == []


def test_a_set_that_is_smaller_than_its_share_is_named():
    with pytest.raises(
        ConfigError, match=r"needs 6 different prompts of set0, its share of 8, .*5"
    ):
        mix([5, 30], [3.0, 1.0], seed=0).take(8)


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ([5, 6], [1.0, 2.0], r"mixes \[\('set0', 1\.0\), \('set1', 1\.0\)\], this run .*2\.0"),
        ([5, 6, 7], [1.0, 1.0, 1.0], "use the same data sets and weights"),
        ([5, 7], [1.0, 1.0], "has num_prompts=6, this run num_prompts=7"),
    ],
)
def test_the_state_of_another_mixture_is_rejected(sizes, weights, message):
    state = mix([5, 6], [1.0, 1.0], seed=0).state_dict()
    with pytest.raises(CheckpointError, match=message):
        mix(sizes, weights, seed=0).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"mixes \[\], this run"):
        mix(sizes, weights, seed=0).load_state_dict(PromptOrder(5, 0, True).state_dict())

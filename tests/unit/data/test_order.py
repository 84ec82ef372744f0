import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacs_megatron.data import PromptOrder
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

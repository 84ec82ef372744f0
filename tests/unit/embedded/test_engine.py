"""The embedded engine against Hugging Face `generate` and full forwards."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pacs_megatron.contracts import Sample, Stop, WeightReceiver
from pacs_megatron.embedded.engine import Vocabulary
from pacs_megatron.errors import RolloutError, SyncError
from tests.support.ranks import run_ranks
from tests.support.rollout import (
    checkpoint_weights,
    embedded_engine,
    fill,
    random_prompts,
    requests_for,
    sampling,
)
from tests.support.tiny_families import make_family
from tests.support.tiny_models import make_tiny_qwen3, save_tokenizer


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def hf_greedy(model, prompt, max_tokens, eos=258):
    """Greedy response of one prompt by `generate`: unpadded, its own cache and masks."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=eos,
        pad_token_id=256,
    )
    return out[0, len(prompt) :].tolist()


def frequent_token(folder, prompts):
    """A token that greedy responses contain, to play the end token."""
    model = load(folder)
    return hf_greedy(model, prompts[0], 12)[5]


def same(left: Sample, right: Sample) -> bool:
    """Bit for bit."""
    return (
        (left.id, left.prompt_id, left.prompt_len, left.stop, left.spans)
        == (right.id, right.prompt_id, right.prompt_len, right.stop, right.spans)
        and left.token_ids.tobytes() == right.token_ids.tobytes()
        and left.sampler_logprobs.tobytes() == right.sampler_logprobs.tobytes()
    )


def test_it_implements_the_contracts(tiny_qwen3):
    engine = embedded_engine(tiny_qwen3)
    assert isinstance(engine, WeightReceiver)


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_next"])
def test_the_samples_of_a_hybrid_are_those_of_generate(case, tmp_path):
    """Prompts of different lengths are padded; the padding stays out of the delta nets' states."""
    folder = make_family(tmp_path, case, vocab_size=272)
    save_tokenizer(folder)
    prompts = random_prompts(5)
    assert len({len(prompt) for prompt in prompts}) > 1
    model = load(folder)
    eos = frequent_token(folder, prompts)
    engine = embedded_engine(folder, batch_sequences=5, eos=eos)
    requests = requests_for(prompts, params=sampling(temperature=0.0, max_tokens=20))
    for prompt, sample in zip(prompts, engine.stream(requests), strict=True):
        assert sample.response_ids.tolist() == hf_greedy(model, prompt, 20, eos)
        with torch.no_grad():
            ids = torch.from_numpy(sample.token_ids.astype(np.int64))
            logits = model(ids[None]).logits[0, sample.prompt_len - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, ids[sample.prompt_len :, None])[:, 0]
        np.testing.assert_allclose(sample.sampler_logprobs, logprobs.numpy(), atol=1e-5)


def test_greedy_is_token_identical_to_generate(any_tiny_qwen3):
    prompts = random_prompts(9)
    model = load(any_tiny_qwen3)
    eos = frequent_token(any_tiny_qwen3, prompts)
    engine = embedded_engine(any_tiny_qwen3, batch_sequences=5, eos=eos)
    samples = list(
        engine.stream(requests_for(prompts, params=sampling(temperature=0.0, max_tokens=30)))
    )
    assert len(samples) == len(prompts)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert sample.response_ids.tolist() == hf_greedy(model, prompt, 30, eos)
        assert sample.token_ids[: sample.prompt_len].tolist() == prompt
        assert sample.stop == (Stop.EOS if sample.response_ids[-1] == eos else Stop.LENGTH)
    assert {sample.stop for sample in samples} == {
        Stop.EOS,
        Stop.LENGTH,
    }  # so both ways out, and compaction, were taken


def test_a_mixture_of_experts_takes_one_weight_for_each_expert(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        eos_token_id=258,
        pad_token_id=256,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    weights = checkpoint_weights(tmp_path)
    assert any(name.endswith("mlp.experts.3.up_proj.weight") for name, _ in weights)
    prompts = random_prompts(4)
    samples = list(
        embedded_engine(tmp_path).stream(requests_for(prompts, params=sampling(temperature=0.0)))
    )
    for prompt, sample in zip(prompts, samples, strict=True):
        assert sample.response_ids.tolist() == hf_greedy(load(tmp_path), prompt, 12)


def test_log_probs_equal_a_full_forward(any_tiny_qwen3):
    model = load(any_tiny_qwen3)
    samples = list(
        embedded_engine(any_tiny_qwen3, batch_sequences=16).stream(
            requests_for(random_prompts(6), samples=4, params=sampling(max_tokens=40))
        )
    )
    worst = 0.0
    for sample in samples:
        with torch.no_grad():
            logits = model(torch.tensor(sample.token_ids[None], dtype=torch.long)).logits[0]
        logprobs = torch.log_softmax(logits.double(), -1)[sample.prompt_len - 1 : -1]
        expected = logprobs.gather(
            -1, torch.tensor(sample.response_ids[:, None], dtype=torch.long)
        )[:, 0].numpy()
        worst = max(worst, float(np.abs(expected - sample.sampler_logprobs).max()))
        assert sample.sampler_logprobs.dtype == np.float32
        assert sample.token_ids.dtype == np.int32
    assert worst < 2e-5


def test_the_sampled_distribution_is_the_models(tiny_qwen3):
    """First and second token of one prompt, counted,
    against exact probabilities (total variation).
    """
    prompt = random_prompts(1)[0]
    samples = list(
        embedded_engine(tiny_qwen3, batch_sequences=1000).stream(
            requests_for([prompt], samples=4000, params=sampling(max_tokens=2, top_k=4))
        )
    )
    model = load(tiny_qwen3)
    with torch.no_grad():
        first = torch.topk(model(torch.tensor([prompt])).logits[0, -1].double(), 4)
        exact: dict[tuple[int, int], float] = {}
        for token, p in zip(
            first.indices.tolist(), torch.softmax(first.values, -1).tolist(), strict=True
        ):
            second = torch.topk(model(torch.tensor([[*prompt, token]])).logits[0, -1].double(), 4)
            for other, q in zip(
                second.indices.tolist(), torch.softmax(second.values, -1).tolist(), strict=True
            ):
                exact[token, other] = p * q
    seen = [tuple(sample.response_ids.tolist()) for sample in samples]
    assert set(seen) <= exact.keys()
    distance = 0.5 * sum(abs(seen.count(pair) / len(seen) - p) for pair, p in exact.items())
    assert distance < 0.03


def test_bit_identical_for_any_number_of_ranks_and_reproducible(tiny_qwen3):
    requests = requests_for(random_prompts(7), samples=4, params=sampling(max_tokens=20))
    whole = list(embedded_engine(tiny_qwen3, batch_sequences=6).stream(requests))
    assert len({sample.token_ids.tobytes() for sample in whole}) == len(requests)
    for num_ranks in (1, 2, 3):
        shares = [
            list(
                embedded_engine(
                    tiny_qwen3, rank=rank, num_ranks=num_ranks, batch_sequences=6
                ).stream(requests)
            )
            for rank in range(num_ranks)
        ]
        by_id = {}
        for share in shares:
            for sample in share:
                by_id[sample.id] = sample
        assert sum(len(share) for share in shares) == len(by_id) == len(requests)
        assert all(same(by_id[sample.id], sample) for sample in whole)
    other = list(
        embedded_engine(tiny_qwen3, batch_sequences=6).stream(
            requests_for(random_prompts(7), samples=4, params=sampling(max_tokens=20), run_seed=1)
        )
    )
    assert not any(same(left, right) for left, right in zip(whole, other, strict=True))


def test_bit_identical_in_real_ranks(tiny_qwen3):
    requests = requests_for(random_prompts(6), samples=4, params=sampling(max_tokens=20, top_p=0.9))

    def rank_main(rank: int, world_size: int) -> list[Sample]:
        engine = embedded_engine(tiny_qwen3, rank=rank, num_ranks=world_size, batch_sequences=8)
        return list(engine.stream(requests))

    (whole,) = run_ranks(rank_main, 1, init_process_group=False)
    shares = run_ranks(rank_main, 2, init_process_group=False)
    assert [len(share) for share in shares] == [16, 8]
    by_id = {}
    for share in shares:
        for sample in share:
            by_id[sample.id] = sample
    assert all(same(by_id[sample.id], sample) for sample in whole)


def test_tokens_do_not_depend_on_the_chunk_size(tiny_qwen3):
    requests = requests_for(random_prompts(5), samples=3, params=sampling(max_tokens=20))
    small = list(embedded_engine(tiny_qwen3, batch_sequences=2).stream(requests))
    large = list(embedded_engine(tiny_qwen3, batch_sequences=64).stream(requests))
    for left, right in zip(small, large, strict=True):
        assert left.token_ids.tolist() == right.token_ids.tolist()
        np.testing.assert_allclose(left.sampler_logprobs, right.sampler_logprobs, atol=1e-5)


def test_limits_and_stop_strings(tiny_qwen3):
    prompts = random_prompts(4)
    model = load(tiny_qwen3)
    engine = embedded_engine(tiny_qwen3)
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    free = [hf_greedy(model, prompt, 12) for prompt in prompts]
    # A stop string of two tokens from the middle of the third response.
    stop = tokenizer.decode(free[2][4:6])
    first_end = next(i for i in range(1, 13) if stop in tokenizer.decode(free[2][:i]))
    limits: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"max_tokens": 7},
        {"max_tokens": 12, "stop": ("never", stop)},
        {},
    ]
    samples = []
    for prompt, more in zip(prompts, limits, strict=True):
        params = sampling(temperature=0.0, **more)
        samples += engine.stream(requests_for([prompt], params=params))
    assert [sample.response_len for sample in samples] == [1, 7, first_end, 12]
    assert [sample.stop for sample in samples] == [Stop.LENGTH, Stop.LENGTH, Stop.EOS, Stop.LENGTH]
    for sample, tokens in zip(samples, free, strict=True):
        assert sample.response_ids.tolist() == tokens[: sample.response_len]
        assert len(sample.sampler_logprobs) == sample.response_len


def test_limits_and_stop_strings_of_one_batch(tiny_qwen3):
    """Turns of agents: the same tokens as each request has alone."""
    prompts = random_prompts(5)
    engine = embedded_engine(tiny_qwen3, batch_sequences=5)
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    [free] = engine.stream(requests_for(prompts[2:3], params=sampling(max_tokens=12)))
    stop = tokenizer.decode(free.response_ids[4:6].tolist())
    limits: list[dict[str, Any]] = [
        {"max_tokens": 1},
        {"max_tokens": 7},
        {"max_tokens": 12, "stop": (stop,)},
        {"max_tokens": 12, "stop": ("never", "nor this")},
        {"max_tokens": 3, "stop": ("never",)},
    ]
    requests = []
    for number, more in enumerate(limits):
        [request] = requests_for(prompts[number : number + 1], params=sampling(**more))
        requests.append(replace(request, id=f"0:p/{number}#9"))
    together = list(engine.stream(requests))
    for request, sample in zip(requests, together, strict=True):
        [alone] = engine.stream([request])
        assert sample.token_ids.tolist() == alone.token_ids.tolist()
        assert sample.stop is alone.stop
        np.testing.assert_allclose(sample.sampler_logprobs, alone.sampler_logprobs, atol=1e-5)
    assert [len(sample.sampler_logprobs) for sample in together[:2]] == [1, 7]
    assert together[2].stop is Stop.EOS and together[2].response_len < 12


def test_weights_come_only_through_an_update_and_samples_carry_their_version(tiny_qwen3, tmp_path):
    other = make_tiny_qwen3(tmp_path / "other", seed=1)
    requests = requests_for(random_prompts(2), params=sampling(temperature=0.0))
    engine = embedded_engine(tiny_qwen3, filled=False)
    with pytest.raises(RolloutError, match="no complete set of weights"):
        list(engine.stream(requests))
    digests = []
    for version, folder in ((3, other), (4, tiny_qwen3)):
        digests.append(fill(engine, checkpoint_weights(folder), version))
        model = load(folder)
        for request, sample in zip(requests, list(engine.stream(requests)), strict=True):
            assert sample.response_ids.tolist() == hf_greedy(model, request.token_ids.tolist(), 12)
            (span,) = sample.spans
            assert (span.version, span.digest, span.start, span.end) == (
                version,
                digests[-1],
                0,
                sample.response_len,
            )
    assert digests[0] != digests[1]


def test_a_broken_update_names_the_weight_and_stops_sampling(any_tiny_qwen3):
    requests = requests_for(random_prompts(1))
    weights = checkpoint_weights(any_tiny_qwen3)
    name, tensor = weights[3]

    def attempt(sequence, message):
        engine = embedded_engine(any_tiny_qwen3)
        with pytest.raises(SyncError, match=message):
            fill(engine, sequence, 1)
        with pytest.raises(RolloutError, match="no complete set"):
            list(engine.stream(requests))
        fill(engine, weights, 2)  # a complete update repairs it
        assert next(iter(engine.stream(requests))).spans[0].version == 2

    attempt([w for w in weights if w[0] != name], f"without 1 of .* weights, the first is {name}")
    attempt([*weights, (name, tensor)], f"{name} arrived twice")
    attempt(
        [*weights, ("model.layers.9.mlp.up_proj.weight", tensor)],
        r"model\.layers\.9\.mlp\.up_proj\.weight is not in",
    )
    attempt([(n, t[1:] if n == name else t) for n, t in weights], f"{name} has shape .* expects")
    engine = embedded_engine(any_tiny_qwen3)
    engine.begin_update(1)
    for item in weights:
        engine.put(*item)
    with pytest.raises(SyncError, match="expected 00"):
        engine.end_update("00")
    with pytest.raises(SyncError, match="begin_update first"):
        embedded_engine(any_tiny_qwen3).put(name, tensor)


def test_a_tied_weight_may_come_under_both_names_but_not_differ(tiny_qwen3_tied):
    weights = checkpoint_weights(tiny_qwen3_tied)
    rest = [item for item in weights if item[0] != "model.embed_tokens.weight"]
    embedding = ("model.embed_tokens.weight", dict(weights)["model.embed_tokens.weight"])
    head = ("lm_head.weight", embedding[1])
    engine = embedded_engine(tiny_qwen3_tied)
    requests = requests_for(random_prompts(2))
    expected = [sample.token_ids.tolist() for sample in list(engine.stream(requests))]
    for both in ([embedding, head], [head, embedding], [head]):
        fill(engine, [*both, *rest], 1)
        assert [sample.token_ids.tolist() for sample in list(engine.stream(requests))] == expected
    for both in ([embedding, (head[0], head[1] + 1)], [head, (embedding[0], embedding[1] + 1)]):
        with pytest.raises(SyncError, match="tied"):
            fill(engine, [*both, *rest], 2)
    with pytest.raises(SyncError, match=r"the first is model\.embed_tokens\.weight"):
        fill(engine, rest, 2)


def test_vocabulary_of_a_folder(tiny_qwen3):
    vocabulary = Vocabulary.from_tokenizer(
        AutoTokenizer.from_pretrained(tiny_qwen3), str(tiny_qwen3)
    )
    assert vocabulary.eos_token_ids == {258}
    assert vocabulary.pad_token_id == 256
    assert vocabulary.decode([*vocabulary.eos_token_ids]) == "<|im_end|>"


def test_nothing_leaks_into_training(tiny_qwen3):
    """The policy's tensors are copied, the global random state stays, and no inference tensor
    escapes.
    """
    model = load(tiny_qwen3)
    state = torch.get_rng_state()
    engine = embedded_engine(tiny_qwen3, filled=False)
    fill(engine, sorted(model.named_parameters()))
    requests = requests_for(random_prompts(2))
    before = list(engine.stream(requests))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.is_inference_mode_enabled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([before[0].token_ids.tolist()])).logits.square().mean().backward()
    optimizer.step()
    assert all(
        same(left, right) for left, right in zip(before, list(engine.stream(requests)), strict=True)
    )
    fill(engine, sorted(model.named_parameters()), 1)
    after = list(engine.stream(requests))
    assert not any(
        np.array_equal(a.sampler_logprobs, b.sampler_logprobs)
        for a, b in zip(before, after, strict=True)
    )


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "prompt has no tokens"),
        ([5, 272], 4, "prompt token id 272, expected 0 to 271: tokenizer and model"),
        ([5, -1], 4, "prompt token id -1, expected 0 to 271"),
        ([5] * 1000, 25, "1000 prompt tokens .* exceed the model's context of 1024"),
    ],
)
def test_unusable_requests_are_rejected_before_anything_is_sampled(
    tiny_qwen3, prompt, max_tokens, message
):
    requests = requests_for([[1, 2], prompt], params=sampling(max_tokens=max_tokens))
    # Rejected on every rank, so that none waits for another.
    for rank in range(2):
        with pytest.raises(RolloutError, match=message):
            list(
                embedded_engine(tiny_qwen3, rank=rank, num_ranks=2, batch_sequences=1).stream(
                    requests
                )
            )


def test_repeated_ids_and_non_finite_weights(tiny_qwen3):
    engine = embedded_engine(tiny_qwen3)
    request = requests_for([[1, 2, 3]])[0]
    with pytest.raises(RolloutError, match="requested twice"):
        list(engine.stream([request, request]))
    bad = [
        (n, t.clone().fill_(torch.nan) if n == "model.norm.weight" else t)
        for n, t in checkpoint_weights(tiny_qwen3)
    ]
    fill(engine, bad, 5)
    with pytest.raises(RolloutError, match="non-finite logits from weights version 5"):
        list(engine.stream([request]))

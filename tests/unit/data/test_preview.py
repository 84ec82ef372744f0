from pacs_megatron.config.schema import DatasetOptions
from pacs_megatron.data.preview import preview
from pacs_megatron.launch.preview import render


def test_report(samples, data_options, tokenizer):
    dataset = DatasetOptions(path=str(samples / "gsm8k.jsonl"), preset="gsm8k")
    seen = []

    def judge(pairs):
        for prompt, response in reversed(pairs):
            seen.append(response)
            failed = prompt.answer == "-4"
            yield prompt.id, None if failed else float(prompt.answer == "18"), "broke" if failed else None

    report = preview(dataset, data_options(), tokenizer, judge, num_examples=1)
    assert set(seen) == {"The answer is \\boxed{18}.", "The answer is \\boxed{1500}.", "The answer is \\boxed{-4}."}
    assert (report.num_rows, report.num_kept, report.num_too_long, report.num_duplicates) == (3, 3, 0, 0)
    assert (report.num_checked, report.num_verified) == (3, 1)
    assert [(bad.prompt_id, bad.answer, bad.reason) for bad in report.unverified] == [
        ("gsm8k/1", "1500", "reward 0.0"),
        ("gsm8k/2", "-4", "broke"),
    ]
    lens = sorted(len(prompt.token_ids) for prompt in preview(dataset, data_options(), tokenizer, None).examples)
    assert (report.tokens.min, report.tokens.p50, report.tokens.max) == tuple(lens)


def test_without_a_judge_no_answer_counts_as_checked(samples, data_options, tokenizer):
    dataset = DatasetOptions(path=str(samples / "gsm8k.jsonl"), preset="gsm8k")
    report = preview(dataset, data_options(), tokenizer, None)
    assert report.num_checked == 0
    assert "verify" not in render(report)

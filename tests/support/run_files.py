"""The smallest run file that is valid."""

BASE = """\
run:
  name: demo
  steps: 10
model:
  path: some/model
objective:
  name: pacs
  beta: 2
batch:
  prompts_per_step: 8
  samples_per_prompt: 4
  tokens_per_microbatch: 2048
rollout:
  engine: embedded
  sampling:
    max_response_tokens: 512
reward:
  name: math
data:
  max_prompt_tokens: 512
  train:
    path: train.jsonl
    preset: gsm8k
optimizer:
  lr: 1e-6
"""

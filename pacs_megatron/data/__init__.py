"""Data sets to prompts, and the order in which they are trained on."""

from pacs_megatron.data.order import Ingredient, MixedOrder, PromptOrder
from pacs_megatron.data.prompts import PromptSet, ResponseRules, load_prompts, problem_id_of
from pacs_megatron.data.tokenizer import end_tokens, load_tokenizer, stop_token_ids

__all__ = [
    "Ingredient",
    "MixedOrder",
    "PromptOrder",
    "PromptSet",
    "ResponseRules",
    "end_tokens",
    "load_prompts",
    "load_tokenizer",
    "problem_id_of",
    "stop_token_ids",
]

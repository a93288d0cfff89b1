"""Published config.json files of Llama-like models; published_models.py says where they were found."""

from tests.support.published_models import read

LLAMA_2 = read("llama-2-7b")
LLAMA_3_2 = read("llama-3.2-1b")
MISTRAL = read("mistral-7b-v0.1")
QWEN_2_5 = read("qwen2.5-0.5b")
QWEN_3 = read("qwen3-0.6b")

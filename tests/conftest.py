"""What the tests share: the shipped tiny model and world, and a small byte-level BPE model made on the spot."""

import os
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these are CPU tests, in float32

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import rollout
from retriever import BM25, load_corpus, load_questions

ROOT = Path(__file__).resolve().parent.parent
TINY_MODEL, WORLD = ROOT / "data" / "tiny_model", ROOT / "data" / "tinyworld"

torch.set_flush_denormal(True)


@pytest.fixture(scope="session")
def tiny():
    """(model, tokenizer) as shipped."""
    return rollout.load_policy(TINY_MODEL)


@pytest.fixture(scope="session")
def world():
    """(retriever, questions) of the shipped dev world."""
    return BM25(load_corpus(WORLD / "dev_corpus.jsonl")), load_questions(WORLD / "dev.jsonl")


@pytest.fixture(scope="session")
def bpe_tokenizer():
    """Byte-level BPE in which `une`, `?</` and `>\\n` are tokens, so that text alone does not tell where tokens end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["une?</search>\n\n<information>Doc 1", "<think>a</think>\n<search>lune?</search>", "<answer>x</answer>\n"]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<eos>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    tokenizer.train_from_iterator(text * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="session")
def bpe_model(bpe_tokenizer):
    """A model with random weights over the BPE tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=len(bpe_tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=2048)  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


@pytest.fixture
def script(monkeypatch):
    """Make the policy of a single row write given texts: `script(tokenizer, [text or ids, ...])`."""

    def install(tokenizer, texts):
        parts = [tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else text
                 for text in texts]  # fmt: skip
        stream = iter([token for part in parts for token in part])
        monkeypatch.setattr(rollout, "sample", lambda logits, *_: torch.tensor([next(stream)]))

    return install

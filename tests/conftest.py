"""What tests share: the shipped model and world, a byte-level BPE model made here, small runs."""

import json
import os
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these are CPU tests, in float32
if "PYTEST_XDIST_WORKER" in os.environ:  # they run side by side
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import train
from plumbing import data, figures, generation, models
from retriever import BM25
from rollout import RolloutSettings, Sampling, rollout

ROOT = Path(__file__).resolve().parent.parent
TINY_MODEL, WORLD = ROOT / "data" / "tiny_model", ROOT / "data" / "tinyworld"
QUESTION = {"id": "q", "question": "Who?", "golden_answers": ["Nile"], "metadata": {}}
PASSAGES = [
    {"id": "0", "title": "Lune", "text": "The Lune is a river."},
    {"id": "1", "title": "Nile", "text": "Long."},
]

torch.set_flush_denormal(True)


class CountingRetriever(BM25):
    """Remembers the queries it was asked."""

    def __init__(self, passages=PASSAGES):
        super().__init__(passages)
        self.asked = []

    def search(self, queries, k=3):
        self.asked += queries
        return super().search(queries, k)


def play(policy, retriever=None, settings=None, **sampling):
    """One trajectory of QUESTION, with room enough, without self-answers."""
    settings = settings or RolloutSettings(max_turn_tokens=200, max_context=2000)
    sampling = Sampling(self_answers=False, **sampling)
    retriever = retriever or CountingRetriever()
    (trajectory,) = rollout(policy, [QUESTION], retriever, settings, sampling)
    return trajectory


@pytest.fixture(scope="session")
def tiny():
    """The `models.Policy` as shipped."""
    return models.load_policy(TINY_MODEL)


@pytest.fixture(scope="session")
def world():
    """The `data.Task` of the shipped dev world."""
    passages = data.load_corpus(WORLD / "dev_corpus.jsonl")
    return data.Task(data.load_questions(WORLD / "dev.jsonl"), BM25(passages))


@pytest.fixture(scope="session")
def bpe_tokenizer():
    """Byte-level BPE in which `une`, `?</` and `>\\n` are tokens: where one ends, no text tells."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        "une?</search>\n\n<information>Doc 1",
        "<think>a</think>\n<search>lune?</search>",
        "<answer>x</answer>\n",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts * 50, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


@pytest.fixture(scope="session")
def bpe(bpe_tokenizer):
    """A Policy with random weights over the BPE tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(bpe_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
    )
    return models.Policy(Qwen2ForCausalLM(config).eval(), bpe_tokenizer)


@pytest.fixture
def script(monkeypatch):
    """script(tokenizer, [text or ids, ...]) makes the policy of a single row write just these."""

    def install(tokenizer, texts):
        ids = []
        for text in texts:
            is_text = isinstance(text, str)
            ids += tokenizer(text, add_special_tokens=False)["input_ids"] if is_text else text
        stream = iter(ids)

        def draw(sampler, logits):
            return torch.tensor([next(stream)]), torch.zeros(1)

        monkeypatch.setattr(generation.Sampler, "__call__", draw)

    return install


def trainable(model):
    """The parameters that training moves: the adapter's."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def adamw(model, rate=1e-3):
    return torch.optim.AdamW(trainable(model), lr=rate)


@pytest.fixture(scope="session")
def lora():
    """The tiny Policy with a fresh adapter. Tests that move it load their own."""
    torch.manual_seed(0)
    return models.load_trainable(train.TrainSettings())


@pytest.fixture(scope="session")
def played(lora, world):
    """Twelve trajectories of three questions."""
    lora.model.eval()
    sampling = Sampling(num_generations=4, self_answers=False)
    return rollout(lora, world.questions[:3], world.retriever, RolloutSettings(), sampling)


@pytest.fixture
def run_train(monkeypatch):
    """run_train(folder, *options): a small `python train.py` in a folder; returns the run's."""

    def run(folder, *options, curves=False):
        monkeypatch.chdir(folder)
        if not curves:  # drawing takes seconds
            monkeypatch.setattr(figures, "plot_curves", lambda *_: None)
        small = "--num_questions 3 --num_generations 3 --eval_limit 4 --max_searches 2"
        train.main([*small.split(), "--sample_every", "1", *options])
        (made,) = (folder / "runs").iterdir()
        return made

    return run


def log_of(run):
    """The rows of a run's metrics.jsonl, without times. (JSON knows no NaN.)"""
    rows = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line, parse_constant=pytest.fail)
        rows.append({k: v for k, v in row.items() if "seconds" not in k and k != "wall_time"})
    return rows

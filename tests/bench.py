"""Speed: ours beside what one would use instead, measured in one run on one machine.

    python tests/bench.py                          # everything, under ten minutes on two cores
    python tests/bench.py --only rollout bm25      # some of the sections: rollout trl bm25 step scaling
    python tests/bench.py --quick                  # tiny sizes, one run: only to see that it works

Every number is the median of `--runs` runs after one that is not counted; what says "once" was run once. `ratio` is how
many times longer a line takes than ours above it (`scaling`: than the first line of its kind). All sections use the
shipped tiny model and world. The peers of `trl` and `bm25` are optional: pip install trl bm25s (tried: 1.16.0, 0.3.16).
Threads: OMP_NUM_THREADS, else one a physical core. Beside other work set it to 1: threads that wait for each other on
busy cores made the rollouts several times slower here.
"""

import argparse
import functools
import importlib.util
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import psutil
import torch
from rank_bm25 import BM25Okapi
from test_rollout import slow_rollout

import reward
import rollout as ro
from eval import score_trajectory
from retriever import BM25, load_corpus, load_questions, tokenise
from rollout import Clock, RolloutSettings, Trajectory, Turn, encode, rollout
from train import (
    TrainSettings,
    group_advantages,
    inference_weights,
    length_of,
    load_model,
    rewards_of,
    update,
)


@dataclass
class Sizes:
    """What is measured. G = `num_generations` rollouts of each question."""

    runs: int = 3
    questions: int = 8
    num_generations: int = 8
    max_searches: int = 4
    passages: tuple = (1_000, 10_000, 66_000)
    queries: int = 200
    rank_bm25_queries: int = 5  # it needs a third of a second for one
    scaling_rollouts: tuple = (32, 64, 128)
    scaling_searches: tuple = (1, 2, 4)
    scaling_topk: tuple = (1, 3, 5)


QUICK = Sizes(runs=1, questions=2, num_generations=2, max_searches=1, passages=(100,), queries=3, rank_bm25_queries=3,
              scaling_rollouts=(2, 4), scaling_searches=(1, 2), scaling_topk=(1, 3))  # fmt: skip


def timed(function, runs):
    """(median seconds of `runs` calls, the last result). With more than one run, a call before them is not counted."""
    seconds = []
    for _ in range(runs + (runs > 1)):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[-runs:]), result


def row(what, value, unit="s", ratio=None, note=""):
    """A line of the table, printed as soon as it is known."""
    number = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    print(f"| {what} | {number} {unit} | {f'{ratio:.3g}x' if ratio else ''} | {note} |", flush=True)


def is_missing(package):
    """Whether an optional peer is not installed; the table says so."""
    missing = importlib.util.find_spec(package) is None
    if missing:
        print(f"| {package}: skipped, not installed | | | pip install {package} |", flush=True)
    return missing


def world(split="dev"):
    """(retriever, questions) of the tiny world."""
    corpus, questions = (
        ro.locate(f"data/tinyworld/{split}{name}.jsonl") for name in ("_corpus", "")
    )
    return BM25(load_corpus(corpus)), load_questions(questions)


# Rollouts


def generate_rollout(
    model, tokenizer, questions, retriever, settings, temperature, self_answers=True
):
    """The same search loop on transformers' `generate`, as one writes it for TRL's `rollout_func`: in every turn the
    whole histories go through the model again, left-padded in one batch that finished rows have left. Self-answers are
    a second `generate`. Returns one Trajectory per question; greedy, its ids are ours.
    """
    prompts = [ro.encode_prompt(tokenizer, question["question"]) for question in questions]
    live = trajectories = [
        Trajectory(question, prompt_ids=prompt) for question, prompt in zip(questions, prompts)
    ]

    def write(limit, tags, probe=()):
        histories = [
            trajectory.prompt_ids + trajectory.completion_ids + [*probe] for trajectory in live
        ]
        return generate(model, tokenizer, histories, limit, tags, temperature)

    for turns_left in reversed(range(settings.max_searches + 1)):
        for trajectory, ids in zip(
            live, write(settings.max_turn_tokens, ("</search>", "</answer>"))
        ):
            trajectory.append(ids, sampled=True)
            text = tokenizer.decode(ids)
            trajectory.turns.append(Turn(text, reward.parse_action(text)[0]))
        observations = ro.observe(live, retriever, tokenizer, settings, turns_left)
        live = [trajectory for trajectory, observation in zip(live, observations) if observation]
        if not live:
            break
        for trajectory, observation in zip(live, filter(None, observations)):
            trajectory.append(observation, sampled=False)
        if self_answers:
            answers = write(
                settings.max_self_answer_tokens, ("</answer>",), encode(tokenizer, ro.PROBE)
            )
            for trajectory, ids in zip(live, answers):
                trajectory.turns[-1].self_answer = tokenizer.decode(ids)
    return trajectories


def generate(model, tokenizer, rows, limit, tags, temperature):
    """`model.generate` on rows of ids. It ends at the tags' ids, which is cheaper than `stop_strings` and right for the
    tiny model, whose tags are one token each. Returns the new ids of each row."""
    stops = [tokenizer.eos_token_id, *(encode(tokenizer, tag)[0] for tag in tags)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device
    )
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 0}
        if temperature
        else {"do_sample": False}
    )
    output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=limit, eos_token_id=stops,
                            pad_token_id=tokenizer.pad_token_id, **sampling)  # fmt: skip
    ends = [
        next((i for i, token in enumerate(row) if token in stops), limit)
        for row in output[:, width:].tolist()
    ]
    return [row[: end + 1] for row, end in zip(output[:, width:].tolist(), ends)]


def bench_rollout(sizes):
    """Greedy, so that all write the same ids, which is checked; self-answers on all sides."""
    model, tokenizer = ro.load_policy(ro.locate("data/tiny_model"))
    retriever, questions = world()
    questions, G = questions[: sizes.questions], sizes.num_generations
    settings = RolloutSettings(max_searches=sizes.max_searches)
    everything = (
        model,
        tokenizer,
        [question for question in questions for _ in range(G)],
        retriever,
        settings,
    )
    ours, trajectories = timed(
        lambda: rollout(model, tokenizer, questions, retriever, settings, G, 0.0), sizes.runs
    )
    ids = [trajectory.completion_ids for trajectory in trajectories]
    row(f"{len(ids)} rollouts: ours", ours, note=lengths(trajectories))

    seconds, theirs = timed(lambda: generate_rollout(*everything, 0.0), sizes.runs)
    assert ids == [trajectory.completion_ids for trajectory in theirs], (
        "`generate` writes other tokens than ours"
    )
    row(
        f"{len(ids)} rollouts: `generate` anew every turn, all rows",
        seconds,
        ratio=seconds / ours,
        note="same ids",
    )

    one_by_one = {
        "`generate` anew every turn, row by row": lambda question: generate_rollout(
            model, tokenizer, [question], retriever, settings, 0.0)[0].completion_ids,
        "the tests' slow reference, anew every token, row by row": lambda question: slow_rollout(
            model, tokenizer, question, retriever, settings)[0],
    }  # fmt: skip
    for name, play in one_by_one.items():
        seconds, theirs = timed(lambda: list(map(play, questions)), 1)  # noqa: B023
        assert ids[::G] == theirs, f"{name}: other tokens than ours"
        row(f"{len(ids)} rollouts: {name}", G * seconds, ratio=G * seconds / ours,
            note=f"same ids; once, one rollout of each question, times {G}")  # fmt: skip


# A whole step


def load_trainable():
    """(model, tokenizer, optimizer): the tiny model with a fresh adapter as train.py has it, at learning rate 0."""
    torch.manual_seed(0)
    model, tokenizer = load_model(TrainSettings(load_in_4bit=False))
    return (
        model.train(),
        tokenizer,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0),
    )


def grpo_step(policy, questions, retriever, settings, G, self_answers=True, seed=0):
    """A step as `train.train` makes it, but at learning rate 0, so that all steps are alike.

    Returns (trajectories, seconds by phase, share of padding in the update).
    """
    model, tokenizer, optimizer = policy
    clock = Clock()
    with inference_weights(model):
        trajectories = rollout(model, tokenizer, questions, retriever, settings, G, self_answers=self_answers,
                               seed=seed, phase_seconds=clock.seconds)  # fmt: skip
    with clock("score"):
        rewards = rewards_of([score_trajectory(trajectory) for trajectory in trajectories])
        advantages = group_advantages(rewards, G)
    with clock("update"):
        stats = update(model, optimizer, trajectories, advantages, 0.0, TrainSettings())
    return trajectories, clock.seconds, stats["padding"]


def lengths(trajectories):
    return f"{sum(map(length_of, trajectories)) / len(trajectories):.0f} tokens a rollout"


def bench_trl(sizes):
    """The same step in TRL's GRPOTrainer: same model, adapter, questions, lengths, micro-batches, search loop, reward;
    sampled at temperature 1. TRL's side is what its manual leads to: `generate`, with the adapter as it is.
    """
    if is_missing("trl"):
        return
    retriever, questions = world()
    questions, G = questions[: sizes.questions], sizes.num_generations
    settings = RolloutSettings(max_searches=sizes.max_searches)
    policy, number = load_trainable(), len(questions) * G
    for self_answers in (False, True):
        played, asked = [], "with" if self_answers else "without"

        def step(played=played, self_answers=self_answers):  # each with a seed of its own, as TRL's
            played += grpo_step(
                policy, questions, retriever, settings, G, self_answers, seed=len(played)
            )[0]

        ours, _ = timed(step, sizes.runs)
        row(f"step of {number} rollouts {asked} self-answers: ours", ours, note=lengths(played))
        theirs, generating, played = trl_steps(
            questions, retriever, settings, G, self_answers, sizes.runs
        )
        row(f"step of {number} rollouts {asked} self-answers: TRL", theirs, ratio=theirs / ours,
            note=f"{lengths(played)}; {generating:.3g} s in `rollout_func`")  # fmt: skip


def trl_steps(questions, retriever, settings, G, self_answers, runs):
    """(median seconds of a step, of `rollout_func` in it, all trajectories) of TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer, _ = load_trainable()
    by_text = {question["question"]: question for question in questions}
    ends, generating, played = [], [], []

    class StepEnds(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    def rollout_func(prompts, trainer):
        start, rows = (
            time.perf_counter(),
            [by_text[prompt] for prompt in prompts],
        )  # a row for each rollout
        new = generate_rollout(
            trainer.model, tokenizer, rows, retriever, settings, 1.0, self_answers
        )
        generating.append(time.perf_counter() - start)
        played.extend(new)
        return {"prompt_ids": [t.prompt_ids for t in new], "completion_ids": [t.completion_ids for t in new],
                "env_mask": [t.completion_mask for t in new], "logprobs": None, "trajectory": new}  # fmt: skip

    def total_reward(completions, trajectory, **_):
        return [score_trajectory(t).total for t in trajectory]

    ours, size = TrainSettings(), len(questions) * G
    micro_batch = min(ours.micro_batch_size, size)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig(
            folder, max_steps=max(runs, 1) + 1, per_device_train_batch_size=micro_batch, num_generations=G,
            gradient_accumulation_steps=size // micro_batch, max_completion_length=settings.max_context,
            temperature=1.0, learning_rate=0.0, beta=0.0, epsilon=ours.epsilon, max_grad_norm=ours.max_grad_norm,
            gradient_checkpointing=False, bf16=False, use_cpu=not torch.cuda.is_available(), save_strategy="no",
            report_to="none", logging_steps=10**6, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model,
            total_reward,
            config,
            processing_class=tokenizer,
            rollout_func=rollout_func,
            train_dataset=Dataset.from_dict({"prompt": list(by_text)}),
            callbacks=[StepEnds()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    steps = [end - start for start, end in zip(ends, ends[1:])]
    return statistics.median(steps), statistics.median(generating[1:]), played


def bench_step(sizes):
    """Where the time of train.py's default step goes, and what share of the machine's arithmetic the update reaches."""
    policy, (retriever, questions) = load_trainable(), world("train")
    questions, G = questions[: sizes.questions * 3 // 2], sizes.num_generations
    settings, all_seconds = RolloutSettings(max_searches=sizes.max_searches), []

    def step():
        trajectories, seconds, padding = grpo_step(policy, questions, retriever, settings, G)
        all_seconds.append(seconds)
        return trajectories, padding

    total, (trajectories, padding) = timed(step, sizes.runs)
    seconds = {
        phase: statistics.median(s[phase] for s in all_seconds[-sizes.runs :])
        for phase in all_seconds[0]
    }
    row(f"step of {len(trajectories)} rollouts", total, note=lengths(trajectories))
    for phase, value in seconds.items():
        row(f"- {phase}", value, note=f"{value / total:.0%} of the step")
    playing = seconds["rollout"] + seconds["self_answer"] + seconds["search"]
    row("self-answers' share of the time of rollouts", 100 * seconds["self_answer"] / playing, "%")
    row("padding in the update's micro-batches", 100 * padding, "%")
    sampled, in_rollouts = rollout_tokens(policy[1], trajectories, G)
    in_update = sum(map(length_of, trajectories))
    row(
        "sampled tokens",
        sampled / playing,
        "a second of rollouts",
        note=f"{sampled:,}, with self-answers",
    )
    row("tokens through the model", (in_rollouts + in_update) / total, "a second of the step",
        note=f"{in_rollouts:,} in rollouts, {in_update:,} in the update")  # fmt: skip
    flops, rate = update_flops(policy[0], trajectories), matmul_rate()
    row("matrix product", rate / 1e9, "GFLOP/s", note="1024 x 1024")
    row("update", flops / seconds["update"] / 1e9, "GFLOP/s", note=f"{flops / 1e9:.3g} GFLOP")
    row("update's share of the matrix product's rate", 100 * flops / seconds["update"] / rate, "%")


def rollout_tokens(tokenizer, trajectories, G):
    """(sampled tokens, tokens through the model) of a batch of rollouts. No token goes through it twice, and the last
    one of a trajectory or self-answer not at all: tests/test_rollout.py counts."""
    answers = [
        turn.self_answer for t in trajectories for turn in t.turns if turn.self_answer is not None
    ]
    in_answers = sum(len(encode(tokenizer, answer)) for answer in answers)
    prompts = sum(len(t.prompt_ids) for t in trajectories[::G])
    completions = sum(len(t.completion_ids) - 1 for t in trajectories)
    branches = in_answers + len(answers) * (len(encode(tokenizer, ro.PROBE)) - 1)
    return sum(t.tokens for t in trajectories) + in_answers, prompts + completions + branches


def update_flops(model, trajectories):
    """Floating-point operations that an update needs, counted from shapes; padding and elementwise work do not count.

    A matrix of `w` weights costs 2 w operations a position forward and 2 w backward for the gradient of its input; the
    adapter's also 2 w for their own gradient, which the frozen ones do not have. The output matrix counts at sampled
    positions only. Causal attention over T positions: two matrix products forward and four backward, each of 2 d
    operations for T (T + 1) / 2 pairs, in every layer. (The first layer's inputs need no gradient: counted, under 3%.)
    """
    lm = model.get_base_model()
    config, output = lm.config, lm.get_output_embeddings().weight
    matrices = [p for p in model.parameters() if p.dim() == 2 and p.shape != output.shape]
    per_position, total = sum(p.numel() * (6 if p.requires_grad else 4) for p in matrices), 0
    for trajectory in trajectories:
        T = length_of(trajectory)
        attention = config.num_hidden_layers * 6 * 2 * config.hidden_size * T * (T + 1) // 2
        total += T * per_position + attention + 4 * output.numel() * trajectory.tokens
    return total


def matmul_rate(size=1024):
    """Operations a second of the machine's product of two square matrices: float32, on a GPU bfloat16."""
    cuda = torch.cuda.is_available()
    options = {"device": "cuda", "dtype": torch.bfloat16} if cuda else {}
    a, b = torch.randn(size, size, **options), torch.randn(size, size, **options)

    def multiply():
        for _ in range(20):
            product = a @ b
        return product[0, 0].item()  # waits for a GPU

    return 20 * 2 * size**3 / timed(multiply, 5)[0]


def bench_scaling(sizes):
    """How a step grows with the rollouts, the searches and the passages."""
    policy, (retriever, questions) = load_trainable(), world("train")
    G, base = sizes.num_generations, RolloutSettings(max_searches=sizes.max_searches)
    studies = {
        "rollouts": [(n, n // G, base) for n in sizes.scaling_rollouts],
        "searches at most": [
            (n, sizes.questions, replace(base, max_searches=n)) for n in sizes.scaling_searches
        ],
        "passages a search": [
            (n, sizes.questions, replace(base, topk=n)) for n in sizes.scaling_topk
        ],
    }
    for name, points in studies.items():
        first = None
        for n, number, settings in points:
            step = functools.partial(grpo_step, policy, questions[:number], retriever, settings, G)
            seconds, (trajectories, phases, _) = timed(step, sizes.runs)
            first = first or seconds
            row(f"step, {n} {name}", seconds, ratio=seconds / first,
                note=f"{lengths(trajectories)}; update {phases['update']:.2g} s")  # fmt: skip


# BM25


def bench_bm25(sizes):
    """Texts of 60 to 140 words, drawn as often as they stand in the tiny world. It has 370 different words: many stand
    in a quarter of the passages and more, the hard case for postings."""
    retriever, questions = world()
    words = [
        word
        for passage in retriever.passages
        for word in tokenise(f"{passage['title']} {passage['text']}")
    ]
    queries = [question["question"] for question in questions[: sizes.queries]]
    for n in sizes.passages:
        rng = random.Random(0)
        bm25_at(
            [" ".join(rng.choices(words, k=rng.randint(60, 140))) for _ in range(n)], queries, sizes
        )


def bm25_at(texts, queries, sizes):
    """All get the same tokens and the queries in one call, and none has cached any."""
    passages = [{"id": str(i), "title": "", "text": text} for i, text in enumerate(texts)]
    few, label = queries[: sizes.rank_bm25_queries], f"BM25, {len(texts):,} passages"

    def search():
        bm25._cache.clear()
        bm25.search(queries, k=3)

    build, bm25 = timed(lambda: BM25(passages), 1)
    ours = timed(search, sizes.runs)[0] / len(queries)
    row(f"{label}: ours", 1000 * ours, "ms a query", note=f"built once in {build:.2g} s")

    build, okapi = timed(lambda: BM25Okapi(list(map(tokenise, texts))), 1)
    theirs = timed(lambda: [okapi.get_scores(tokenise(query)) for query in few], sizes.runs)[
        0
    ] / len(few)
    row(f"{label}: rank-bm25", 1000 * theirs, "ms a query", theirs / ours,
        f"built once in {build:.2g} s; same top 3: {same_top(bm25, okapi, few)} of {len(few)} queries")  # fmt: skip

    if not is_missing("bm25s"):
        from bm25s import BM25 as BM25S

        index = BM25S(method="lucene", k1=1.5, b=0.75)
        build, _ = timed(lambda: index.index(list(map(tokenise, texts)), show_progress=False), 1)
        seconds, _ = timed(
            lambda: index.retrieve(list(map(tokenise, queries)), k=3, show_progress=False),
            sizes.runs,
        )
        theirs = seconds / len(queries)
        row(
            f"{label}: bm25s",
            1000 * theirs,
            "ms a query",
            theirs / ours,
            f"built once in {build:.2g} s",
        )


def same_top(bm25, okapi, queries):
    """For how many queries rank-bm25's best three passages are ours, with the idf of retriever.py's point 1."""
    df, N = np.diff(bm25.starts), len(bm25.passages)
    okapi.idf = {
        word: math.log(1 + (N - df[w] + 0.5) / (df[w] + 0.5)) for word, w in bm25.words.items()
    }
    tops = [
        np.argsort(-okapi.get_scores(tokenise(query)), kind="stable")[:3].tolist()
        for query in queries
    ]
    ours = [[int(hit["id"]) for hit in hits] for hits in bm25.search(queries, k=3)]
    return sum(top == hits for top, hits in zip(tops, ours))


SECTIONS = {"rollout": bench_rollout, "trl": bench_trl, "bm25": bench_bm25, "step": bench_step,
            "scaling": bench_scaling}  # fmt: skip


def header():
    """Set the threads, OMP_NUM_THREADS or one a physical core, and print what the numbers depend on."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores))
    torch.set_flush_denormal(True)
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "peft", "numpy", "rank-bm25", "trl", "bm25s"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else torch.backends.cpu.get_cpu_capability()
    )
    print(", ".join(versions))
    print(f"{platform.machine()} {device}, {cores} physical cores, {torch.get_num_threads()} threads; load average "
          f"{psutil.getloadavg()[0]:.2f} (what else runs on the machine spoils the numbers)\n")  # fmt: skip


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run"
    )
    parser.add_argument(
        "--runs", type=int, help=f"runs of which the median is shown (default: {Sizes.runs})"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one run: only to see that it works"
    )
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    sizes = replace(sizes, runs=options.runs or sizes.runs)
    header()
    start = time.perf_counter()
    print("| what | measured | ratio | |\n|---|---|---|---|")
    for name in options.only:
        SECTIONS[name](sizes)
    print(
        f"\n{time.perf_counter() - start:.0f} s in all; load average now {psutil.getloadavg()[0]:.2f}"
    )


if __name__ == "__main__":
    main()

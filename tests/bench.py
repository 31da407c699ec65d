"""Speed: ours beside what one would use instead, measured in one run on one machine.

    python tests/bench.py                        # everything, under ten minutes on two cores
    python tests/bench.py --only rollout bm25    # of the sections rollout trl bm25 step scaling
    python tests/bench.py --quick                # tiny sizes, one run: only to see that it works

Every number is the median of `--runs` runs after one that is not counted; what says "once" was run
once. `ratio` is how many times longer a line takes than ours above it (`scaling`: than the first
line of its kind). All sections use the shipped tiny model and world. The peers of `trl` and `bm25`
are optional: pip install trl bm25s (tried: 1.16.0, 0.3.16). Threads: OMP_NUM_THREADS, else one a
physical core. Beside other work set it to 1: threads that wait for each other on busy cores made
the rollouts several times slower here.
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
from plumbing import adapters, data, files, logs, models
from plumbing.models import encode
from plumbing.prompts import encode_prompt
from retriever import BM25, tokenise
from rollout import RolloutSettings, Sampling, Trajectory, Turn, rollout
from train import TrainSettings, group_advantages, total_rewards, update


@dataclass
class Sizes:
    """What is measured. G = `num_generations` rollouts of each question."""

    runs: int = 3
    questions: int = 8
    num_generations: int = 8
    max_searches: int = 4
    passages: tuple = (1_000, 10_000, 66_000, 500_000)
    queries: int = 200
    rank_bm25_queries: int = 5  # it needs a third of a second for one
    scaling_rollouts: tuple = (32, 64, 128)
    scaling_searches: tuple = (1, 2, 4)
    scaling_topk: tuple = (1, 3, 5)


QUICK = Sizes(1, 2, 2, 1, (100,), 3, 3, (2, 4), (1, 2), (1, 3))


def timed(function, runs):
    """(median seconds of `runs` calls, the last result); one before them is not counted if > 1."""
    seconds = []
    for _ in range(runs + (runs > 1)):
        start = time.perf_counter()
        result = function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[-runs:]), result


def row(what, value, unit="s", ratio=None, note=""):
    """A line of the table, printed as soon as it is known."""
    number = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    times = f"{ratio:.3g}x" if ratio else ""
    print(f"| {what} | {number} {unit} | {times} | {note} |", flush=True)


def is_missing(package):
    """Whether an optional peer is not installed; the table says so."""
    missing = importlib.util.find_spec(package) is None
    if missing:
        print(f"| {package}: skipped, not installed | | | pip install {package} |", flush=True)
    return missing


def load_world(split="dev"):
    """The `data.Task` of the tiny world."""
    corpus = files.locate(f"data/tinyworld/{split}_corpus.jsonl")
    questions = data.load_questions(f"data/tinyworld/{split}.jsonl")
    return data.Task(questions, BM25(data.load_corpus(corpus)))


# Rollouts


def generate_rollout(policy, questions, retriever, settings, temperature, self_answers=True):
    """The same search loop on transformers' `generate`, as one writes it for TRL's `rollout_func`.

    In every turn the whole histories go through the model again, left-padded in one batch that
    finished rows have left. Self-answers are a second `generate`. Returns one Trajectory per
    question; greedy, its ids are ours."""
    tokenizer, live = policy.tokenizer, []
    for question in questions:
        prompt = encode_prompt(tokenizer, question["question"], ro.SYSTEM_PROMPT)
        live.append(Trajectory(question, prompt_ids=prompt))
    trajectories, probe = live, encode(tokenizer, ro.PROBE)
    for turns_left in reversed(range(settings.max_searches + 1)):
        histories = [t.prompt_ids + t.completion_ids for t in live]
        limit, tags = settings.max_turn_tokens, ("</search>", "</answer>")
        for trajectory, ids in zip(live, generate(policy, histories, limit, tags, temperature)):
            trajectory.append(ids, sampled=True)
            text = tokenizer.decode(ids)
            trajectory.turns.append(Turn(text, reward.parse_action(text)[0]))
        if turns_left > 0:
            ro.run_searches(live, retriever, settings)
        shown = [ro.observe(trajectory, tokenizer, settings, turns_left) for trajectory in live]
        live = [trajectory for trajectory, ids in zip(live, shown) if ids]
        if not live:
            break
        for trajectory, ids in zip(live, filter(None, shown)):
            trajectory.append(ids, sampled=False)
        if self_answers:
            histories = [t.prompt_ids + t.completion_ids + probe for t in live]
            limit, tags = settings.max_self_answer_tokens, ("</answer>",)
            answers = generate(policy, histories, limit, tags, temperature)
            for trajectory, ids in zip(live, answers):
                trajectory.turns[-1].self_answer = tokenizer.decode(ids)
    return trajectories


def generate(policy, rows, limit, tags, temperature):
    """`model.generate` on rows of ids; returns the new ids of each row.

    It ends at the tags' ids, which is cheaper than `stop_strings` and right for the tiny model,
    whose tags are one token each."""
    tokenizer, device = policy.tokenizer, policy.model.device
    stops = [tokenizer.eos_token_id, *(encode(tokenizer, tag)[0] for tag in tags)]
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    how = {"max_new_tokens": limit, "eos_token_id": stops, "pad_token_id": tokenizer.pad_token_id}
    how |= {"attention_mask": torch.tensor(mask, device=device), "do_sample": temperature > 0}
    if temperature:
        how |= {"temperature": temperature, "top_k": 0}
    output = policy.model.generate(input_ids=torch.tensor(ids, device=device), **how)
    written = []
    for new in output[:, width:].tolist():
        ends = [i for i, token in enumerate(new) if token in stops]
        written.append(new[: ends[0] + 1] if ends else new)
    return written


def bench_rollout(sizes):
    """Greedy, so that all write the same ids, which is checked; self-answers on all sides."""
    policy, task = models.load_policy(files.locate("data/tiny_model")), load_world()
    questions, G = task.questions[: sizes.questions], sizes.num_generations
    settings = RolloutSettings(max_searches=sizes.max_searches)
    greedy, number = Sampling(G, temperature=0.0), len(questions) * G

    def play():
        return rollout(policy, questions, task.retriever, settings, greedy)

    def play_by_generate(chosen):
        played = generate_rollout(policy, chosen, task.retriever, settings, 0.0)
        return [trajectory.completion_ids for trajectory in played]

    def play_slowly(chosen):
        return [slow_rollout(policy, chosen[0], task.retriever, settings)[0]]

    ours, trajectories = timed(play, sizes.runs)
    ids = [trajectory.completion_ids for trajectory in trajectories]
    row(f"{number} rollouts: ours", ours, note=lengths(trajectories))

    repeated = [question for question in questions for _ in range(G)]
    seconds, theirs = timed(lambda: play_by_generate(repeated), sizes.runs)
    assert ids == theirs, "`generate` writes other tokens than ours"
    name = f"{number} rollouts: `generate` anew every turn, all rows"
    row(name, seconds, ratio=seconds / ours, note="same ids")

    one_by_one = {"`generate` anew every turn, row by row": play_by_generate}
    one_by_one["the tests' slow reference, anew every token, row by row"] = play_slowly
    note = f"same ids; once, one rollout of each question, times {G}"
    for name, method in one_by_one.items():
        start, theirs = time.perf_counter(), []
        for question in questions:
            theirs += method([question])
        seconds = G * (time.perf_counter() - start)
        assert ids[::G] == theirs, f"{name}: other tokens than ours"
        row(f"{number} rollouts: {name}", seconds, ratio=seconds / ours, note=note)


# A whole step


def load_trainable():
    """(Policy, optimizer): the tiny model with a fresh adapter as train.py has it, at rate 0."""
    torch.manual_seed(0)
    policy = models.load_trainable(TrainSettings(load_in_4bit=False))
    parameters = [p for p in policy.model.train().parameters() if p.requires_grad]
    return policy, torch.optim.AdamW(parameters, lr=0.0)


def grpo_step(trainable, questions, retriever, settings, sampling):
    """A step as `train.train` makes it, but at learning rate 0, so that all steps are alike.

    Returns (trajectories, seconds by phase, share of padding in the update)."""
    policy, optimizer = trainable
    clock = logs.Clock()
    with adapters.inference_weights(policy.model):
        trajectories = rollout(policy, questions, retriever, settings, sampling, clock)
    with clock("score"):
        scores = [trajectory.score() for trajectory in trajectories]
        rewards = total_rewards(scores, trajectories)
        advantages = group_advantages(rewards, sampling.num_generations)
    with clock("update"):
        stats = update(policy.model, optimizer, trajectories, advantages, 0.0, TrainSettings())
    return trajectories, clock.seconds, stats["padding"]


def lengths(trajectories):
    return f"{sum(map(len, trajectories)) / len(trajectories):.0f} tokens a rollout"


def bench_trl(sizes):
    """The same step in TRL's GRPOTrainer, sampled at temperature 1.

    Same model, adapter, questions, lengths, micro-batches, search loop, reward. TRL's side is what
    its manual leads to: `generate`, with the adapter as it is."""
    if is_missing("trl"):
        return
    task, trainable = load_world(), load_trainable()
    task = data.Task(task.questions[: sizes.questions], task.retriever)
    settings = RolloutSettings(max_searches=sizes.max_searches)
    for self_answers in (False, True):
        sampling = Sampling(sizes.num_generations, self_answers=self_answers)
        name = f"step of {len(task.questions) * sizes.num_generations} rollouts"
        name += f" {'with' if self_answers else 'without'} self-answers"
        played = []

        def step(played=played, sampling=sampling):  # each with a seed of its own, as TRL's
            how = replace(sampling, seed=len(played))
            played += grpo_step(trainable, task.questions, task.retriever, settings, how)[0]

        ours, _ = timed(step, sizes.runs)
        row(f"{name}: ours", ours, note=lengths(played))
        theirs, generating, played = trl_steps(task, settings, sampling, sizes.runs)
        note = f"{lengths(played)}; {generating:.3g} s in `rollout_func`"
        row(f"{name}: TRL", theirs, ratio=theirs / ours, note=note)


def trl_steps(task, settings, sampling, runs):
    """(median seconds of a step, of `rollout_func` in it, all trajectories) of TRL's trainer."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    policy, _ = load_trainable()
    by_text = {question["question"]: question for question in task.questions}
    ends, generating, played = [], [], []

    class StepEnds(TrainerCallback):
        def on_step_end(self, *_, **__):
            ends.append(time.perf_counter())

    def rollout_func(prompts, trainer):
        start = time.perf_counter()
        rows = [by_text[prompt] for prompt in prompts]  # a row for each rollout
        now = models.Policy(trainer.model, policy.tokenizer)
        new = generate_rollout(now, rows, task.retriever, settings, 1.0, sampling.self_answers)
        generating.append(time.perf_counter() - start)
        played.extend(new)
        result = {"prompt_ids": [t.prompt_ids for t in new], "logprobs": None, "trajectory": new}
        result["completion_ids"] = [t.completion_ids for t in new]
        return result | {"env_mask": [t.completion_mask for t in new]}

    def total_reward(completions, trajectory, **_):
        return [t.score().total for t in trajectory]

    ours, G = TrainSettings(), sampling.num_generations
    size = len(task.questions) * G
    micro_batch = min(16, size)  # sequences; ours go by tokens, about as many
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = GRPOConfig(
            folder,
            max_steps=max(runs, 1) + 1,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=size // micro_batch,
            num_generations=G,
            max_completion_length=settings.max_context,
            temperature=1.0,
            learning_rate=0.0,
            beta=0.0,
            epsilon=ours.epsilon,
            max_grad_norm=ours.max_grad_norm,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            logging_steps=10**6,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            policy.model,
            total_reward,
            config,
            processing_class=policy.tokenizer,
            rollout_func=rollout_func,
            train_dataset=Dataset.from_dict({"prompt": list(by_text)}),
            callbacks=[StepEnds()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    steps = [end - start for start, end in zip(ends, ends[1:])]
    return statistics.median(steps), statistics.median(generating[1:]), played


def bench_step(sizes):
    """Where the time of train.py's default step goes, and what share of the machine's arithmetic
    the update reaches."""
    trainable, task = load_trainable(), load_world("train")
    policy, _ = trainable
    questions, G = task.questions[: sizes.questions * 3 // 2], sizes.num_generations
    settings, all_seconds = RolloutSettings(max_searches=sizes.max_searches), []

    def step():
        result = grpo_step(trainable, questions, task.retriever, settings, Sampling(G))
        all_seconds.append(result[1])
        return result

    total, (trajectories, _, padding) = timed(step, sizes.runs)
    seconds = {}
    for phase in all_seconds[0]:
        counted = [by_phase[phase] for by_phase in all_seconds[-sizes.runs :]]
        seconds[phase] = statistics.median(counted)
    row(f"step of {len(trajectories)} rollouts", total, note=lengths(trajectories))
    for phase, value in seconds.items():
        row(f"- {phase}", value, note=f"{value / total:.0%} of the step")
    playing = seconds["rollout"] + seconds["self_answer"] + seconds["search"]
    row("self-answers' share of the time of rollouts", 100 * seconds["self_answer"] / playing, "%")
    row("padding in the update's micro-batches", 100 * padding, "%")
    sampled, in_rollouts = rollout_tokens(policy.tokenizer, trajectories, G)
    in_update, unit = sum(map(len, trajectories)), "a second of rollouts"
    row("sampled tokens", sampled / playing, unit, note=f"{sampled:,}, with self-answers")
    note = f"{in_rollouts:,} in rollouts, {in_update:,} in the update"
    through = (in_rollouts + in_update) / total
    row("tokens through the model", through, "a second of the step", note=note)
    flops, rate = update_flops(policy.model, trajectories), matmul_rate()
    row("matrix product", rate / 1e9, "GFLOP/s", note="1024 x 1024")
    row("update", flops / seconds["update"] / 1e9, "GFLOP/s", note=f"{flops / 1e9:.3g} GFLOP")
    row("update's share of the matrix product's rate", 100 * flops / seconds["update"] / rate, "%")


def rollout_tokens(tokenizer, trajectories, G):
    """(sampled tokens, tokens through the model) of a batch of rollouts.

    No token goes through it twice, and the last one of a trajectory or self-answer not at all:
    tests/test_rollout.py counts."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    answers = [turn.self_answer for turn in turns if turn.self_answer is not None]
    in_answers = sum(len(encode(tokenizer, answer)) for answer in answers)
    prompts = sum(len(t.prompt_ids) for t in trajectories[::G])
    completions = sum(len(t.completion_ids) - 1 for t in trajectories)
    branches = in_answers + len(answers) * (len(encode(tokenizer, ro.PROBE)) - 1)
    return sum(t.tokens for t in trajectories) + in_answers, prompts + completions + branches


def update_flops(model, trajectories):
    """Floating-point operations of an update, from shapes; without padding, elementwise work.

    A matrix of `w` weights costs 2 w operations a position forward and 2 w backward for the
    gradient of its input; the adapter's also 2 w for their own gradient, which the frozen ones do
    not have. The output matrix counts at sampled positions only. Causal attention over T positions:
    two matrix products forward and four backward, each of 2 d operations for T (T + 1) / 2 pairs,
    in every layer. (The first layer's inputs need no gradient: counted, under 3%.)"""
    lm = model.get_base_model()
    config, output = lm.config, lm.get_output_embeddings().weight
    per_position, total = 0, 0
    for matrix in model.parameters():
        if matrix.dim() == 2 and matrix.shape != output.shape:
            per_position += matrix.numel() * (6 if matrix.requires_grad else 4)
    for trajectory in trajectories:
        T = len(trajectory)
        attention = config.num_hidden_layers * 6 * 2 * config.hidden_size * T * (T + 1) // 2
        total += T * per_position + attention + 4 * output.numel() * trajectory.tokens
    return total


def matmul_rate(size=1024):
    """Operations a second of the product of two square matrices: float32, on a GPU bfloat16."""
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
    trainable, task = load_trainable(), load_world("train")
    G, base = sizes.num_generations, RolloutSettings(max_searches=sizes.max_searches)
    few = task.questions[: sizes.questions]
    studies = {"rollouts": [], "searches at most": [], "passages a search": []}
    for n in sizes.scaling_rollouts:
        studies["rollouts"].append((n, task.questions[: n // G], base))
    for n in sizes.scaling_searches:
        studies["searches at most"].append((n, few, replace(base, max_searches=n)))
    for n in sizes.scaling_topk:
        studies["passages a search"].append((n, few, replace(base, topk=n)))
    for name, points in studies.items():
        first = None
        for n, questions, settings in points:
            how = (questions, task.retriever, settings, Sampling(G))
            step = functools.partial(grpo_step, trainable, *how)
            seconds, (trajectories, phases, _) = timed(step, sizes.runs)
            first = first or seconds
            note = f"{lengths(trajectories)}; update {phases['update']:.2g} s"
            row(f"step, {n} {name}", seconds, ratio=seconds / first, note=note)


# BM25


def bench_bm25(sizes):
    """Texts of 60 to 140 words, drawn as often as they stand in the tiny world.

    It has 370 different words: many stand in a quarter of the passages and more, the hard case for
    postings."""
    task, words = load_world(), []
    for passage in task.retriever.passages:
        words += tokenise(f"{passage['title']} {passage['text']}")
    queries = [question["question"] for question in task.questions[: sizes.queries]]
    for n in sizes.passages:
        rng = random.Random(0)
        texts = [" ".join(rng.choices(words, k=rng.randint(60, 140))) for _ in range(n)]
        bm25_at(texts, queries, sizes)


def bm25_at(texts, queries, sizes):
    """All get the same tokens and the queries in one call."""
    passages = [{"id": str(i), "title": "", "text": text} for i, text in enumerate(texts)]
    few, label = queries[: sizes.rank_bm25_queries], f"BM25, {len(texts):,} passages"
    unit = "ms a query"

    before = psutil.Process().memory_info().rss
    build, bm25 = timed(lambda: BM25(passages), 1)
    memory = (psutil.Process().memory_info().rss - before) / 2**20
    ours = timed(lambda: bm25.search(queries, k=3), sizes.runs)[0] / len(queries)
    note = f"built once in {build:.2g} s, then {memory:,.0f} MiB more"
    row(f"{label}: ours", 1000 * ours, unit, note=note)
    with tempfile.TemporaryDirectory() as folder:
        index = f"{folder}/index.safetensors"
        bm25.save(index)
        size = Path(index).stat().st_size / 2**20
        seconds, mapped = timed(lambda: BM25.load(index), sizes.runs)
        assert mapped.search(queries[:9], k=3) == bm25.search(queries[:9], k=3)
    row(
        f"{label}: ours, the index loaded by memory map", seconds, note=f"a file of {size:,.0f} MiB"
    )

    build, okapi = timed(lambda: BM25Okapi(list(map(tokenise, texts))), 1)
    seconds, _ = timed(lambda: [okapi.get_scores(tokenise(query)) for query in few], sizes.runs)
    theirs, same = seconds / len(few), same_top(bm25, okapi, few)
    note = f"built once in {build:.2g} s; same top 3: {same} of {len(few)} queries"
    row(f"{label}: rank-bm25", 1000 * theirs, unit, theirs / ours, note)

    if not is_missing("bm25s"):
        from bm25s import BM25 as BM25S

        def search():
            return index.retrieve(list(map(tokenise, queries)), k=3, show_progress=False)

        index = BM25S(method="lucene", k1=1.5, b=0.75)
        build, _ = timed(lambda: index.index(list(map(tokenise, texts)), show_progress=False), 1)
        theirs = timed(search, sizes.runs)[0] / len(queries)
        note = f"built once in {build:.2g} s"
        row(f"{label}: bm25s", 1000 * theirs, unit, theirs / ours, note)


def same_top(bm25, okapi, queries):
    """For how many queries rank-bm25's best three are ours, with the idf of retriever.py."""
    df, N = np.diff(bm25.index.starts), len(bm25.passages)
    for word, w in bm25.index.words.items():
        okapi.idf[word] = math.log(1 + (N - df[w] + 0.5) / (df[w] + 0.5))
    same = 0
    for query, hits in zip(queries, bm25.search(queries, k=3)):
        top = np.argsort(-okapi.get_scores(tokenise(query)), kind="stable")[:3]
        same += [int(hit["id"]) for hit in hits] == top.tolist()
    return same


SECTIONS = {"rollout": bench_rollout, "trl": bench_trl, "bm25": bench_bm25, "step": bench_step}
SECTIONS |= {"scaling": bench_scaling}


def header():
    """Set the threads, OMP_NUM_THREADS or one a core, and print what the numbers depend on."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or cores))
    torch.set_flush_denormal(True)
    versions = [f"Python {platform.python_version()}"]
    for package in ("torch", "transformers", "peft", "numpy", "rank-bm25", "trl", "bm25s"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"no {package}")
    device = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    print(", ".join(versions))
    print(
        f"{platform.machine()} {device}, {cores} physical cores, {torch.get_num_threads()} threads"
    )
    load = psutil.getloadavg()[0]
    print(f"load average {load:.2f} (what else runs on the machine spoils the numbers)\n")


def main(arguments=None):
    sizes_help = "tiny sizes, one run: only to see that it works"
    runs_help = f"runs of which the median is shown (default: {Sizes.runs})"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--runs", type=int, help=runs_help)
    parser.add_argument("--quick", action="store_true", help=sizes_help)
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    sizes = replace(sizes, runs=options.runs or sizes.runs)
    header()
    start = time.perf_counter()
    print("| what | measured | ratio | |\n|---|---|---|---|")
    for name in options.only:
        SECTIONS[name](sizes)
    load = psutil.getloadavg()[0]
    print(f"\n{time.perf_counter() - start:.0f} s in all; load average now {load:.2f}")


if __name__ == "__main__":
    main()

"""Cold start: demonstrations of the protocol, played in the real environment, and the fine-tuning
on them before step 0 (`python train.py --cold_start N`).

A model that never writes the format gets equal rewards in every group, and learns nothing from
them. So it is shown first: the supporting titles of training questions are searched one after the
other, each thought quotes what was found and names what to look up next; some demonstrations go on
searching when everything is known, or give up. Prompt, observations and self-answers are those of
rollout.py. A self-answer branches off its trajectory and is trained in the same pass: it sees the
trajectory up to its branching point, and itself.
"""

import random
import re
import sys
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

import torch
from tqdm import tqdm

import reward
from eval import evaluate, mean_metrics
from plumbing import adapters, data, files, logs, models, runs
from plumbing.stats import mean
from retriever import open_retriever
from rollout import PROBE, Sampling, Turn, clean, observe, run_searches, start_trajectories

UNKNOWN = "unknown"
CHECK_WORDS = ("history", "story", "details", "record")
WORLD = "data/tinyworld/train"  # shown where the training questions name no supporting titles
FOLDER, LOG = "cold_start", "cold_start.jsonl"  # of a run: the checkpoint, and a line an update
BATCH = 8  # demonstrations in an update
WARMUP, SAVE_EVERY = 10, 10  # updates in which the learning rate rises; between checkpoints
TRIED = 32  # training questions that are tried at the end
TOO_LITTLE = """after this cold start training may find no signal about depth: under 0.9 of the \
actions are valid, or EM is under half of what the questions allow; use more demonstrations"""


@dataclass
class Environment:
    """What a demonstration is played in."""

    tokenizer: object
    retriever: object
    settings: object  # RolloutSettings
    passage_weight: float = 0.0  # of the loss; a token of the policy weighs 1


class Shown(NamedTuple):
    """What a model is to be shown."""

    rows: list  # of `Demonstration.columns`
    allowed: float  # share of the training questions that can be demonstrated; 0 if not tried


class NotShown(Exception):
    """Why a question allows no demonstration."""


class Demonstration:
    """A trajectory in the making, and its self-answers: written here, not sampled."""

    def __init__(self, question, environment):
        self.environment, self.weights, self.branches = environment, [], []
        tokenizer, settings = environment.tokenizer, environment.settings
        (self.trajectory,) = start_trajectories(tokenizer, [question], settings, Sampling())

    def turn(self, think, action, content, weight=1.0):
        """Write a turn and show what follows: passages, or advice if it is invalid. Returns the
        passages. `trajectory.stop` is "context" once there is no room for the next turn."""
        env, trajectory, text = self.environment, self.trajectory, written(think, action, content)
        self.append(models.encode(env.tokenizer, text), weight, sampled=True)
        turn = Turn(text, reward.parse_action(text)[0])
        trajectory.turns.append(turn)
        run_searches([trajectory], env.retriever, env.settings)
        shown = observe(trajectory, env.tokenizer, env.settings, turns_left=1)
        self.append(shown, env.passage_weight if turn.searched else 0.0, sampled=False)
        return turn.passages

    def append(self, ids, weight, sampled):
        self.trajectory.append(ids, sampled)
        self.weights += [weight] * len(ids)

    def self_answer(self, think, answer, weight=1.0):
        """What would be answered now, on a branch."""
        tokenizer = self.environment.tokenizer
        probe = models.encode(tokenizer, PROBE)
        ids = models.encode(tokenizer, written(think, "answer", answer))
        weights = [0.0] * len(probe) + [weight] * len(ids)
        self.branches.append((len(self.trajectory), probe + ids, weights))

    def columns(self):
        """Four lists: token ids, those of the branches last; the loss weight of each, its branch
        (0: the trajectory) and where in the trajectory that starts."""
        ids = self.trajectory.prompt_ids + self.trajectory.completion_ids
        weights = [0.0] * len(self.trajectory.prompt_ids) + self.weights
        branches, starts = [0] * len(ids), [0] * len(ids)
        for number, (start, new, weights_of_new) in enumerate(self.branches, start=1):
            ids, weights = ids + new, weights + weights_of_new
            branches += [number] * len(new)
            starts += [start] * len(new)
        return ids, weights, branches, starts


def written(think, action, content):
    """The text of a turn."""
    return f"<think> {think} </think> <{action}> {content} </{action}>"


def collate(demonstrations, dtype=torch.float32, device="cpu"):
    """Pad `Demonstration.columns` to a batch as `train.per_token_logps` takes it: input_ids,
    weights, completion_mask, position_ids (B, T), and attention_mask (B, 1, T, T), to be added."""
    width, padded = max(len(columns[0]) for columns in demonstrations), []
    for column, filling in enumerate((0, 0.0, -1, 0)):
        rows = [columns[column] for columns in demonstrations]
        rows = [row + [filling] * (width - len(row)) for row in rows]
        padded.append(torch.tensor(rows, device=device))
    ids, weights, branches, starts = padded
    index = torch.arange(width, device=device)
    is_first = torch.ones_like(branches, dtype=torch.bool)
    is_first[:, 1:] = branches[:, 1:] != branches[:, :-1]
    first = torch.where(is_first, index, 0).cummax(1).values  # column where its branch begins
    positions = torch.where(branches > 0, starts + index - first, index)
    own = branches[:, :, None] == branches[:, None, :]
    trunk = (branches[:, None, :] == 0) & (index < starts[:, :, None])
    seen = (own | trunk) & (index <= index[:, None])  # (B, T, T)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    mask = mask.masked_fill(~seen, max(-1e9, torch.finfo(dtype).min))[:, None]
    batch = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    return batch | {"weights": weights, "completion_mask": (weights > 0).long()}


# Demonstrations of questions with supporting titles


def make(task, tokenizer, settings):
    """`settings.cold_start` demonstrations, of the training questions or, where these name no
    supporting titles, of the tiny world: Shown, or None. Raises DataError where there are none."""
    if not settings.cold_start:
        return None
    shares = settings.needless_searches
    where = f"--needless_searches {' '.join(map(str, shares))}"
    files.check(sum(shares) > 0, where, "one of the shares must be above 0")
    questions, retriever, where = task.questions, task.retriever, settings.questions
    is_own = any(question["metadata"].get("supporting_titles") for question in questions)
    if not is_own:
        where, retriever = f"{WORLD}.jsonl", open_retriever(f"{WORLD}_corpus.jsonl")
        questions = data.load_questions(where)
    environment = Environment(tokenizer, retriever, settings)
    rng, made, reasons = random.Random(f"cold start {settings.seed}"), [], []
    epochs = (data.draw_questions(questions, len(questions), i, settings.seed) for i in count())
    for question in chain.from_iterable(epochs):
        try:
            made.append(demonstrate(rng, Demonstration(question, environment)).columns())
        except NotShown as reason:
            reasons.append(str(reason))
        if len(made) == settings.cold_start:
            break
        counted = [f"{reasons.count(reason)} {reason}" for reason in dict.fromkeys(reasons)]
        problem = f"{where}: no question can be demonstrated: {'; '.join(counted)}"
        files.check(made or len(reasons) < len(questions), "--cold_start", problem)
    return Shown(made, is_own * len(made) / (len(made) + len(reasons)))


def demonstrate(rng, demonstration):
    """Play the searches that a question needs, and some that it does not. Raises NotShown."""
    question, settings = demonstration.trajectory.question, demonstration.environment.settings
    left = list(dict.fromkeys(question["metadata"].get("supporting_titles", [])))
    if not 0 < len(left) <= settings.max_searches:
        raise NotShown("name no supporting titles, or more than --max_searches")
    known, evidence, names = question["question"], "", []
    answer = question["golden_answers"][0]
    while left:
        title = named_first(left, known)
        left.remove(title)
        names.append(bare(title))
        plan = f"{'Next' if evidence else 'First'} {bare(title)}."
        passages = act(demonstration, evidence, plan, "search", bare(title))
        text = " ".join(p["text"] for p in passages if p["title"] == clean(title))
        if not text:
            raise NotShown("have a title that a search for it does not find")
        known = f"{known} {text}"
        evidence = sentence_with(text, named_first(left, known) if left else answer)
        say(demonstration, "Next." if left else evidence, UNKNOWN if left else answer)
        if left and rng.random() < settings.early_stops:  # it gives up
            act(demonstration, evidence, "That is enough.", "answer", UNKNOWN)
            return demonstration
    shares = settings.needless_searches
    needless = rng.choices(range(len(shares)), shares)[0]
    for word in CHECK_WORDS[: min(needless, settings.max_searches - len(names))]:  # no repeats
        act(demonstration, evidence, "Check again.", "search", f"{rng.choice(names)} {word}")
        say(demonstration, "I know this.", answer)
        evidence = ""
    act(demonstration, evidence, "That is enough.", "answer", answer)
    return demonstration


def act(demonstration, evidence, plan, action, content):
    """A turn that quotes as much of the evidence as it has room for. Returns its passages."""
    think = within(demonstration, "max_turn_tokens", evidence, plan, action, content)
    passages = demonstration.turn(think, action, content)
    if demonstration.trajectory.stop == "context":
        raise NotShown("are longer than --max_context")
    return passages


def say(demonstration, evidence, answer):
    """A self-answer that quotes as much of the evidence as it has room for."""
    think = within(demonstration, "max_self_answer_tokens", evidence, "", "answer", answer)
    demonstration.self_answer(think, answer)


def within(demonstration, limit, evidence, plan, action, content):
    """A thought with which a turn stays within a limit of the settings: words are left out."""
    environment, words = demonstration.environment, evidence.split()
    while True:
        think = " ".join([*words, plan]).strip()
        ids = models.encode(environment.tokenizer, written(think, action, content))
        if len(ids) <= getattr(environment.settings, limit):
            return think
        if not words:
            raise NotShown(f"need longer turns than --{limit}")
        words = words[: len(words) // 2]


def bare(title):
    """A title without what only tells it from namesakes.
    >>> bare("Inferno (2016 film)")
    'Inferno'
    """
    return re.sub(r"\s*\([^()]*\)$", "", title) or title


def named_first(titles, text):
    """The one of the titles that a text names first. Raises NotShown where it names none: nobody
    could know what to look up."""
    text = f" {reward.normalize_answer(text)} "
    at = {title: text.find(f" {reward.normalize_answer(bare(title))} ") for title in titles}
    named = [title for title in titles if at[title] >= 0]
    if not named:
        raise NotShown("have a title that neither the question nor a passage before names")
    return min(named, key=at.get)


def sentence_with(text, name):
    """The first sentence of a text that has a name in it, or the first one of all.
    >>> sentence_with("Ada was born in York. York lies by the Ouse.", "Ouse")
    'York lies by the Ouse.'
    """
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    found = [sentence for sentence in sentences if bare(name).casefold() in sentence.casefold()]
    return (found or sentences)[0]


# Fine-tuning on them


def begin_with(run, settings):
    """The adapter that a run begins with: after its cold start, or part of it; or --adapter."""
    return runs.find_checkpoint(run, FOLDER) or settings.adapter


def prepare(policy, shown, task, settings, run, per_token_logps):
    """The cold start, where it is wanted and not over; then what the KL term compares with."""
    if shown and not runs.find_checkpoint(run):
        train(policy, shown.rows, settings, run, per_token_logps)
        try_out(policy, task, settings, shown.allowed, run)
    reference = begin_with(run, settings)
    if settings.beta and reference:
        policy.model.load_adapter(reference, adapters.REFERENCE)


def train(policy, demonstrations, settings, run, per_token_logps):
    """Fine-tune the adapter that training then goes on with, or go on with that: the cross-entropy
    of what the policy would have to write. per_token_logps: `train.per_token_logps`."""
    model, place = policy.model.train(), runs.find_checkpoint(run, FOLDER)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.cold_start_rate, weight_decay=0.0)
    number, first = -(-len(demonstrations) // BATCH), 0
    if place:
        first = runs.load_optimizer(optimizer, place)
    logs.drop_later_lines(run / LOG, first)
    bar = tqdm(range(first, number), "cold start", number, initial=first, disable=None)
    with runs.stop_signals() as stop:
        for step in bar:
            batch = sorted(demonstrations[step * BATCH : (step + 1) * BATCH], key=size)
            rising, falling = min(1.0, (step + 1) / WARMUP), 1 - step / number
            optimizer.param_groups[0]["lr"] = settings.cold_start_rate * rising * falling
            loss = fine_tune(model, optimizer, batch, per_token_logps, settings)
            row = {"step": step, "loss": round(loss, 6), "tokens": sum(map(size, batch))}
            files.append_line(run / LOG, row)
            bar.set_postfix_str(f"loss {loss:.3f}")
            if stop.is_set() or (step + 1) % SAVE_EVERY == 0 or step + 1 == number:
                runs.save_checkpoint(model, optimizer, step + 1, run / FOLDER)
            if stop.is_set():
                raise KeyboardInterrupt


def size(demonstration):
    return len(demonstration[0])


def fine_tune(model, optimizer, demonstrations, per_token_logps, settings):
    """One update on demonstrations sorted by size. Returns the loss, a mean over their weights."""
    at_once = max(1, settings.micro_batch_tokens // size(demonstrations[-1]))
    weight = sum(sum(columns[1]) for columns in demonstrations)
    loss = 0.0
    for start in range(0, len(demonstrations), at_once):
        rows = demonstrations[start : start + at_once]
        batch = collate(rows, model.dtype, model.device)
        with adapters.half_precision(model):
            logps, _ = per_token_logps(model, batch, temperature=1.0)
        summed = -(logps * batch["weights"]).sum()
        summed.backward()  # of the sum: a small share would vanish in float16
        loss += summed.item() / weight
    adapters.scale_gradients(model, 1 / weight)
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def try_out(policy, task, settings, allowed, run):
    """Say what came of it on training questions, greedily; warn where training on rewards would
    find no signal about depth."""
    questions = data.draw_questions(task.questions, min(TRIED, len(task.questions)), 0, 0)
    sampling, rows = Sampling(temperature=0.0), settings.eval_batch_size
    with adapters.inference_weights(policy.model):
        tried = data.Task(questions, task.retriever)
        trajectories = evaluate(policy, tried, settings, sampling, rows)
    means = mean_metrics(trajectories)
    valid, em = means["valid_action_ratio"], means["em"]
    found = mean(trajectory.score().t_c > 0 for trajectory in trajectories)
    row = {"step": len(files.read_log(run / LOG)), "valid_action_ratio": valid, "em": em}
    files.append_line(run / LOG, row | {"right_self_answer": found, "n": len(questions)})
    text = f"valid actions {valid:.2f}, EM {em:.2f}, a self-answer was right in {found:.2f}"
    print(f"after the cold start, {len(questions)} training questions, greedy: {text}", flush=True)
    if valid < 0.9 or em < allowed / 2:
        print(f"warning: {TOO_LITTLE}", file=sys.stderr)

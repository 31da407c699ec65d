"""Train a search agent with AutoSearch's rewards and GRPO: LoRA on a frozen, optionally 4-bit model.

Where this departs from the paper (arXiv 2604.17337):
1. GRPO, as in the paper's appendix, instead of PPO with a critic: the trajectory's summed reward is the outcome reward.
2. LoRA instead of full fine-tuning; the reference policy of the KL term is the same model with the adapter off.
3. By default a tiny model that ships with the project, in a tiny world, so that the effect shows on a CPU in minutes;
   group size, steps and learning rate are chosen for it, and the KL coefficient is 0 (paper: 0.001).
4. One batch is one update (paper: two mini-batches). The ratio is then exactly 1 and nothing is clipped;
   `--num_iterations 2` uses a batch twice and shows the clipping. The loss is a mean over all sampled tokens.
5. Self-answers continue the trajectory on a branch that is thrown away; the released code asks in a fresh prompt, as
   `--self_answer separate` does.
6. The step rewards follow the paper where the released code differs: see reward.py, and `--reward autosearch-released`.

    python train.py                                     # tiny world, paper's rewards, CPU
    python train.py --reward outcome                    # Search-R1's reward: final answer and format only
    python train.py --resume runs/NAME                  # go on with a run that was stopped
    python train.py --preset qwen2.5-0.5b --dry_run     # does it fit? one step at its largest, then stop
    python train.py --resume runs/NAME --merge FOLDER   # write the trained model, 16-bit, for other programs
"""

import functools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from torch.utils.checkpoint import checkpoint as recomputed
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser

import reward
from eval import (
    HELD_OUT,
    before_after_table,
    evaluate,
    plot_curves,
    provenance,
    read_json,
    render_trajectory,
    report,
    save_trajectories,
    score_trajectory,
    write_text,
)
from retriever import DataError, SearchClient, SearchError, error_line, load_questions, open_corpus
from rollout import (
    PROBE,
    CachedBatch,
    Clock,
    RolloutSettings,
    Trajectory,
    check_4bit,
    check_limits,
    check_model,
    encode,
    encode_prompt,
    load_adapter,
    load_base_model,
    load_tokenizer,
    locate,
    on_failure,
    parse_options,
    rollout,
    seed_of,
    setting,
    show_passages,
    system_prompt_of,
)


@dataclass
class TrainSettings:
    """Everything about a training run that is not about a single rollout."""

    preset: str | None = setting(None, "settings for a real model, from data/presets/; other options change them")
    model: str = setting("data/tiny_model", "folder or hub name of a causal LM")
    corpus: str = setting("data/tinyworld/train_corpus.jsonl", "passages to search in while training, or an index")
    questions: str = setting("data/tinyworld/train.jsonl", "questions to train on")
    eval_corpus: str = setting("data/tinyworld/dev_corpus.jsonl", "passages for the held-out questions")
    eval_questions: str = setting("data/tinyworld/dev.jsonl", "held-out questions; '' for none")
    eval_limit: int | None = setting(None, "use only the first so many held-out questions")
    eval_sample: int = setting(64, "held-out questions, the first ones, by whose greedy reward `best` is kept; 0: none")
    eval_batch_size: int = setting(128, "held-out questions rolled out together")
    retriever_url: str | None = setting(None, "search server (Search-R1's protocol) to use instead of the corpora")
    name: str | None = setting(None, "written to runs/NAME of the current folder; default: reward and seed")
    resume: str | None = setting(None, "run folder to go on with; all other settings come from it")
    merge: str | None = setting(None, "with --resume: do not train, write base model plus adapter to this folder")
    dry_run: bool = setting(False, "do not train: run one step at its largest and print its memory and time")
    report_to: Literal["none", "wandb", "tensorboard"] = setting("none", "where metrics go besides metrics.jsonl")
    reward: str = setting("autosearch", "; ".join(f"{name}: {rules.about}" for name, rules in reward.REWARDS.items()))
    search_cost: float | None = setting(None, "flat cost of a search for --reward search-penalty (0.1 if not given)")
    steps: int = setting(40, "training steps; each is one batch of rollouts")
    num_questions: int = setting(12, "questions in a step")
    num_generations: int = setting(8, "rollouts of each question, G: the group that GRPO compares")
    num_iterations: int = setting(1, "updates on each batch; from 2 on the ratio moves and is clipped")
    temperature: float = setting(1.0, "sampling temperature of the rollouts; the loss uses the same")
    learning_rate: float = setting(2e-3, "peak learning rate, falling linearly to 0")
    epsilon: float = setting(0.2, "clip range of the ratio")
    beta: float = setting(0.0, "coefficient of the KL to the policy before training; 0 computes no reference")
    max_grad_norm: float = setting(1.0, "gradients above this norm are scaled down")
    lora_r: int = setting(16, "rank of the LoRA adapter")
    lora_targets: str = setting("all-linear", "layers with an adapter: all-linear, or a regular expression of names")
    lora_alpha: int = setting(32, "scale of the LoRA adapter: alpha / r")
    load_in_4bit: bool | None = setting(None, "4-bit NF4 base weights; default: on with CUDA, off elsewhere")
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass, to save memory")
    micro_batch_size: int = setting(16, "sequences in one forward and backward pass")
    sample_every: int = setting(10, "print a scored trajectory every so many steps; 0 for none")
    save_every: int = setting(10, "write a checkpoint, and look for the best, every so many steps")
    seed: int = setting(0, "the same seed gives the same run")


def train(model, tokenizer, optimizer, data, held_out, settings, rollout_settings, weights, run, first_step):
    """The loop: questions -> rollouts -> rewards -> advantages -> loss -> update.

    data, held_out: (questions, retriever). Raises KeyboardInterrupt when a signal to stop has been obeyed.
    """
    questions, retriever = data
    report_metrics = open_tracker(settings, run)
    drop_later_lines(run / "trajectories.jsonl", first_step)
    rows = drop_later_lines(run / "metrics.jsonl", first_step)  # all metrics until now
    bar = tqdm(range(first_step, settings.steps), initial=first_step, total=settings.steps, desc=run.name, disable=None)
    warned = set()
    with stop_signals() as stop:
        for step in bar:
            start, seconds = time.perf_counter(), {}  # seconds by phase
            step_seed = seed_of(settings.seed, step)
            torch.manual_seed(step_seed)  # a step depends on nothing but the seed, its number and the weights
            batch = draw_questions(questions, settings, step)
            with inference_weights(model):
                trajectories = rollout(
                    model, tokenizer, batch, retriever, rollout_settings, settings.num_generations,
                    settings.temperature, ask_before_search=weights.ask_before_search, seed=step_seed,
                    phase_seconds=seconds,
                )  # fmt: skip
            scores = [score_trajectory(trajectory, weights) for trajectory in trajectories]
            rewards = rewards_of(scores)
            check_finite(rewards, trajectories)
            advantages = group_advantages(rewards, settings.num_generations)
            update_start = time.perf_counter()
            learning_rate = settings.learning_rate * (1 - step / settings.steps)
            losses = update(model, optimizer, trajectories, advantages, learning_rate, settings)
            seconds["update"] = time.perf_counter() - update_start

            row = metrics_row(step, settings, trajectories, scores, rewards, losses)
            row["seconds"] = time.perf_counter() - start
            row |= {f"seconds/{phase}": value for phase, value in seconds.items()}
            is_due = (step + 1) % settings.save_every == 0 or step + 1 == settings.steps
            if is_due:
                row |= held_out_score(model, tokenizer, *held_out, settings, rollout_settings, weights)
            rows.append(log_step(row, run, bar, is_due))
            report_metrics(row)
            if settings.sample_every and step % settings.sample_every == 0:
                show_sample(run, step, trajectories, scores, settings.num_generations)
            for symptom in symptoms(rows, rollout_settings.max_searches) - warned:
                warned.add(symptom)
                tqdm.write(f"warning, step {step}: {symptom}", file=sys.stderr)
            check_updates(rows)
            if is_due and is_best(rows):
                save_checkpoint(model, optimizer, step + 1, run / "best")
                shutil.rmtree(run / "best.old", ignore_errors=True)
            if is_due or stop.is_set():
                save_checkpoint(model, optimizer, step + 1, run / "adapter")
            if stop.is_set():
                raise KeyboardInterrupt


@contextmanager
def stop_signals():
    """Ctrl-C and SIGTERM set the event that this yields, for the step to be finished; a second one interrupts."""
    stop = threading.Event()

    def ask(number, frame):
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        os.write(2, b"\nfinishing this step; once more stops at once\n")  # print is not safe in a signal handler

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def draw_questions(questions, settings, step):
    """The step's questions: a slice of the epoch's shuffled order, so that none repeats within an epoch."""
    positions = range(step * settings.num_questions, (step + 1) * settings.num_questions)
    places = [divmod(position, len(questions)) for position in positions]
    return [questions[epoch_order(settings.seed, epoch, len(questions))[index]] for epoch, index in places]


@functools.cache
def epoch_order(seed, epoch, size):
    order = list(range(size))
    random.Random(f"{seed} {epoch}").shuffle(order)
    return order


def rewards_of(scores):
    """Total rewards (N,). Sums that are equal on paper may differ in the last bit: a group must not learn from that."""
    return torch.tensor([round(score.total, 6) for score in scores], dtype=torch.float64)


def group_advantages(rewards, num_generations):
    """GRPO: A = (r - mean(r)) / std(r) over the rollouts of one question; exactly 0 where all rewards are equal.

    rewards: (N,), groups of `num_generations` adjacent. Returns (N,) float32.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.9, 0.9]), 2)
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    groups = rewards.view(-1, num_generations)  # (Q, G)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = centred / groups.std(1, keepdim=True)
    return advantages.masked_fill(all_equal(groups)[:, None], 0.0).flatten().float()


def all_equal(groups):
    """Which rows of (Q, G) hold one value only: (Q,) bool. (Their standard deviation need not be exactly 0.)"""
    return (groups == groups[:, :1]).all(1)


def update(model, optimizer, trajectories, advantages, learning_rate, settings):
    """`num_iterations` clipped GRPO updates on one batch. Returns the means of loss, KL, entropy, ... over them.

    An update whose loss or gradient is not finite is skipped and counted.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    micro_batches = make_micro_batches(trajectories, advantages, settings.micro_batch_size, model.device)
    num_tokens = max(sum(int(batch["completion_mask"].sum()) for batch in micro_batches), 1)
    totals, skipped = {}, 0
    for _ in range(settings.num_iterations):
        for batch in micro_batches:
            logps, entropy = per_token_logps(model, batch, settings.temperature)
            if "old_per_token_logps" not in batch:  # the policy has not moved since it sampled
                batch["old_per_token_logps"] = logps.detach()
            if settings.beta and "ref_per_token_logps" not in batch:
                with torch.no_grad(), model.disable_adapter():
                    batch["ref_per_token_logps"] = per_token_logps(model, batch, settings.temperature)[0]
            loss, stats = grpo_loss(logps, batch, settings.epsilon, settings.beta)
            (loss / num_tokens).backward()
            stats |= {"loss": loss.detach(), "entropy": entropy.sum()}
            for key, value in stats.items():
                totals[key] = totals.get(key, 0.0) + value.item() / num_tokens / settings.num_iterations
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm).item()
        if math.isfinite(grad_norm) and math.isfinite(totals["loss"]):
            optimizer.step()
        else:  # one such step would spoil the weights and Adam's moments for good
            skipped += 1
        optimizer.zero_grad()
    positions = sum(batch["input_ids"].numel() for batch in micro_batches)
    totals["padding"] = 1 - sum(map(length_of, trajectories)) / positions  # share of the positions computed in vain
    if not settings.beta:
        totals.pop("kl", None)  # without a reference there is nothing to report
    return totals | {"grad_norm": grad_norm, "skipped_updates": skipped}


def make_micro_batches(trajectories, advantages, size, device):
    """Sort trajectories by length, so that little is padding, and pad each micro-batch on the right.

    Causal attention then needs no mask: no token sees what follows it. Returns dicts of input_ids and completion_mask
    (B, T), T = prompt and completion, and advantages (B,).
    """
    order = sorted(range(len(trajectories)), key=lambda i: length_of(trajectories[i]))
    batches = []
    for start in range(0, len(order), size):
        rows = [trajectories[i] for i in order[start : start + size]]
        width = length_of(rows[-1])  # the longest
        ids = [row.prompt_ids + row.completion_ids + [0] * (width - length_of(row)) for row in rows]
        masks = [[0] * len(row.prompt_ids) + row.completion_mask + [0] * (width - length_of(row)) for row in rows]
        batches.append({
            "input_ids": torch.tensor(ids, device=device),
            "completion_mask": torch.tensor(masks, device=device),
            "advantages": advantages[order[start : start + size]].to(device),
        })  # fmt: skip
    return batches


def length_of(trajectory):
    return len(trajectory.prompt_ids) + len(trajectory.completion_ids)


LOGITS_AT_ONCE = 2**26  # numbers: 256 MiB in float32


def per_token_logps(model, batch, temperature):
    """Log-probability of each sampled token, and the policy's entropy there: two (B, T) tensors, 0 where not sampled.

    Logits are computed at the sampled positions only, and of many a piece at a time: no (B, T, V) tensor is ever made.
    """
    mask = batch["completion_mask"].bool()  # (B, T)
    causal_lm = model.get_base_model()  # the adapter is inside its layers
    hidden = causal_lm.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state  # (B, T, d)
    states = hidden[:, :-1][mask[:, 1:]]  # (N, d): the state from which each sampled token was drawn
    sampled = batch["input_ids"][mask]  # (N,)

    def score(states, sampled):
        logits = causal_lm.get_output_embeddings()(states).float().div_(temperature)  # (n, V); in place: it is large
        log_softmax = logits.log_softmax(-1)
        entropy = -log_softmax.detach().exp().mul_(log_softmax.detach()).sum(-1)
        return log_softmax.gather(1, sampled[:, None])[:, 0], entropy

    size = max(1, LOGITS_AT_ONCE // causal_lm.config.vocab_size)
    pieces = list(zip(states.split(size), sampled.split(size)))
    if len(pieces) > 1:  # the logits of one piece at a time are in memory, in the backward pass too
        pieces = [recomputed(score, *piece, use_reentrant=False) for piece in pieces]
    else:
        pieces = [score(*piece) for piece in pieces]
    empty = torch.zeros(mask.shape, device=states.device)
    logps, entropy = (empty.masked_scatter(mask, torch.cat(values)) for values in zip(*pieces))
    return logps, entropy


def grpo_loss(per_token_logps, batch, epsilon, beta):
    """Clipped surrogate plus k3 KL, summed over the sampled tokens:

    -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A) + beta * (exp(ref - logp) - (ref - logp) - 1)

    per_token_logps: (B, T). batch: completion_mask (B, T), advantages (B,), old_per_token_logps and, if beta > 0,
    ref_per_token_logps (B, T). Returns (loss, {"clip_ratio", "kl"}), sums over tokens. Masked before `exp`, so that
    whatever stands at a masked position cannot reach the gradient.
    """
    mask = batch["completion_mask"].bool()
    advantages = batch["advantages"][:, None]
    log_ratio = (per_token_logps - batch["old_per_token_logps"]).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    kl = torch.zeros_like(loss)
    if beta:
        ref_log_ratio = (batch["ref_per_token_logps"] - per_token_logps).masked_fill(~mask, 0.0)
        kl = ref_log_ratio.exp() - ref_log_ratio - 1
        loss = loss + beta * kl
    is_clipped = (ratio * advantages > clipped_ratio * advantages) & mask
    return (loss * mask).sum(), {"clip_ratio": is_clipped.sum(), "kl": (kl.detach() * mask).sum()}


@contextmanager
def inference_weights(model):
    """Eval mode, and the adapter merged into float32 weights: rollouts are a third faster (bf16 would round it away).

    The base weights are put back bit by bit: subtracting the adapter again would leave rounding errors behind.
    """
    was_training = model.training
    model.eval()
    merge = model.dtype == torch.float32 and not getattr(model, "is_loaded_in_4bit", False)
    if merge:
        layers = [module.base_layer.weight for module in model.modules() if hasattr(module, "lora_A")]
        kept = [weight.detach().clone() for weight in layers]
        model.merge_adapter()
    try:
        yield
    finally:
        if merge:
            model.unmerge_adapter()
            with torch.no_grad():
                for weight, original in zip(layers, kept):
                    weight.copy_(original)
        model.train(was_training)


def check_finite(rewards, trajectories):
    """Stop before the update if a reward is NaN or infinite, and say whose."""
    for value, trajectory in zip(rewards.tolist(), trajectories):
        if not math.isfinite(value):
            raise DataError(f"reward {value} for question {trajectory.question['id']}: {trajectory.steps}")


def held_out_score(model, tokenizer, questions, retriever, settings, rollout_settings, weights):
    """Mean reward and EM, greedy, of the first `eval_sample` held-out questions; {} where there are none."""
    questions = questions[: settings.eval_sample]
    if not questions:
        return {}
    with inference_weights(model):
        trajectories = evaluate(model, tokenizer, questions, retriever, rollout_settings,
                                batch_size=settings.eval_batch_size)  # fmt: skip
    scores = [score_trajectory(trajectory, weights) for trajectory in trajectories]
    return {"eval/reward": rewards_of(scores).mean().item(), "eval/em": sum(score.em for score in scores) / len(scores)}


def is_best(rows):
    """Whether the last of these metric rows has a held-out reward, and a higher one than all before it."""
    rewards = [row["eval/reward"] for row in rows if "eval/reward" in row]
    return "eval/reward" in rows[-1] and rewards[-1] > max(rewards[:-1], default=-math.inf)


def check_updates(rows):
    """Stop once each of the last three steps had an update skipped: the next ones would fare no better."""
    if len(rows) >= 3 and all(row["skipped_updates"] for row in rows[-3:]):
        raise DataError("loss or gradient was not finite in 3 steps in a row: --learning_rate may be too high, or the "
                        "model overflows in its precision; the last checkpoint is kept")  # fmt: skip


def symptoms(rows, max_searches):
    """What is wrong with the last of these metric rows, with the likely cause: a set of messages, empty in health.

    >>> row = {"frac_reward_zero_std": 0.5, "valid_action_ratio": 0.9, "search_depth": 1.5, "entropy": 0.3}
    >>> symptoms([row], 4), [text[:14] for text in symptoms([row, row | {"search_depth": 0.0}], 4)]
    (set(), ['nobody searche'])
    """
    row, last, start = rows[-1], rows[-5:], rows[0]["entropy"] or 0.0
    low = [r for r in last if r["entropy"] is not None and r["entropy"] < 0.01 * start]
    found = {
        "no group had a signal for 5 steps (all its rewards equal): the questions are too easy or too hard for this "
        "policy, or --temperature is too low": len(last) == 5 and all(r["frac_reward_zero_std"] == 1 for r in last),
        "under half of the actions are valid: the model never knew the format and needs a cold start, or it forgets it "
        "and --learning_rate is too high": row["valid_action_ratio"] < 0.5,
        "nobody searches any more: searches cost more than they bring, or the questions need none":
            row["search_depth"] == 0,
        "everybody searches to the limit: stopping earlier is not worth more, or --max_searches is too low":
            row["search_depth"] == max_searches,
        "entropy was under 1% of its start for 5 steps: the policy has collapsed to one text; lower --learning_rate, "
        "raise --beta": len(low) == 5,
    }  # fmt: skip
    return {message for message, is_there in found.items() if is_there}


def metrics_row(step, settings, trajectories, scores, rewards, losses):
    """The metrics of a step, for a line of metrics.jsonl; README explains each."""
    measured = report(trajectories, by=())
    groups = rewards.view(-1, settings.num_generations)
    parts = {f"reward/{name}": sum(part[name] for score in scores for part in score.parts) / len(scores)
             for name in scores[0].parts[0]}  # fmt: skip
    return {
        "step": step, "seed": settings.seed, "wall_time": time.time(), "reward": rewards.mean().item(),
        "reward_std": groups.std(1).mean().item(), **parts, "em": measured["em"], "f1": measured["f1"],
        "search_depth": measured["sd"], "over_search_ratio": measured["osr"],
        "valid_action_ratio": measured["valid_action_ratio"], "tokens": measured["tokens"], **losses,
        "frac_reward_zero_std": all_equal(groups).double().mean().item(),
    }  # fmt: skip


def show_sample(run, step, trajectories, scores, num_generations):
    """Print one scored trajectory and keep it, with the rest of its group, in trajectories.jsonl."""
    tqdm.write(render_trajectory(trajectories[0], scores[0]) + "\n")
    for trajectory, score in list(zip(trajectories, scores))[:num_generations]:
        append_line(run / "trajectories.jsonl", {"step": step, **trajectory.to_dict(), "score": asdict(score)})


def log_step(row, run, bar, is_due):
    """Add a step's metrics to metrics.jsonl and show them; returns the row as written: 6 digits, None if not finite.

    Where the bar is no bar, in a log file, a plain line comes with every checkpoint.
    """
    for key, value in row.items():
        if isinstance(value, float):
            row[key] = round(value, 6) if math.isfinite(value) else None
    append_line(run / "metrics.jsonl", row)
    summary = (f"reward {row['reward']:.2f}, EM {row['em']:.2f}, depth {row['search_depth']:.2f}, "
               f"over-search {row['over_search_ratio']:.2f}")  # fmt: skip
    bar.set_postfix_str(summary)
    if bar.disable and is_due:
        print(f"step {row['step'] + 1} of {bar.total}: {summary}", flush=True)
    return row


def open_tracker(settings, run):
    """A function that sends a row of metrics to where --report_to says."""
    if settings.report_to == "wandb":
        import wandb

        tracker = wandb.init(project="autosearch", name=run.name, dir=run, config=asdict(settings))
        return lambda row: tracker.log(row, step=row["step"])
    if settings.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(run / "tensorboard")
        return lambda row: [writer.add_scalar(key, value, row["step"]) for key, value in row.items()
                            if value is not None]  # fmt: skip
    return lambda row: None


def append_line(path, row):
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


# Models and checkpoints


def load_model(settings, adapter=None):
    """The base model, 4-bit if wanted, with a trainable LoRA adapter: a fresh one, or the one in folder `adapter`.

    Returns (model, tokenizer). Raises DataError for a model whose logits the loss would get wrong.
    """
    from peft import LoraConfig, get_peft_model

    model_path = locate(settings.model)
    tokenizer, model = load_tokenizer(model_path), load_base_model(model_path, settings.load_in_4bit)
    for name in ("final_logit_softcapping", "logit_scale"):
        if getattr(model.config, name, None):
            raise DataError(f"{settings.model}: models with {name} are not supported")
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if adapter:
        return load_adapter(model, adapter, is_trainable=True), tokenizer
    lora = LoraConfig(r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules=settings.lora_targets,
                      task_type="CAUSAL_LM")  # fmt: skip
    return get_peft_model(model, lora), tokenizer


@contextmanager
def new_folder(place):
    """A folder to write into that becomes `place` once it is complete, or goes if it cannot be completed.

    What `place` held before is kept as `place`.old. A kill at any moment leaves one of the two, complete.
    """
    beside, old = Path(f"{place}.tmp"), Path(f"{place}.old")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(place, old)
        os.rename(beside, place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def save_checkpoint(model, optimizer, step, place):
    """Write adapter, optimizer and the number of steps done to the folder `place`. Raises DataError (a full disk).

    Nothing else is needed to go on exactly: questions, random numbers and learning rate follow from the seed and the
    step, and held-out scores stand in metrics.jsonl.
    """
    with on_failure(f"{place}: not written (is the disk full?)"), new_folder(place) as folder:
        model.save_pretrained(folder, save_embedding_layers=False)  # "auto" would ask the hub about the base model
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        write_text(folder / "state.json", json.dumps({"step": step}))


def find_checkpoint(run):
    """The folder of the last complete checkpoint, or None."""
    return next((run / name for name in ("adapter", "adapter.old") if (run / name).exists()), None)


def load_optimizer(optimizer, checkpoint):
    """Put the optimizer's state back; returns the number of steps done. Raises DataError where a file is damaged."""
    with on_failure(f"{checkpoint}: damaged (without this folder, the run goes on from the checkpoint before it)"):
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True, map_location="cpu")
        optimizer.load_state_dict(state)
        for parameter, moments in optimizer.state.items():
            if moments["exp_avg"].shape != parameter.shape or moments["exp_avg_sq"].shape != parameter.shape:
                raise ValueError("optimizer.pt belongs to another adapter")
        return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["step"]


def settings_of(run):
    """The two settings objects that a run was started with. Raises DataError or OSError if the folder holds no run."""
    config = read_json(run / "config.json")
    return [kind(**{key: config[key] for key in kind.__dataclass_fields__ if key in config})
            for kind in (TrainSettings, RolloutSettings)]  # fmt: skip


def new_run(settings, rollout_settings):
    """Make the run's folder, with its config.json. A default name gets a number where it is taken."""
    cost = f"-{settings.search_cost:g}" if settings.search_cost is not None else ""
    name = settings.name or f"{settings.reward}{cost}-seed{settings.seed}"
    run, number = Path("runs") / name, 2
    while run.exists():
        run, number = Path("runs") / f"{name}-{number}", number + 1
    packages = ("torch", "transformers", "peft", "bitsandbytes", "rank-bm25", "numpy")
    config = asdict(settings) | asdict(rollout_settings)
    versions = {package: package_version(package) for package in packages} | {"python": sys.version.split()[0]}
    config |= {"versions": versions, "commit": git_commit()}
    with new_folder(run) as folder:
        write_text(folder / "config.json", json.dumps(config, indent=1))
    return run


def package_version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit():
    """The commit of the code, with "-dirty" where files differ from it; None outside a repository."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None


def check_settings(settings, rollout_settings):
    """Refuse settings that cannot work, before anything is loaded or written. Returns the reward's weights."""
    if settings.reward not in reward.REWARDS:
        raise DataError(f"--reward {settings.reward}: choose one of {', '.join(reward.REWARDS)}")
    counts = {name: getattr(settings, name) for name in ("steps", "num_questions", "num_iterations", "lora_r",
                                                         "micro_batch_size", "save_every", "eval_batch_size")}
    check_limits(rollout_settings)
    for name, value in (counts | {"lora_alpha": settings.lora_alpha, "eval_limit": settings.eval_limit or 1}).items():
        if value < 1:
            raise DataError(f"--{name} {value}: must be 1 or more")
    for name in ("learning_rate", "temperature", "epsilon", "beta", "max_grad_norm", "eval_sample", "sample_every"):
        if not 0 <= getattr(settings, name) < math.inf:
            raise DataError(f"--{name} {getattr(settings, name)}: must be a number from 0 on")
    if not 0 <= settings.seed < 2**32:
        raise DataError(f"--seed {settings.seed}: must be from 0 to 4294967295")
    if settings.num_generations < 2:
        raise DataError(f"--num_generations {settings.num_generations}: a group needs 2 or more rollouts to compare")
    if settings.temperature == 0:
        raise DataError(f"--temperature {settings.temperature}: training samples, it must be above 0")
    weights = reward.REWARDS[settings.reward]
    if settings.report_to != "none" and find_spec(settings.report_to) is None:
        raise DataError(f"--report_to {settings.report_to}: the package {settings.report_to} is not installed")
    if settings.search_cost is not None:
        if not weights.search_cost:
            raise DataError(f"--search_cost is for --reward search-penalty, not for {settings.reward}")
        weights = replace(weights, search_cost=settings.search_cost)
    return weights


def load_data(settings, rollout_settings, weights, adapter):
    """(questions, retriever) to train on and the held-out pair; ([], None) if there is none.

    Refuses with a DataError what cannot be used, the cheapest checks first and all of them before the model is loaded.
    """
    questions = load_questions(locate(settings.questions))
    dev = load_questions(locate(settings.eval_questions))[: settings.eval_limit] if settings.eval_questions else []
    files = [(settings.questions, questions), (settings.eval_questions, dev)]
    for path, question in ((path, question) for path, rows in files for question in rows):
        if (weights.information_gain or weights.redundancy) and "supporting_titles" not in question["metadata"]:
            raise DataError(f"{path}: question {question['id']} has no metadata.supporting_titles, which --reward "
                            f"{settings.reward} needs")  # fmt: skip
    check_model(locate(settings.model), rollout_settings, files, adapter)
    if settings.retriever_url:
        client = SearchClient(settings.retriever_url)
        return (questions, client), (dev, client)
    retriever = open_corpus(locate(settings.corpus))
    if len(retriever.passages) == 1:
        raise DataError(f"{settings.corpus}: one passage only: there is nothing to learn from searching in it")
    if not dev or settings.eval_corpus == settings.corpus:
        return (questions, retriever), (dev, retriever)
    return (questions, retriever), (dev, open_corpus(locate(settings.eval_corpus)))


def merge_adapter(run, settings, out):
    """Write base model plus adapter, in 16 bits, as an ordinary model folder. Raises DataError.

    The adapter is added to the unquantised weights: into 4-bit ones it would vanish in the rounding.
    """
    folder = find_checkpoint(run)
    if folder is None:
        raise DataError(f"{run}: there is no adapter yet")
    if Path(out).exists():
        raise DataError(f"--merge {out}: exists already")
    model = load_adapter(load_base_model(locate(settings.model), dtype=torch.bfloat16), folder).merge_and_unload()
    with on_failure(f"{out}: not written"), new_folder(Path(out)) as beside:
        model.save_pretrained(beside)
        load_tokenizer(locate(settings.model)).save_pretrained(beside)
    print(f"{settings.model} with {folder}: {out}")


# Memory


def dry_run(model, tokenizer, optimizer, questions, retriever, settings, rollout_settings):
    """One step at its largest: the longest prompt, all searches, the longest passages, every text to its limit.

    Prints seconds by phase, and the peak memory so far after each.
    """
    limits, rows = rollout_settings, settings.num_questions * settings.num_generations
    clock = Clock(seconds := {})
    style = system_prompt_of(limits), limits.prompt_style
    longest = max(questions, key=lambda question: len(question["question"]))
    trajectory = Trajectory(longest, prompt_ids=encode_prompt(tokenizer, longest["question"], *style))
    passages = sorted(retriever.search([longest["question"]], 50)[0], key=lambda hit: -len(hit["text"]))[: limits.topk]
    passages = [{"title": hit["title"], "text": hit["text"][: limits.max_passage_chars]} for hit in passages]
    observation, probe = encode(tokenizer, show_passages(passages)), encode(tokenizer, PROBE)
    sampling = re.compile("(?!)"), settings.temperature, torch.Generator(model.device).manual_seed(0)  # no tag stops it
    print(f"{'loaded':>12}                 {peak_memory() / 2**30:7.2f} GiB")
    with inference_weights(model), torch.inference_mode():
        with clock("rollout"):
            batch, logits = CachedBatch.start(model, tokenizer, [trajectory.prompt_ids] * settings.num_questions,
                                              settings.num_generations)  # fmt: skip
            batch.eos_ids = set()
        for turns_left in reversed(range(limits.max_searches + 1)):
            with clock("rollout"):
                trajectory.append(batch.write(logits, limits.max_turn_tokens, *sampling)[0], sampled=True)
            room = limits.max_context - length_of(trajectory) - limits.max_turn_tokens
            if not turns_left or room < len(observation):
                break
            with clock("rollout"):
                logits = batch.append([observation] * rows)
                trajectory.append(observation, sampled=False)
            with clock("self_answer"):
                batch.branch([probe] * rows, limits.max_self_answer_tokens, *sampling)
    print(f"{'rollout':>12}  {seconds['rollout'] + seconds.get('self_answer', 0):8.1f} s     "
          f"{peak_memory() / 2**30:7.2f} GiB   {rows} trajectories of {length_of(trajectory)} tokens")  # fmt: skip
    del batch, logits
    model.train()
    with clock("update"):
        advantages = torch.tensor([1.0, -1.0] * rows)[:rows]
        update(model, optimizer, [trajectory] * rows, advantages, settings.learning_rate, settings)
    print(f"{'update':>12}  {seconds['update']:8.1f} s     {peak_memory() / 2**30:7.2f} GiB")


def peak_memory():
    """Most bytes in use until now: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource  # not there on Windows

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def estimate_memory(config, settings, rollout_settings):
    """Bytes that a run needs at its peak, by part, from the shapes alone: what `--dry_run` measures.

    config: the model's. Assumes a decoder of the Llama kind (Qwen2.5, SmolLM2): attention, gated MLP, LoRA on every
    linear layer, and trajectories as long as `max_context`.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = 2 if torch.cuda.is_available() or settings.load_in_4bit else 4  # bytes of a number that is not in 4 bits
    layers = config.num_hidden_layers
    linear = [module for name, module in model.named_modules()
              if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")]  # fmt: skip
    quantised = sum(module.weight.numel() for module in linear)
    others = sum(parameter.numel() for parameter in model.parameters()) - quantised
    lora = sum(settings.lora_r * (module.in_features + module.out_features) for module in linear)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    width, kv_width, mlp = config.hidden_size, config.num_key_value_heads * head_dim, config.intermediate_size
    context = rollout_settings.max_context
    rows = settings.num_questions * settings.num_generations
    tokens = settings.micro_batch_size * context
    # What the backward pass needs of a layer, numbers a token: inputs of both norms and of the linear layers, queries,
    # keys and values, the MLP's three products; LoRA reads its inputs in float32.
    kept = (4 * width + 2 * heads * head_dim + 2 * kv_width + 4 * mlp) * size
    kept += 4 * sum(module.in_features for module in linear) // layers if size == 2 else 0
    recompute = settings.gradient_checkpointing
    sampled = settings.micro_batch_size * (rollout_settings.max_searches + 1) * rollout_settings.max_turn_tokens
    logits = min(sampled * config.vocab_size, LOGITS_AT_ONCE)  # a piece: logits, log_softmax and gradient in float32
    observation = rows * rollout_settings.topk * rollout_settings.max_passage_chars // 4  # tokens forwarded at once
    return {
        "weights": quantised * (0.52 if settings.load_in_4bit else size) + others * size,
        "adapter, gradients, Adam": lora * 16,
        "rollout: cache": 2 * layers * kv_width * size * rows * context,
        "rollout: a layer": size * max(2 * heads * head_dim * rows * context, (3 * mlp + 6 * width) * observation),
        "rollout: merged weights": 0 if settings.load_in_4bit or size == 2 else quantised * size,
        "rollout: logits": rows * config.vocab_size * 4 * 3,
        "update: activations": tokens * layers * (width * size if recompute else kept),
        "update: logits, or a layer": max(logits * (12 if size == 4 else 16),
                                          tokens * (2 * mlp * size + (kept if recompute else 0))),
    }  # fmt: skip


def peak_of(parts):
    """The peak of `estimate_memory`'s parts: rollout and update do not meet."""
    phases = [sum(value for name, value in parts.items() if name.startswith(phase)) for phase in ("rollout", "update")]
    return sum(value for name, value in parts.items() if ":" not in name) + max(phases)


def read_preset(name):
    """The settings in data/presets/NAME.json. Raises DataError."""
    folder = Path(__file__).resolve().parent / "data" / "presets"
    known = sorted(path.stem for path in folder.glob("*.json"))
    if name not in known:
        raise DataError(f"--preset {name}: choose one of {', '.join(known)}")
    return read_json(folder / f"{name}.json")


def parse(arguments):
    """(settings, rollout_settings, run) of the command line; run: the folder of --resume, which all settings are from.

    Raises DataError for options that do not go together.
    """
    parser = HfArgumentParser((TrainSettings, RolloutSettings), description=__doc__.splitlines()[0])
    settings, rollout_settings = parse_options(parser, arguments)
    if settings.resume:
        words = [word.split("=")[0] for word in (sys.argv[1:] if arguments is None else arguments)]
        given = [word for word in words if word.startswith("--") and word not in ("--resume", "--merge")]
        if given:
            raise DataError(f"--resume takes all settings from {settings.resume}: leave out {', '.join(given)}")
        run, out = Path(settings.resume), settings.merge
        settings, rollout_settings = settings_of(run)
        settings.merge = out
        return settings, rollout_settings, run
    if settings.merge:
        raise DataError("--merge writes the model of a run: say which by --resume runs/NAME")
    if settings.preset:
        parser.set_defaults(**read_preset(settings.preset))
        settings, rollout_settings = parse_options(parser, arguments)
    if settings.load_in_4bit is None:
        settings.load_in_4bit = torch.cuda.is_available() and find_spec("bitsandbytes") is not None
    check_4bit(settings.load_in_4bit)
    if settings.name and Path(settings.name).name != settings.name:
        raise DataError(f"--name {settings.name}: must be the name of a folder in runs/, without a path")
    if settings.name and (Path("runs") / settings.name).exists():
        raise DataError(f"--name {settings.name}: runs/{settings.name} exists; go on with it by --resume "
                        f"runs/{settings.name}, or choose another name")  # fmt: skip
    return settings, rollout_settings, None


def main(arguments=None):
    settings, rollout_settings, resumed = parse(arguments)
    weights = check_settings(settings, rollout_settings)
    if settings.merge:
        return merge_adapter(resumed, settings, settings.merge)
    checkpoint = find_checkpoint(resumed) if resumed else None
    data, held_out = load_data(settings, rollout_settings, weights, checkpoint)
    torch.set_flush_denormal(True)  # CPUs are slow on the tiny numbers that attention leaves behind
    torch.manual_seed(settings.seed)
    model, tokenizer = load_model(settings, checkpoint)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    if settings.dry_run:
        config = AutoConfig.from_pretrained(locate(settings.model)).get_text_config()
        parts = estimate_memory(config, settings, rollout_settings)
        print("estimate: " + ", ".join(f"{name} {value / 2**30:.2f}" for name, value in parts.items())
              + f"; peak {peak_of(parts) / 2**30:.2f} GiB")  # fmt: skip
        return dry_run(model, tokenizer, optimizer, *data, settings, rollout_settings)
    first_step = load_optimizer(optimizer, checkpoint) if checkpoint else 0
    run = resumed or new_run(settings, rollout_settings)
    print(f"{run}: {weights.about}; {sum(p.numel() for p in parameters):,} trainable parameters", flush=True)
    go_on = f"go on with: python train.py --resume {run}"
    try:
        if first_step == 0:
            measure("before", model, tokenizer, *held_out, settings, rollout_settings, run)
        model.train()
        train(model, tokenizer, optimizer, data, held_out, settings, rollout_settings, weights, run, first_step)
        results = measure("after", model, tokenizer, *held_out, settings, rollout_settings, run)
        plot_curves([run], run / "curves.png")
    except KeyboardInterrupt:
        raise SystemExit(f"\nstopped; {go_on}") from None
    except (DataError, SearchError, OSError) as error:
        raise DataError(f"{error_line(error)}; {go_on}") from None
    if results:
        print(before_after_table(results))
    print(f"curves: {run / 'curves.png'}   adapter: {run / 'adapter'}")


def measure(moment, model, tokenizer, questions, retriever, settings, rollout_settings, run):
    """Write the held-out reports of a moment ("before" or "after" training) into eval.json, unless they are there.

    Returns what the file then holds: {moment: {"sampled": R, "greedy": R}}.
    """
    path = run / "eval.json"
    results = read_json(path) if path.exists() else {}
    if not questions or moment in results:
        return results
    adapter = str(run / "adapter") if moment == "after" else None
    files = {"questions": settings.eval_questions}
    files |= {} if settings.retriever_url else {"corpus": settings.eval_corpus}
    search_in = settings.retriever_url or "BM25"
    results[moment] = {}
    for decoding, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        with inference_weights(model):
            trajectories = evaluate(model, tokenizer, questions, retriever, rollout_settings, temperature,
                                    settings.seed, settings.eval_batch_size)  # fmt: skip
        depends_on = provenance(settings.model, adapter, files, rollout_settings, retriever=search_in,
                                temperature=temperature, seed=settings.seed, load_in_4bit=settings.load_in_4bit)
        results[moment][decoding] = report(trajectories, settings=depends_on)
    if moment == "after":  # the last ones, greedy
        save_trajectories(run / HELD_OUT, [(trajectory, score_trajectory(trajectory)) for trajectory in trajectories])
    write_text(path, json.dumps(results, indent=1))
    return results


def drop_later_lines(path, first_step):
    """After a resume, forget logged steps that come again and lines that were cut short. Returns the rows that stay."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with suppress(ValueError):
                rows.append(json.loads(line))
        rows = [row for row in rows if row["step"] < first_step]
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return rows


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    try:
        main()
    except (DataError, SearchError, OSError) as error:
        print(f"train.py: {error_line(error)}", file=sys.stderr)
        sys.exit(2)

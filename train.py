"""Train a search agent with AutoSearch's rewards and GRPO: LoRA on a frozen model, 4-bit or not.

Where this departs from the paper (arXiv 2604.17337):
1. GRPO, as in the paper's appendix, instead of PPO with a critic: the trajectory's summed reward is
   the outcome reward.
2. LoRA, not full fine-tuning; the KL term's reference has no adapter, or that of a cold start.
3. By default a tiny model in a tiny world, so that the effect shows on a CPU in minutes; group
   size, steps and learning rate are chosen for it, and the KL coefficient is 0 (paper: 0.001).
4. One batch is one update (paper: two mini-batches). The ratio is then exactly 1 and nothing is
   clipped; `--num_iterations 2` shows the clipping. The loss is a mean over all sampled tokens.
5. Self-answers continue the trajectory on a branch that is thrown away; the released code asks in
   a fresh prompt, as `--self_answer separate` does.
6. The step rewards follow the paper where the released code differs: see reward.py.

    python train.py                                     # tiny world, paper's rewards, CPU
    python train.py --reward outcome                    # Search-R1's reward: answer and format
    python train.py --resume runs/NAME                  # go on with a run that was stopped
    python train.py --preset qwen2.5-0.5b --dry_run     # does it fit? one step at its deepest
    python train.py --resume runs/NAME --merge FOLDER   # write the trained model, 16-bit
"""

import math
import signal
from dataclasses import dataclass, replace

import torch

import reward
from data import cold_start
from eval import evaluate, held_out_reward, mean_metrics, measure
from plumbing import data, figures, files, logs, memory, models, options, prompts, runs, tables
from plumbing.adapters import half_precision, inference_weights, reference_weights, scale_gradients
from plumbing.options import setting
from retriever import open_retriever
from rollout import RolloutSettings, Sampling, rollout, score_groups, system_prompt_of


@dataclass
class TrainSettings(RolloutSettings, options.RunSettings):
    """The method's settings; a rollout's are in rollout.py, a run's in plumbing/options.py."""

    reward: str = setting("autosearch", reward.HELP)
    search_cost: float | None = setting(None, "flat cost of a search, for search-penalty", low=0)
    steps: int = setting(28, "training steps; each is one batch of rollouts", low=1)
    num_questions: int = setting(12, "questions in a step", low=1)
    num_generations: int = setting(8, "rollouts of each question, G: the group compared", low=2)
    num_iterations: int = setting(1, "updates on each batch; from 2 on the ratio moves", low=1)
    temperature: float = setting(1.0, "of the rollouts; the loss uses the same", above=0)
    learning_rate: float = setting(2e-3, "peak learning rate, falling linearly to 0", low=0)
    epsilon: float = setting(0.2, "clip range of the ratio", low=0)
    beta: float = setting(0.0, "KL coefficient; 0 computes no reference", low=0)
    max_grad_norm: float = setting(1.0, "gradients above this norm are scaled down", low=0)
    micro_batch_tokens: int = setting(2048, "most in one forward and backward pass", low=1)


def train(policy, optimizer, task, held_out, settings, run, first_step):
    """The loop: questions -> rollouts -> rewards -> advantages -> loss -> update.
    task, held_out: `data.Task`. run: its folder. Raises KeyboardInterrupt once told to stop."""
    model, G, weights = policy.model, settings.num_generations, reward_weights(settings)
    log = logs.Logbook(run, settings, first_step)
    with runs.stop_signals() as stop:
        for step in log.bar:
            clock, seed = logs.Clock(), runs.seed_of(settings.seed, step)
            torch.manual_seed(seed)  # a step depends on seed, number and weights alone

            # Questions
            number = settings.num_questions
            questions = data.draw_questions(task.questions, number, step, settings.seed)

            # Rollouts: G of each question
            sampling = Sampling(G, settings.temperature, seed)
            sampling.ask_before_search = weights.ask_before_search
            with inference_weights(model):
                trajectories = rollout(policy, questions, task.retriever, settings, sampling, clock)

            # Rewards: the sum over a trajectory's steps
            scores = score_groups(trajectories, weights, G)
            rewards = total_rewards(scores, trajectories)  # (N,), N = questions * G

            # Advantages: against the other rollouts of the question
            advantages = group_advantages(rewards, G)  # (N,)

            # Loss and update
            rate = settings.learning_rate * (1 - step / settings.steps)
            with clock("update"):
                losses = update(model, optimizer, trajectories, advantages, rate, settings)

            row = {"step": step} | step_metrics(trajectories, scores, rewards, settings)
            row |= losses | clock.row()
            if log.is_due(step):
                row |= held_out_reward(policy, held_out, settings, weights)
            log.add(row, trajectories, scores)
            runs.save_step(model, optimizer, log, step, stop)


def reward_weights(settings):
    """The `reward.Weights` that the settings name. Raises DataError."""
    name, known = settings.reward, ", ".join(reward.REWARDS)
    files.check(name in reward.REWARDS, f"--reward {name}", f"choose one of {known}")
    weights, cost = reward.REWARDS[name], settings.search_cost
    fits = cost is None or weights.search_cost
    files.check(fits, "--search_cost is for --reward search-penalty", f"not for {name}")
    return weights if cost is None else replace(weights, search_cost=cost)


# Rewards and advantages


def total_rewards(scores, trajectories):
    """Total rewards (N,). Raises DataError for one that is not finite, and says whose.
    Sums that are equal on paper may differ in the last bit: a group must not learn from that."""
    for score, trajectory in zip(scores, trajectories):
        where = f"reward {score.total} for question {trajectory.question['id']}"
        files.check(math.isfinite(score.total), where, trajectory.steps)
    return torch.tensor([round(score.total, 6) for score in scores], dtype=torch.float64)


def group_advantages(rewards, num_generations):
    """GRPO: A = (r - mean(r)) / std(r) over the rollouts of a question; 0 where all are equal.
    rewards: (N,), groups of `num_generations` adjacent. Returns (N,) float32.
    >>> group_advantages(torch.tensor([1.0, 0.0, 0.9, 0.9]), 2)
    tensor([ 0.7071, -0.7071,  0.0000,  0.0000])
    """
    groups = rewards.view(-1, num_generations)  # (Q, G)
    centred = groups - groups.mean(1, keepdim=True)
    advantages = centred / groups.std(1, keepdim=True)
    return advantages.masked_fill(all_equal(groups)[:, None], 0.0).flatten().float()


def all_equal(groups):
    """Which rows of (Q, G) hold one value only: (Q,) bool. (Their std need not be exactly 0.)"""
    return (groups == groups[:, :1]).all(1)


# Loss and update


def update(model, optimizer, trajectories, advantages, learning_rate, settings):
    """`num_iterations` clipped GRPO updates on one batch. Returns the loss, a mean over all sampled
    tokens, and means over the trained ones. What is not finite is skipped and counted."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    num_tokens = max(sum(trajectory.tokens for trajectory in trajectories), 1)
    if not settings.beta:  # without a KL term, an advantage of 0 adds exactly 0 to the gradient
        rows = advantages.nonzero().flatten().tolist() or [0]  # never none: Adam has its momentum
        trajectories, advantages = [trajectories[i] for i in rows], advantages[rows]
    trained_tokens = max(sum(trajectory.tokens for trajectory in trajectories), 1)
    scale = 2 ** num_tokens.bit_length()  # a token's small share would vanish in float16
    size = settings.micro_batch_tokens
    batches = make_micro_batches(trajectories, advantages, size, model.device)
    model.train()
    totals, skipped = {}, 0
    for _ in range(settings.num_iterations):
        for batch in batches:
            with half_precision(model):
                loss, sums = micro_batch_loss(model, batch, settings)
            (loss / num_tokens * scale).backward()
            for name, value in sums.items():
                number = num_tokens if name == "loss" else trained_tokens
                share = value.item() / number / settings.num_iterations
                totals[name] = totals.get(name, 0.0) + share
        scale_gradients(model, 1 / scale)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm).item()
        if math.isfinite(norm) and math.isfinite(totals["loss"]):
            optimizer.step()
        else:  # one such step would spoil the weights and Adam's moments for good
            skipped += 1
        optimizer.zero_grad()
    totals |= logs.batch_metrics(batches, trajectories, trained_tokens)
    return totals | {"grad_norm": norm, "skipped_updates": skipped}


def make_micro_batches(trajectories, advantages, max_tokens, device):
    """Sort trajectories by length, so that little is padding, and pad micro-batches on the right,
    to `max_tokens` at most; a longer one goes alone. Causal attention then needs no mask: no token
    sees what follows it. Returns dicts of input_ids, completion_mask and sampling_logps (B, T),
    T = prompt and completion, and advantages (B,)."""
    groups = [[]]
    for i in sorted(range(len(trajectories)), key=lambda i: len(trajectories[i])):
        if groups[-1] and (len(groups[-1]) + 1) * len(trajectories[i]) > max_tokens:
            groups.append([])
        groups[-1].append(i)
    batches = []
    for rows in groups:
        batch = {name: [] for name in ("input_ids", "completion_mask", "sampling_logps")}
        width = len(trajectories[rows[-1]])  # of the last one, the longest
        for row in (trajectories[i] for i in rows):
            prompt, padding = [0] * len(row.prompt_ids), [0] * (width - len(row))
            batch["input_ids"].append(row.prompt_ids + row.completion_ids + padding)
            batch["completion_mask"].append(prompt + row.completion_mask + padding)
            batch["sampling_logps"].append((prompt + row.sampling_logps + [0.0] * width)[:width])
        batch = {name: torch.tensor(values, device=device) for name, values in batch.items()}
        batches.append(batch | {"advantages": advantages[rows].to(device)})
    return batches


def micro_batch_loss(model, batch, settings):
    """The loss of a micro-batch, and what is reported of it: sums over the sampled tokens."""
    logps, entropy = per_token_logps(model, batch, settings.temperature)
    if "old_per_token_logps" not in batch:  # the policy has not moved since it sampled
        batch["old_per_token_logps"] = logps.detach()
    if settings.beta and "ref_per_token_logps" not in batch:
        with torch.no_grad(), reference_weights(model):
            batch["ref_per_token_logps"], _ = per_token_logps(model, batch, settings.temperature)
    loss, sums = grpo_loss(logps, batch, settings.epsilon, settings.beta)
    return loss, sums | {"loss": loss.detach(), "entropy": entropy.sum()}


def per_token_logps(model, batch, temperature):
    """Log-probability of each sampled token and the entropy there: two (B, T), 0 elsewhere.
    Logits are computed at the sampled positions only: no (B, T, V) tensor is ever made."""
    mask = batch["completion_mask"].bool()  # (B, T)
    causal_lm = model.get_base_model()  # the adapter is inside its layers
    names = ("input_ids", "position_ids", "attention_mask")
    inputs = {name: batch[name] for name in names if name in batch}  # the last two: cold start
    output = causal_lm.base_model(**inputs, use_cache=False)
    # A token was drawn from the state before it; the first one, of the prompt, never counts.
    states = output.last_hidden_state[:, :-1][mask[:, 1:]]  # (N, d), N = sampled tokens
    sampled, vocab_size = batch["input_ids"][mask], causal_lm.config.vocab_size  # (N,), V

    def logps_and_entropy(states, sampled):
        logits = causal_lm.get_output_embeddings()(states).float() / temperature  # (n, V)
        log_softmax = logits.log_softmax(-1)
        logps = log_softmax.gather(1, sampled[:, None])[:, 0]
        fixed = log_softmax.detach()
        return logps, -(fixed.exp() * fixed).sum(-1)

    logps, entropy = memory.in_pieces(logps_and_entropy, states, sampled, vocab_size)
    empty = torch.zeros(mask.shape, device=states.device)
    return empty.masked_scatter(mask, logps), empty.masked_scatter(mask, entropy)


def grpo_loss(per_token_logps, batch, epsilon, beta):
    """Clipped surrogate plus k3 KL, summed over the sampled tokens, with d = ref - logp:

        -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A) + beta * (exp(d) - d - 1)

    per_token_logps: (B, T). batch: completion_mask (B, T), advantages (B,), old_per_token_logps
    and, if beta > 0, ref_per_token_logps (B, T). Returns (loss, {"clip_ratio", "kl"}), sums.
    Masked before `exp`: what stands at a masked position cannot reach the gradient."""
    mask = batch["completion_mask"].bool()
    advantages = batch["advantages"][:, None]  # (B, 1)
    log_ratio = (per_token_logps - batch["old_per_token_logps"]).masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - epsilon, 1 + epsilon)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    is_clipped = (ratio * advantages > clipped_ratio * advantages) & mask
    sums = {"clip_ratio": is_clipped.sum()}
    if beta:
        d = (batch["ref_per_token_logps"] - per_token_logps).masked_fill(~mask, 0.0)
        kl = d.exp() - d - 1
        loss = loss + beta * kl
        sums["kl"] = (kl.detach() * mask).sum()
    return (loss * mask).sum(), sums


def step_metrics(trajectories, scores, rewards, settings):
    """What a line of metrics.jsonl says of a step's rollouts; README explains each."""
    groups, means = rewards.view(-1, settings.num_generations), mean_metrics(trajectories)
    row = {"seed": settings.seed, "reward": rewards.mean().item()}
    row["reward_std"] = groups.std(1).mean().item()
    for name in scores[0].parts[0]:
        total = sum(part[name] for score in scores for part in score.parts)
        row[f"reward/{name}"] = total / len(scores)
    for name in ("em", "f1", "valid_action_ratio", "tokens"):
        row[name] = means[name]
    row |= {"search_depth": means["sd"], "over_search_ratio": means["osr"]}
    return row | {"frac_reward_zero_std": all_equal(groups).double().mean().item()}


# The command line


def load_tasks(settings, checkpoint):
    """The Tasks to train on and to evaluate on, the latter without questions if there are none; and
    demonstrations. Refuses what cannot be used, before any weights are loaded (DataError)."""
    logs.check_tracker(settings.report_to)
    path = files.locate(settings.model)
    weights, held_out = reward_weights(settings), []
    needs_titles = bool(weights.information_gain or weights.redundancy)
    questions = data.load_questions(settings.questions, None, needs_titles)
    if settings.eval_questions:
        held_out = data.load_questions(settings.eval_questions, settings.eval_limit, needs_titles)
    tokenizer = models.load_tokenizer(path)
    models.check_model(path, tokenizer, settings.max_context, checkpoint)
    for name, rows in ((settings.questions, questions), (settings.eval_questions, held_out)):
        prompts.check_questions(name, rows, tokenizer, settings, system_prompt_of(settings))
    retriever = eval_retriever = open_retriever(settings.corpus, settings.retriever_url)
    problem = "one passage only: there is nothing to learn from searching in it"
    files.check(len(getattr(retriever, "passages", "ab")) > 1, settings.corpus, problem)
    if held_out and settings.eval_corpus != settings.corpus and not settings.retriever_url:
        eval_retriever = open_retriever(settings.eval_corpus)
    task = data.Task(questions, retriever)
    prompts.warn(tokenizer, system_prompt_of(settings), settings.prompt_style, task)
    return task, data.Task(held_out, eval_retriever), cold_start.make(task, tokenizer, settings)


def dry_run(policy, optimizer, task, held_out, settings):
    """One ordinary step on the longest questions and passages at the greatest depth, and an
    evaluation batch. Prints the seconds of each, and the peak memory until its end."""
    rows, number = settings.eval_batch_size, settings.num_questions
    questions = sorted(task.questions, key=lambda question: -len(question["question"]))[:number]
    sampling = Sampling(settings.num_generations, force_depth=settings.max_searches)
    longest = memory.Longest(task.retriever)
    with memory.measured("rollout"), inference_weights(policy.model):
        trajectories = rollout(policy, questions, longest, settings, sampling)
    print(f"{len(trajectories)} trajectories of at most {max(map(len, trajectories))} tokens")
    with memory.measured("update"):
        advantages = torch.linspace(-1, 1, len(trajectories))
        update(policy.model, optimizer, trajectories, advantages, 0.0, settings)
    sampling.num_generations = 1
    with memory.measured("evaluation"), inference_weights(policy.model):
        evaluate(policy, data.Task(held_out.questions[:rows], longest), settings, sampling, rows)


def main(arguments=None):
    settings, resumed = options.parse_training(TrainSettings, arguments, __doc__.splitlines()[0])
    weights = reward_weights(settings)
    if settings.merge:
        return runs.write_merged(settings, resumed)
    checkpoint = runs.find_checkpoint(resumed)
    start = checkpoint or cold_start.begin_with(resumed, settings)
    task, held_out, shown = load_tasks(settings, start)
    torch.set_flush_denormal(True)  # CPUs are slow on the tiny numbers that attention leaves
    torch.manual_seed(settings.seed)
    policy = models.load_trainable(settings, start)
    parameters = [p for p in policy.model.parameters() if p.requires_grad]  # the adapter's
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    if settings.dry_run:
        return dry_run(policy, optimizer, task, held_out, settings)
    first_step = runs.load_optimizer(optimizer, checkpoint) if checkpoint else 0
    run = resumed or runs.new_run(settings)
    number = sum(parameter.numel() for parameter in parameters)
    done = "finished, " * (first_step == settings.steps) + f"{first_step} of {settings.steps}"
    print(f"{run}: {weights.about}; {number:,} trainable parameters; {done} steps", flush=True)
    with runs.resumable(run):
        cold_start.prepare(policy, shown, task, settings, run, per_token_logps)
        if first_step == 0:
            measure(policy, held_out, settings, run, "before")
        train(policy, optimizer, task, held_out, settings, run, first_step)
        results = measure(policy, held_out, settings, run, "after")
        figures.plot_curves([run], run / "curves.png")
    if results:
        tables.show(tables.before_after_rows(results))
    print(f"curves: {run / 'curves.png'}   adapter: {run / 'adapter'}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    files.run_script("train.py", main)

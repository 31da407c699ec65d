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

    python train.py                        # tiny world, paper's rewards, CPU
    python train.py --reward outcome       # Search-R1's reward: final answer and format only
    python train.py --resume runs/NAME     # go on with a run that was stopped
"""

import functools
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import BitsAndBytesConfig, HfArgumentParser

import reward
from eval import (
    HELD_OUT,
    before_after_table,
    evaluate,
    plot_curves,
    provenance,
    render_trajectory,
    report,
    save_trajectories,
    score_trajectory,
    write_text,
)
from retriever import BM25, DataError, SearchClient, SearchError, load_corpus, load_questions
from rollout import RolloutSettings, load_tokenizer, locate, rollout, setting


@dataclass
class TrainSettings:
    """Everything about a training run that is not about a single rollout."""

    model: str = setting("data/tiny_model", "folder or hub name of a causal LM")
    corpus: str = setting("data/tinyworld/train_corpus.jsonl", "passages to search in while training")
    questions: str = setting("data/tinyworld/train.jsonl", "questions to train on")
    eval_corpus: str = setting("data/tinyworld/dev_corpus.jsonl", "passages for the held-out questions")
    eval_questions: str = setting("data/tinyworld/dev.jsonl", "held-out questions; '' for none")
    eval_limit: int | None = setting(None, "use only the first so many held-out questions")
    eval_batch_size: int = setting(128, "held-out questions rolled out together")
    retriever_url: str | None = setting(None, "search server (Search-R1's protocol) to use instead of the corpora")
    name: str | None = setting(None, "written to runs/NAME of the current folder; default: reward and seed")
    resume: str | None = setting(None, "run folder to go on with; all other settings come from it")
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
    lora_r: int = setting(16, "rank of the LoRA adapter, on all linear layers")
    lora_alpha: int = setting(32, "scale of the LoRA adapter: alpha / r")
    load_in_4bit: bool | None = setting(None, "4-bit NF4 base weights; default: on with CUDA, off elsewhere")
    gradient_checkpointing: bool = setting(False, "recompute activations in the backward pass, to save memory")
    micro_batch_size: int = setting(16, "sequences in one forward and backward pass")
    sample_every: int = setting(10, "print a scored trajectory every so many steps; 0 for none")
    save_every: int = setting(10, "write a checkpoint every so many steps")
    seed: int = setting(0, "the same seed gives the same run")


def train(model, tokenizer, optimizer, questions, retriever, settings, rollout_settings, weights, run, first_step):
    """The loop: questions -> rollouts -> rewards -> advantages -> loss -> update."""
    bar = tqdm(range(first_step, settings.steps), initial=first_step, total=settings.steps, desc=run.name)
    for step in bar:
        start, seconds = time.perf_counter(), {}  # seconds by phase
        step_seed = (settings.seed * 1_000_003 + step) % 2**32
        torch.manual_seed(step_seed)  # a step depends on nothing but the seed, its number and the weights
        batch = draw_questions(questions, settings, step)
        with inference_weights(model):
            trajectories = rollout(
                model, tokenizer, batch, retriever, rollout_settings, settings.num_generations, settings.temperature,
                ask_before_search=weights.ask_before_search, seed=step_seed, phase_seconds=seconds,
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
        append_line(run / "metrics.jsonl", row)
        bar.set_postfix_str(f"reward {row['reward']:.2f}, EM {row['em']:.2f}, depth {row['search_depth']:.2f}, "
                            f"over-search {row['over_search_ratio']:.2f}")  # fmt: skip
        if settings.sample_every and step % settings.sample_every == 0:
            show_sample(run, step, trajectories, scores, settings.num_generations)
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            save_checkpoint(model, optimizer, step + 1, run)


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
    """`num_iterations` clipped GRPO updates on one batch. Returns the means of loss, KL, entropy, ... over them."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    micro_batches = make_micro_batches(trajectories, advantages, settings.micro_batch_size, model.device)
    num_tokens = max(sum(int(batch["completion_mask"].sum()) for batch in micro_batches), 1)
    totals = {}
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
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    positions = sum(batch["input_ids"].numel() for batch in micro_batches)
    totals["padding"] = 1 - sum(map(length_of, trajectories)) / positions  # share of the positions computed in vain
    if not settings.beta:
        totals.pop("kl", None)  # without a reference there is nothing to report
    return totals | {"grad_norm": grad_norm.item()}


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


def per_token_logps(model, batch, temperature):
    """Log-probability of each sampled token, and the policy's entropy there: two (B, T) tensors, 0 where not sampled.

    Logits are computed at the sampled positions only, so that no (B, T, V) tensor is ever made.
    """
    mask = batch["completion_mask"].bool()  # (B, T)
    causal_lm = model.get_base_model()  # the adapter is inside its layers
    hidden = causal_lm.base_model(input_ids=batch["input_ids"], use_cache=False).last_hidden_state  # (B, T, d)
    states = hidden[:, :-1][mask[:, 1:]]  # (N, d): the state from which each sampled token was drawn
    logits = causal_lm.get_output_embeddings()(states).float() / temperature  # (N, V)
    log_softmax = logits.log_softmax(-1)
    sampled = batch["input_ids"][mask]  # (N,)
    empty = torch.zeros(mask.shape, device=logits.device)
    logps = empty.masked_scatter(mask, log_softmax.gather(1, sampled[:, None])[:, 0])
    entropy = -(log_softmax.detach().exp() * log_softmax.detach()).sum(-1)
    return logps, empty.masked_scatter(mask, entropy)


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


def append_line(path, row):
    with open(path, "a", encoding="utf-8") as file:
        row = {key: round(value, 6) if isinstance(value, float) else value for key, value in row.items()}
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


# Models and checkpoints


def load_model(settings, adapter=None):
    """The base model, 4-bit if wanted, with a trainable LoRA adapter: a fresh one, or the one in folder `adapter`.

    Returns (model, tokenizer). Raises DataError for a model whose logits the loss would get wrong.
    """
    from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM

    cuda, in_4bit = torch.cuda.is_available(), settings.load_in_4bit
    dtype = torch.bfloat16 if cuda else torch.float32
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                      bnb_4bit_compute_dtype=dtype) if in_4bit else None  # fmt: skip
    model_path = locate(settings.model)
    try:
        tokenizer = load_tokenizer(model_path)
    except (OSError, ValueError) as error:
        raise DataError(f"--model {settings.model}: no model there: {str(error).splitlines()[0]}") from None
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, quantization_config=quantization,
                                                 device_map={"": "cuda:0" if cuda else "cpu"})  # fmt: skip
    for name in ("final_logit_softcapping", "logit_scale"):
        if getattr(model.config, name, None):
            raise DataError(f"{settings.model}: models with {name} are not supported")
    if in_4bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        for module in model.modules():
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False  # its packed weights know no backward pass
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if adapter:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True), tokenizer
    lora = LoraConfig(r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules="all-linear",
                      task_type="CAUSAL_LM")  # fmt: skip
    return get_peft_model(model, lora), tokenizer


def resolve_4bit(settings):
    """Decide `load_in_4bit` where it was left open. Raises DataError where it is asked for and cannot be had."""
    found = importlib.util.find_spec("bitsandbytes") is not None
    if settings.load_in_4bit and not found:
        raise DataError("--load_in_4bit needs the package bitsandbytes, which is not installed")
    if settings.load_in_4bit is None:
        settings.load_in_4bit = torch.cuda.is_available() and found


def save_checkpoint(model, optimizer, step, run):
    """Write adapter, optimizer and step beside the last checkpoint and put them in its place."""
    beside, old = run / "adapter.tmp", run / "adapter.old"
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    torch.save(optimizer.state_dict(), beside / "optimizer.pt")
    write_text(beside / "state.json", json.dumps({"step": step}))
    if (run / "adapter").exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(run / "adapter", old)
    os.rename(beside, run / "adapter")
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(run):
    """The folder of the last complete checkpoint, or None."""
    return next((run / name for name in ("adapter", "adapter.old") if (run / name / "state.json").exists()), None)


def settings_of(run):
    """The two settings objects that a run was started with. Raises DataError if the folder holds no run."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{run / 'config.json'}: {error}") from None
    return [kind(**{key: config[key] for key in kind.__dataclass_fields__ if key in config})
            for kind in (TrainSettings, RolloutSettings)]  # fmt: skip


def new_run(settings, rollout_settings):
    """Make the run's folder, with its config.json. A default name gets a number where it is taken."""
    cost = f"-{settings.search_cost:g}" if settings.search_cost is not None else ""
    name = settings.name or f"{settings.reward}{cost}-seed{settings.seed}"
    run, number = Path("runs") / name, 2
    while run.exists():
        run, number = Path("runs") / f"{name}-{number}", number + 1
    run.mkdir(parents=True)
    packages = ("torch", "transformers", "peft", "bitsandbytes", "rank-bm25", "numpy")
    config = asdict(settings) | asdict(rollout_settings)
    versions = {package: package_version(package) for package in packages} | {"python": sys.version.split()[0]}
    config |= {"versions": versions, "commit": git_commit()}
    write_text(run / "config.json", json.dumps(config, indent=1))
    return run


def package_version(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit():
    """The commit of the code, None outside a repository."""
    try:
        here = Path(__file__).resolve().parent
        result = subprocess.run(["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True)
    except OSError:
        return None
    return result.stdout.strip() or None


def check_settings(settings, rollout_settings):
    """Refuse settings that cannot work, before anything is loaded or written. Returns the reward's weights."""
    if settings.reward not in reward.REWARDS:
        raise DataError(f"--reward {settings.reward}: choose one of {', '.join(reward.REWARDS)}")
    counts = {name: getattr(settings, name) for name in ("steps", "num_questions", "num_iterations", "lora_r",
                                                         "micro_batch_size", "save_every", "eval_batch_size")}
    for name, value in (counts | asdict(rollout_settings)).items():
        if isinstance(value, int) and value < 1:
            raise DataError(f"--{name} {value}: must be 1 or more")
    if not 0 <= settings.seed < 2**32:
        raise DataError(f"--seed {settings.seed}: must be from 0 to 4294967295")
    if settings.num_generations < 2:
        raise DataError(f"--num_generations {settings.num_generations}: a group needs 2 or more rollouts to compare")
    if settings.temperature <= 0:
        raise DataError(f"--temperature {settings.temperature}: training samples, it must be above 0")
    weights = reward.REWARDS[settings.reward]
    if settings.search_cost is not None:
        if not weights.search_cost:
            raise DataError(f"--search_cost is for --reward search-penalty, not for {settings.reward}")
        weights = replace(weights, search_cost=settings.search_cost)
    return weights


def check_questions(questions, weights, settings):
    """Refuse questions that the reward cannot score."""
    if weights.information_gain or weights.redundancy:
        for question in questions:
            if "supporting_titles" not in question["metadata"]:
                raise DataError(f"{settings.questions}: question {question['id']} has no metadata.supporting_titles, "
                                f"which --reward {settings.reward} needs")  # fmt: skip


def main(arguments=None):
    parser = HfArgumentParser((TrainSettings, RolloutSettings), description=__doc__.splitlines()[0])
    settings, rollout_settings = parser.parse_args_into_dataclasses(arguments)
    resumed = Path(settings.resume) if settings.resume else None
    if resumed:
        words = [word.split("=")[0] for word in (sys.argv[1:] if arguments is None else arguments)]
        given = [word for word in words if word.startswith("--") and word != "--resume"]
        if given:
            raise DataError(f"--resume takes all settings from {resumed}: leave out {', '.join(given)}")
        settings, rollout_settings = settings_of(resumed)
    weights = check_settings(settings, rollout_settings)
    if not resumed:
        resolve_4bit(settings)
        if settings.name and Path(settings.name).name != settings.name:
            raise DataError(f"--name {settings.name}: must be the name of a folder in runs/, without a path")
        if settings.name and (Path("runs") / settings.name).exists():
            raise DataError(f"--name {settings.name}: runs/{settings.name} exists; go on with it by --resume "
                            f"runs/{settings.name}, or choose another name")  # fmt: skip
    torch.set_flush_denormal(True)  # CPUs are slow on the tiny numbers that attention leaves behind
    questions = load_questions(locate(settings.questions))
    check_questions(questions, weights, settings)
    dev = load_questions(locate(settings.eval_questions))[: settings.eval_limit] if settings.eval_questions else []
    if settings.retriever_url:
        retriever = dev_retriever = SearchClient(settings.retriever_url)
    else:
        retriever = BM25(load_corpus(locate(settings.corpus)))
        dev_retriever = BM25(load_corpus(locate(settings.eval_corpus))) if dev else None
    torch.manual_seed(settings.seed)
    checkpoint = find_checkpoint(resumed) if resumed else None
    model, tokenizer = load_model(settings, checkpoint)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=0.0)
    run, first_step = resumed or new_run(settings, rollout_settings), 0
    if checkpoint:
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True, map_location="cpu"))
        first_step = json.loads((checkpoint / "state.json").read_text())["step"]
    drop_later_lines(run, first_step)
    print(f"{run}: {weights.about}; {sum(p.numel() for p in parameters):,} trainable parameters", flush=True)

    held_out = dev, dev_retriever, settings, rollout_settings, run
    try:
        if first_step == 0:
            measure("before", model, tokenizer, *held_out)
        model.train()
        train(model, tokenizer, optimizer, questions, retriever, settings, rollout_settings, weights, run, first_step)
        results = measure("after", model, tokenizer, *held_out)
    except KeyboardInterrupt:
        raise SystemExit(f"\nstopped; go on with: python train.py --resume {run}") from None
    plot_curves([run], run / "curves.png")
    if dev:
        print(before_after_table(results))
    print(f"curves: {run / 'curves.png'}   adapter: {run / 'adapter'}")


def measure(moment, model, tokenizer, questions, retriever, settings, rollout_settings, run):
    """Write the held-out reports of a moment ("before" or "after" training) into eval.json, unless they are there.

    Returns what the file then holds: {moment: {"sampled": R, "greedy": R}}.
    """
    path = run / "eval.json"
    results = json.loads(path.read_text()) if path.exists() else {}
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
        depends_on = provenance(settings.model, adapter, files, retriever=search_in, temperature=temperature,
                                seed=settings.seed, **asdict(rollout_settings))  # fmt: skip
        results[moment][decoding] = report(trajectories, settings=depends_on)
    if moment == "after":  # the last ones, greedy
        save_trajectories(run / HELD_OUT, [(trajectory, score_trajectory(trajectory)) for trajectory in trajectories])
    write_text(path, json.dumps(results, indent=1))
    return results


def drop_later_lines(run, first_step):
    """After a resume, forget logged steps that come again."""
    for path in (run / "metrics.jsonl", run / "trajectories.jsonl"):
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]  # a last part was cut short
            write_text(path, "".join(f"{line}\n" for line in lines if json.loads(line)["step"] < first_step))


if __name__ == "__main__":
    try:
        main()
    except (DataError, SearchError, OSError) as error:
        print(f"train.py: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)

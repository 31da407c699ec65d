"""Past one GPU: the method of train.py in TRL's GRPOTrainer, data parallel by accelerate.

Prompts, search loop, self-answers, the mask and the rewards are those of rollout.py and reward.py.
What differs from train.py:
1. Questions come in TRL's order (shuffled once an epoch), and random numbers differ.
2. Advantages are divided by std + 1e-4, not by std.
3. Micro-batches hold `--per_device_train_batch_size` trajectories, those without an advantage too.
4. Each process has questions of its own: `--num_questions` is a multiple of their number.
5. Held-out questions are measured before and after by the first process alone; no `best/` is kept.
6. A cold start is made by train.py and taken with `--adapter`; no `--dry_run`, no `--merge`.
7. With `--use_vllm true` vLLM samples; how far its log-probabilities are from the update's is
   logged and corrected as TRL does (not run by us: it needs a GPU).

    pip install -r requirements-scale.txt
    accelerate launch --num_processes 8 scale.py --preset qwen2.5-3b-instruct --num_questions 32
    torchrun --nproc_per_node 2 scale.py                             # two processes on a CPU
    accelerate launch --num_processes 8 scale.py --resume runs/NAME  # go on with a run

Options that train.py does not know are TRL's: `--use_vllm true`, `--deepspeed FILE`, ...
"""

import signal
import sys
import warnings
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path

import torch

from eval import measure
from plumbing import files, logs, models, options, runs, scaling, tables
from plumbing.adapters import inference_weights
from rollout import Sampling, rollout, score_groups
from train import TrainSettings, load_tasks, reward_weights, step_metrics, total_rewards

PACKAGES = ("trl", "accelerate", "datasets")
LEFT_OUT = ("cold_start", "dry_run", "merge")
COLUMNS = {"prompt_ids": "prompt_ids", "completion_ids": "completion_ids"}  # TRL's name: ours
COLUMNS |= {"env_mask": "completion_mask", "logprobs": "sampling_logps"}


# Settings: ours, and what is left is TRL's


def parse(arguments):
    """(TrainSettings, TRL's words, the run to go on with or None). Raises DataError."""
    known = {option.name for option in fields(TrainSettings)} | {"help"}
    own, others = [], []
    mine = own
    for word in sys.argv[1:] if arguments is None else arguments:
        if word.startswith("--"):
            mine = own if word[2:].split("=")[0].replace("-", "_") in known else others
        mine.append(word)
    settings, resumed = options.parse_training(TrainSettings, own, __doc__.splitlines()[0])
    if resumed:
        files.check(not others, f"--resume {resumed}", f"leave out {' '.join(others[:1])}")
        others = files.read_json(resumed / "config.json").get("trl")
        files.check(others is not None, resumed, "is no run of scale.py: train.py goes on with it")
    for name in LEFT_OUT:
        files.check(not getattr(settings, name), f"--{name}", "is for train.py (scale.py --help)")
    return settings, others, resumed


# Rollouts and rewards, as TRL asks for them


def make_rollout_func(task, tokenizer, settings):
    """TRL's `rollout_func`: prompts of this process, G of each question side by side."""
    G, ask_first = settings.num_generations, reward_weights(settings).ask_before_search
    by_id = {question["id"]: question for question in task.questions}

    def rollout_func(prompts, trainer):
        from trl.models import unwrap_model_for_generation

        is_whole = prompts == [prompt for prompt in prompts[::G] for _ in range(G)]
        files.check(is_whole, "a process got part of a group", "change TRL's batch sizes")
        questions = [by_id[prompt] for prompt in prompts[::G]]
        accelerator, args = trainer.accelerator, trainer.args
        number = trainer.state.global_step * accelerator.num_processes + accelerator.process_index
        sampling = Sampling(G, settings.temperature, runs.seed_of(settings.seed, number))
        sampling.ask_before_search = ask_first
        gather = args.ds3_gather_for_generation
        unwrapped = unwrap_model_for_generation(trainer.model_wrapped, accelerator, gather)
        with unwrapped as model, inference_weights(model):
            policy = models.Policy(model, tokenizer)
            if args.use_vllm:  # TRL has given it the weights
                policy = scaling.VLLMPolicy(model, tokenizer, trainer.vllm_generation)
            played = rollout(policy, questions, task.retriever, settings, sampling)
        columns = {"trajectory": played}  # goes to the reward function
        for theirs, ours in COLUMNS.items():
            columns[theirs] = [getattr(trajectory, ours) for trajectory in played]
        return columns

    return rollout_func


def make_reward_func(settings, run):
    """TRL's reward function: a trajectory's total. What train.py says of a step is logged too."""
    weights = reward_weights(settings)

    def total_reward(completions, trajectory, log_metric, trainer_state, **_):
        scores = score_groups(trajectory, weights, settings.num_generations)
        rewards, step = total_rewards(scores, trajectory), trainer_state.global_step
        for name, value in step_metrics(trajectory, scores, rewards, settings).items():
            if name not in ("seed", "reward", "reward_std", "frac_reward_zero_std"):  # TRL's own
                log_metric(name, value)
        if trainer_state.is_world_process_zero and step % (settings.sample_every or step + 1) == 0:
            for score, one in list(zip(scores, trajectory))[: settings.num_generations]:
                row = {"step": step, **one.to_dict(), "score": asdict(score)}
                files.append_line(run / logs.SAMPLES, row)
        return rewards.tolist()

    return total_reward


# The run


def main(arguments=None):
    settings, words, resumed = parse(arguments)
    for package in PACKAGES + ("vllm",) * ("--use_vllm" in words):
        problem = "is not installed: pip install -r requirements-scale.txt"
        files.check(find_spec(package), f"the package {package}", problem)
    warnings.simplefilter("ignore")  # TRL says of rollout_func that it may change
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list
    from datasets import Dataset
    from transformers import PrinterCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOTrainer

    state = PartialState(cpu=not torch.cuda.is_available())
    scaling.trl_config(
        settings, words, Path("runs"), state.num_processes
    )  # refused before the model loads
    task, held_out, _ = load_tasks(settings, settings.adapter)
    torch.manual_seed(settings.seed)
    last = get_last_checkpoint(resumed / scaling.CHECKPOINTS) if resumed else None
    steps = files.read_json(f"{last}/trainer_state.json")["global_step"] if last else 0
    is_done = steps == settings.steps
    policy = models.load_trainable(settings, last if is_done else settings.adapter)
    run = resumed or (state.is_main_process and runs.new_run(settings)) or None
    (run,) = broadcast_object_list([run])
    if state.is_main_process and not resumed:
        config = files.read_json(run / "config.json")
        files.write_json(run / "config.json", config | {"trl": words})
    trainer = GRPOTrainer(
        policy.model,
        make_reward_func(settings, run),
        scaling.trl_config(settings, words, run, state.num_processes),
        processing_class=policy.tokenizer,
        rollout_func=make_rollout_func(task, policy.tokenizer, settings),
        train_dataset=Dataset.from_dict({"prompt": [row["id"] for row in task.questions]}),
        callbacks=[scaling.make_logger(run)],
    )
    trainer.remove_callback(PrinterCallback)
    with runs.resumable(run):
        if state.is_main_process:
            measure(policy, held_out, settings, run, "before")
        state.wait_for_everyone()
        if not is_done:
            trainer.train(resume_from_checkpoint=last)
        trainer.save_model(str(run / "adapter"))
        if state.is_main_process and measure(policy, held_out, settings, run, "after"):
            tables.show(tables.before_after_rows(files.read_json(run / "eval.json")))
        state.wait_for_everyone()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    files.run_script("scale.py", main)

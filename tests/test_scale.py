"""The same method on TRL and accelerate: equal gradients, groups kept whole, processes, vLLM."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, TINY_MODEL, log_of, trainable

pytest.importorskip("trl", reason="scale.py needs requirements-scale.txt")
pytest.importorskip("datasets", reason="scale.py needs requirements-scale.txt")

import scale
import train as tr
from plumbing import files, models, options, scaling
from plumbing.files import DataError
from rollout import RolloutSettings, Sampling, rollout
from train import TrainSettings

SMALL = "--num_questions 4 --num_generations 2 --max_searches 2 --eval_limit 4 --sample_every 1"
SMALL = SMALL.split()


def test_words_are_shared_out_between_train_and_trl():
    words = "--steps 3 --use_vllm true --learning-rate 0.1 --deepspeed x.json --seed=4".split()
    settings, theirs, resumed = scale.parse(words)
    assert (settings.steps, settings.learning_rate, settings.seed) == (3, 0.1, 4)
    assert theirs == ["--use_vllm", "true", "--deepspeed", "x.json"] and resumed is None


WRONG = [
    (["--cold_start", "8"], "--cold_start: is for train.py"),
    (["--dry_run"], "--dry_run: is for train.py"),
    (["--no_such_option", "1"], "no_such_option"),
    (["--generation_batch_size", "7"], "TRL's options: .*generation_batch_size"),
    (["--per_device_train_batch_size", "7"], "--per_device_train_batch_size 7: 96 is no multiple"),
    (["--reward", "nothing"], "--reward nothing: choose one of"),
    (["--questions", "nowhere.jsonl"], "nowhere.jsonl"),
]


@pytest.mark.parametrize("words, problem", WRONG)
def test_bad_input_is_one_line_before_the_model_loads(tmp_path, monkeypatch, words, problem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load_base_model", pytest.fail)
    monkeypatch.setattr(scale, "GRPOTrainer", pytest.fail, raising=False)
    with pytest.raises((DataError, OSError), match=problem):
        scale.main(words)
    assert not (tmp_path / "runs").exists()


def test_what_several_processes_cannot_share_is_refused(tmp_path):
    settings = TrainSettings(num_questions=5)
    with pytest.raises(DataError, match="--num_questions 5: must be a multiple of 2 processes"):
        scaling.trl_config(settings, [], tmp_path, 2)
    together = ["--use_vllm", "true", "--vllm_mode", "server"]
    with pytest.raises(DataError, match="only --vllm_mode colocate"):
        scaling.trl_config(TrainSettings(), together, tmp_path, 2)


def test_without_trl_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(scale, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="package trl: is not installed: pip install -r require"):
        scale.main([])


def test_half_a_group_is_refused(tiny, world):
    rollout_func = scale.make_rollout_func(world, tiny.tokenizer, TrainSettings(num_generations=2))
    with pytest.raises(DataError, match="part of a group"):
        rollout_func(["dev_0", "dev_1"], None)


def run_of(folder, *options):
    """A small run of scale.py in this process."""
    scale.main([*SMALL, *options])
    (run,) = (folder / "runs").iterdir()
    return run


def test_a_run_leaves_what_eval_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = run_of(tmp_path, "--steps", "2", "--max_grad_norm", "0.5", "--warmup_steps", "1")
    rows = log_of(run)
    assert [row["step"] for row in rows] == [0, 1]
    for name in (
        "reward",
        "reward/efficiency",
        "em",
        "search_depth",
        "over_search_ratio",
        "tokens",
    ):
        assert name in rows[0], name
    assert rows[0]["learning_rate"] == 0 < rows[1]["learning_rate"], "TRL's own option: a warmup"
    results = files.read_json(run / "eval.json")
    assert results["before"]["greedy"]["n"] == results["after"]["sampled"]["n"] == 4
    assert models.load_policy(TINY_MODEL, run / "adapter")
    samples = files.read_log(run / "trajectories.jsonl")
    assert [row["step"] for row in samples] == [0, 0, 1, 1]
    scale.main(["--resume", str(run)])  # it has made all its steps
    assert log_of(run) == rows


def test_a_run_of_train_py_is_not_gone_on_with(tmp_path):
    files.write_json(tmp_path / "config.json", {})
    with pytest.raises(DataError, match="is no run of scale.py"):
        scale.main(["--resume", str(tmp_path)])


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_an_update_moves_the_adapter_as_train_py_does(tmp_path, monkeypatch, world, beta):
    """On the same trajectories, in micro-batches of another size, gradients have one direction."""
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    monkeypatch.chdir(tmp_path)
    settings = TrainSettings(num_questions=3, num_generations=4, beta=beta, max_grad_norm=1e9)
    torch.manual_seed(0)
    policy = models.load_trainable(settings)
    with torch.no_grad():  # an adapter that is not zero, so that KL is not either
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    weights = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    played = rollout(policy, world.questions[3:6], world.retriever, settings, Sampling(4))
    scores = [trajectory.score() for trajectory in played]
    advantages = tr.group_advantages(tr.total_rewards(scores, played), 4)
    assert advantages.any()
    ours, theirs, clip = [], [], torch.nn.utils.clip_grad_norm_

    def note(parameters, *arguments):
        ours.append(torch.cat([p.grad.flatten() for p in trainable(policy.model)]))
        return clip(parameters, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", note)
        optimizer = torch.optim.SGD(trainable(policy.model), lr=0.0)
        tr.update(policy.model, optimizer, played, advantages, 0.0, settings)

    class Notes(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            named = [p for n, p in model.named_parameters() if p.requires_grad and ".ref." not in n]
            theirs.append(torch.cat([p.grad.flatten() for p in named]))

    monkeypatch.setattr(scale, "rollout", lambda *_: played)
    monkeypatch.setattr(scale, "inference_weights", lambda model: torch.no_grad())
    ids = [question["id"] for question in world.questions[3:6]]
    from datasets import Dataset

    words = ["--per_device_train_batch_size", "6"]
    again = models.load_trainable(settings)
    with torch.no_grad():
        for name, parameter in again.model.named_parameters():
            parameter.copy_(weights[name])
    trainer = GRPOTrainer(
        again.model,
        scale.make_reward_func(settings, tmp_path),
        scaling.trl_config(settings, [*words, "--max_steps", "1"], tmp_path, 1),
        processing_class=again.tokenizer,
        rollout_func=scale.make_rollout_func(world, again.tokenizer, settings),
        train_dataset=Dataset.from_dict({"prompt": ids}),
        callbacks=[Notes()],
    )
    if beta:  # TRL compares with the adapter that it was given; here, with none, as train.py does
        for name, parameter in again.model.named_parameters():
            if ".ref." in name and "lora_B" in name:
                parameter.data.zero_()
    trainer.train()
    assert torch.cosine_similarity(ours[0], theirs[0], dim=0) > 0.999
    assert theirs[0].norm() / ours[0].norm() == pytest.approx(1.0, abs=0.01)


class Engine:
    """A stand-in for TRL's vLLM engine: the most likely tokens, a whole forward pass for each."""

    def __init__(self, policy):
        self.policy, self.generation_kwargs, self.max_completion_length = policy, {}, None

    def generate(self, rows, images, num_generations):
        assert images is None and num_generations == 1
        stops = self.generation_kwargs["stop"]
        assert self.generation_kwargs["include_stop_str_in_output"]
        written = [self.one(row, stops) for row in rows]
        return rows, written, [[[0.0] for _ in ids] for ids in written], None

    def one(self, row, stops):
        model, tokenizer = self.policy
        ids = []
        while len(ids) < self.max_completion_length:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([row + ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
            text = tokenizer.decode(ids)
            if ids[-1] == tokenizer.eos_token_id or any(stop in text for stop in stops):
                break
        return ids


@pytest.mark.parametrize("self_answer", ["branch", "separate"])
def test_rollouts_by_vllm_are_those_of_our_own_cache(tiny, world, self_answer):
    settings = RolloutSettings(max_searches=2, self_answer=self_answer)
    how = Sampling(2, 0.0, ask_before_search=True)
    policy = scaling.VLLMPolicy(tiny.model, tiny.tokenizer, Engine(tiny))
    played = [
        rollout(one, world.questions[:3], world.retriever, settings, how) for one in (tiny, policy)
    ]
    for ours, theirs in zip(*played, strict=True):
        for name in ("prompt_ids", "completion_ids", "completion_mask", "turns", "self_answer_0"):
            assert getattr(ours, name) == getattr(theirs, name), name


def launch(folder, *words):
    """scale.py in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(29500 + os.getpid() % 2000), str(ROOT / "scale.py"), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(folder / "output", "w") as output:
        streams = {"stdout": output, "stderr": output, "start_new_session": True}
        return subprocess.Popen(command, cwd=folder, env=environment, **streams)


def test_two_processes_are_killed_and_go_on(tmp_path):
    """Each searches its own questions; one log, one adapter."""
    words = [*SMALL, "--steps", "3", "--save_every", "1", "--eval_questions", "", "--name", "a"]
    run = tmp_path / "runs" / "a"
    process, end = launch(tmp_path, *words), time.time() + 120
    saved = run / "checkpoints" / "checkpoint-1" / "trainer_state.json"
    while not saved.exists() and process.poll() is None and time.time() < end:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert saved.exists(), (tmp_path / "output").read_text()
    process = launch(tmp_path, "--resume", "runs/a")
    assert process.wait(timeout=120) == 0, (tmp_path / "output").read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    samples = files.read_log(run / "trajectories.jsonl")
    assert [row["step"] for row in samples] == [0, 0, 1, 1, 2, 2]
    assert rows[0]["num_tokens"] > 0 and (run / "adapter" / "adapter_model.safetensors").exists()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert options.read_config(TrainSettings, run).steps == 3


def test_processes_have_questions_and_random_numbers_of_their_own(lora, world, monkeypatch):
    seen, seeds = [], []

    def noting(policy, questions, retriever, settings, sampling):
        seen.append([question["id"] for question in questions])
        seeds.append(sampling.seed)
        return []

    monkeypatch.setattr(scale, "rollout", noting)
    settings = TrainSettings(num_generations=2)
    rollout_func = scale.make_rollout_func(world, lora.tokenizer, settings)
    args = SimpleNamespace(ds3_gather_for_generation=True, use_vllm=False)
    for process in (0, 1):
        accelerator = SimpleNamespace(num_processes=2, process_index=process, state=None)
        accelerator.unwrap_model = lambda model: model
        accelerator.state = SimpleNamespace(deepspeed_plugin=None)
        trainer = SimpleNamespace(accelerator=accelerator, args=args, model_wrapped=lora.model)
        trainer.state = SimpleNamespace(global_step=3)
        prompts = ["dev_0", "dev_0", "dev_1", "dev_1"] if process else ["dev_2"] * 2
        rollout_func(prompts, trainer)
    assert seen == [["dev_2"], ["dev_0", "dev_1"]] and seeds[0] != seeds[1]

"""GRPO: advantages, loss and gradients by hand, then real training runs of two steps."""

import json
import math
import re
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import adamw, log_of, trainable

import reward
import train as tr
from plumbing import adapters, data, files, generation, logs, models
from plumbing.files import DataError
from rollout import RolloutSettings, Sampling, Trajectory, Turn, rollout, score_groups
from train import TrainSettings, group_advantages, grpo_loss, make_micro_batches, per_token_logps

QUESTION = {"id": "q7", "question": "?", "golden_answers": ["x"], "metadata": {}}


def one_batch(trajectories, advantages=None):
    """All trajectories in one micro-batch."""
    advantages = torch.ones(len(trajectories)) if advantages is None else advantages
    (batch,) = make_micro_batches(trajectories, advantages, 10**9, "cpu")
    return batch


def by_length(trajectories):
    """The order of a micro-batch's rows: indices."""
    return sorted(range(len(trajectories)), key=lambda i: len(trajectories[i]))


# Rewards and advantages


def test_equal_rewards_have_no_advantage():
    assert group_advantages(torch.tensor([0.9] * 6, dtype=torch.float64), 6).tolist() == [0.0] * 6
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), 2)
    assert advantages[0] == -advantages[1] > 0 and advantages[2:].tolist() == [0.0, 0.0]


def test_a_reward_that_is_not_finite_names_its_trajectory():
    trajectories = [Trajectory(QUESTION), Trajectory(QUESTION | {"id": "q8"})]
    scores = [SimpleNamespace(total=1.0), SimpleNamespace(total=math.nan)]
    with pytest.raises(DataError, match="nan for question q8"):
        tr.total_rewards(scores, trajectories)


def test_totals_that_are_equal_on_paper_are_no_signal():
    """Stopping exactly at t_c is worth 2.3 at any depth; floating-point sums differ a little."""
    scores = []
    for n in (1, 2, 3, 4):
        words = ("nile", "tiber", "rhine", "loire")[:n]
        steps = [f"<think>a</think><search>{word}</search>" for word in words]
        steps.append("<think>a</think><answer>x</answer>")
        scores.append(reward.score(steps, "x", [None] * (n - 1) + ["x"]))
    different = {score.total for score in scores}
    assert len(different) > 1, "if all are equal the rounding is needless"
    rewards = tr.total_rewards(scores, [Trajectory(QUESTION)] * 4)
    assert rewards.unique().tolist() == [2.3]


def test_group_shortest_charges_for_what_the_shortest_right_rollout_did_without():
    """Right with 1, 3 and 9 searches, wrong with none; then a group without a right one."""
    trajectories = []
    for searches, answer in [(1, "x"), (3, "x"), (9, "x"), (0, "y")] + [(2, "y")] * 4:
        texts = [f"<think>a</think><search>word{i}</search>" for i in range(searches)]
        turns = [Turn(text, "search", query=text) for text in texts]
        turns.append(Turn(f"<think>b</think><answer>{answer}</answer>", "answer"))
        trajectories.append(Trajectory(QUESTION, turns))
    weights = reward.REWARDS["group-shortest"]
    plain = [trajectory.score(reward.OUTCOME).total for trajectory in trajectories]
    scores = score_groups(trajectories, weights, 4)
    costs = [before - score.total for before, score in zip(plain, scores)]
    assert costs == pytest.approx([0, 0.2, weights.extra_search_cap, 0] + [0] * 4)
    assert scores[1].parts[-1]["efficiency"] == pytest.approx(-0.2), "on the answer step"


# Loss and gradients


def slow_loss(model, trajectories, advantages, batch, epsilon, beta, temperature):
    """The loss, one trajectory and one token at a time, straight from the formula."""
    total = 0.0
    for row, (trajectory, advantage) in enumerate(zip(trajectories, advantages)):
        ids = trajectory.prompt_ids + trajectory.completion_ids
        logits = model(torch.tensor([ids])).logits[0] / temperature
        for t, sampled in enumerate(trajectory.completion_mask):
            if sampled:
                position = len(trajectory.prompt_ids) + t
                logp = logits[position - 1].log_softmax(-1)[ids[position]].item()
                old = batch["old_per_token_logps"][row, position].item()
                ref = batch["ref_per_token_logps"][row, position].item()
                ratio = math.exp(logp - old)
                clipped = min(max(ratio, 1 - epsilon), 1 + epsilon)
                kl = math.exp(ref - logp) - (ref - logp) - 1
                total += -min(ratio * advantage, clipped * advantage) + beta * kl
    return total


def test_loss_equals_the_slow_loop(lora, played):
    advantages, order = torch.linspace(-2, 2, len(played)), by_length(played)
    batch = one_batch(played, advantages)
    with torch.no_grad():
        logps, _ = per_token_logps(lora.model, batch, 0.7)
        noise = torch.Generator().manual_seed(0)
        for name in ("old_per_token_logps", "ref_per_token_logps"):
            batch[name] = logps + 0.5 * torch.randn(logps.shape, generator=noise)
        loss, sums = grpo_loss(logps, batch, 0.2, 0.1)
        rows, of_rows = [played[i] for i in order], advantages[order].tolist()
        slow = slow_loss(lora.model, rows, of_rows, batch, 0.2, 0.1, 0.7)
    assert loss.item() == pytest.approx(slow, rel=1e-4)
    assert 0 < sums["clip_ratio"] < batch["completion_mask"].sum()


def test_ratio_is_one_and_kl_zero_while_the_policy_has_not_moved(lora, played):
    """At learning rate 0 the second pass over the batch recomputes what the first one stored."""
    settings = TrainSettings(temperature=0.6, num_iterations=2, beta=0.5, epsilon=1e-6)
    advantages = torch.ones(len(played))
    losses = tr.update(lora.model, adamw(lora.model, 0.0), played, advantages, 0.0, settings)
    assert losses["kl"] == 0 and losses["clip_ratio"] == 0
    assert losses["loss"] == pytest.approx(-1, abs=1e-6)


PASSES = [(0.0, 1, 1), (0.0, 2, 2), (0.1, 1, 2), (0.1, 2, 3)]


@pytest.mark.parametrize("beta, num_iterations, forwards", PASSES)
def test_nothing_is_computed_again_and_the_first_ratio_is_exactly_one(
    lora, played, monkeypatch, beta, num_iterations, forwards
):
    """A micro-batch goes forward once an update, and once for a KL term's reference."""
    calls, ratios, loss_of = [], [], tr.grpo_loss

    def recording(logps, batch, *rest):
        ratios.append((logps - batch["old_per_token_logps"]).exp())
        return loss_of(logps, batch, *rest)

    monkeypatch.setattr(tr, "grpo_loss", recording)
    inner = lora.model.get_base_model().base_model
    hook = inner.register_forward_hook(lambda *_: calls.append(1))
    settings = TrainSettings(beta=beta, num_iterations=num_iterations, micro_batch_tokens=4096)
    tr.update(lora.model, adamw(lora.model, 0.0), played, torch.ones(len(played)), 0.0, settings)
    hook.remove()
    assert len(calls) == forwards and (ratios[0] == 1).all()


def test_little_of_the_update_is_padding(lora, world, played):
    """In a training step's batch, 12 questions and 8 rollouts of each; and that share is logged."""

    def padding(trajectories, tokens):
        batches = make_micro_batches(trajectories, torch.zeros(len(trajectories)), tokens, "cpu")
        computed = sum(batch["input_ids"].numel() for batch in batches)
        return 1 - sum(map(len, trajectories)) / computed

    model, sampling = lora.model, Sampling(num_generations=8, self_answers=False)
    with adapters.inference_weights(model):
        questions = world.questions[:12]
        step = rollout(lora, questions, world.retriever, RolloutSettings(), sampling)
    assert 0 < padding(step, TrainSettings.micro_batch_tokens) < 0.15
    settings = TrainSettings(micro_batch_tokens=900)
    logged = tr.update(model, adamw(model, 0.0), played, torch.ones(12), 0.0, settings)["padding"]
    assert logged == padding(played, 900) > padding(played, 1) == 0


def test_sampling_and_training_agree_on_log_probabilities(lora, world, monkeypatch):
    """The cache gave while sampling what the padded batch gives: same positions, same context."""
    drawn, draw = [], generation.Sampler.__call__

    def recording(sampler, logits):
        tokens, logps = draw(sampler, logits)
        drawn.append(logits.log_softmax(-1).gather(1, tokens[:, None])[0, 0].item())
        return tokens, logps

    monkeypatch.setattr(generation.Sampler, "__call__", recording)
    for question in world.questions[:4]:
        drawn.clear()
        alone = Sampling(self_answers=False)
        one = rollout(lora, [question], world.retriever, RolloutSettings(), alone)
        batch = one_batch(one)
        with torch.no_grad():
            logps = per_token_logps(lora.model, batch, 1.0)[0][batch["completion_mask"].bool()]
        torch.testing.assert_close(logps, torch.tensor(drawn), atol=1e-4, rtol=1e-4)


def test_a_row_alone_and_in_a_padded_batch(lora, played):
    with torch.no_grad():
        logps, entropy = per_token_logps(lora.model, one_batch(played), 1.0)
        for row, i in enumerate(by_length(played)):
            own_logps, own_entropy = per_token_logps(lora.model, one_batch([played[i]]), 1.0)
            width = own_logps.shape[1]
            torch.testing.assert_close(logps[row, :width], own_logps[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(entropy[row, :width], own_entropy[0], atol=1e-4, rtol=0)
            assert (logps[row, width:] == 0).all()


def test_masked_tokens_have_no_gradient_and_cannot_poison_it():
    logps = torch.full((1, 4), -1.0, requires_grad=True)
    batch = {
        "completion_mask": torch.tensor([[1, 0, 1, 0]]),
        "advantages": torch.tensor([1.0]),
        "old_per_token_logps": torch.tensor([[-1.0, -201.0, -1.0, -1e30]]),
        "ref_per_token_logps": torch.tensor([[-1.0, 199.0, -1.0, 1e30]]),
    }
    loss, _ = grpo_loss(logps, batch, 0.2, 0.1)
    loss.backward()
    assert loss.isfinite() and logps.grad.tolist() == [[-1.0, 0.0, -1.0, 0.0]]


def test_passages_have_zero_gradient_through_the_model(lora, played):
    """The last layer's state gets a gradient where a sampled token follows, and nowhere else."""
    trajectory, states = played[0], []
    batch = one_batch([trajectory])
    norm = lora.model.get_base_model().base_model.norm
    hook = norm.register_forward_hook(lambda *args: states.append(args[2]))
    logps, _ = per_token_logps(lora.model, batch, 1.0)
    hook.remove()
    batch["old_per_token_logps"] = logps.detach()
    loss, _ = grpo_loss(logps, batch, 0.2, 0.0)
    (gradient,) = torch.autograd.grad(loss, states[0])
    prompt = [0] * (len(trajectory.prompt_ids) - 1)
    sampled_next = torch.tensor(prompt + trajectory.completion_mask + [0]).bool()
    assert (gradient[0, ~sampled_next] == 0).all()
    assert (gradient[0, sampled_next] != 0).any(1).sum() > 5


def test_eos_is_trained_where_it_is_also_the_padding():
    short = Trajectory(QUESTION, [], [3], [5, 6, 0], [1, 1, 1])
    long = Trajectory(QUESTION, [], [3, 4], [5] * 6, [1, 0, 1, 1, 1, 1])
    batch = one_batch([long, short], torch.tensor([1.0, 2.0]))
    masks = batch["completion_mask"].tolist()
    assert masks == [[0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1, 1, 1]]
    ids = batch["input_ids"].tolist()
    assert ids == [[3, 5, 6, 0, 0, 0, 0, 0], [3, 4, 5, 5, 5, 5, 5, 5]]
    assert batch["advantages"].tolist() == [2.0, 1.0]


# Updates


def gradients_of(played, advantages, **settings):
    """The gradients with which `update` would move a fresh adapter, and what it returns."""
    torch.manual_seed(0)
    model, found = models.load_trainable(TrainSettings()).model, []
    optimizer = adamw(model, 0.0)

    def note(optimizer, *_):
        found.extend(parameter.grad.clone() for parameter in trainable(model))

    optimizer.register_step_pre_hook(note)
    settings = TrainSettings(max_grad_norm=1e9, **settings)
    row = tr.update(model, optimizer, played, advantages, 0.0, settings)
    return model, found, row


def test_what_has_no_advantage_is_left_out_and_adds_nothing(played):
    """As the slow way: all trajectories forward and backward, one mean over all sampled tokens."""
    advantages = torch.tensor([1.0, 0, -1, 0, 0, 0, 0, 0, 0.5, 0, 0, -0.5])
    model, found, row = gradients_of(played, advantages)
    batch = one_batch(played, advantages)
    logps, entropy = per_token_logps(model, batch, 1.0)
    batch["old_per_token_logps"] = logps.detach()
    number = batch["completion_mask"].sum()
    loss, _ = grpo_loss(logps, batch, 0.2, 0.0)
    slow = torch.autograd.grad(loss / number, trainable(model))
    for fast, expected in zip(found, slow):
        torch.testing.assert_close(fast, expected, atol=1e-6, rtol=1e-4)
    assert any(gradient.any() for gradient in found)
    assert row["loss"] == pytest.approx((loss / number).item(), abs=1e-6)
    taught = (batch["advantages"] != 0)[:, None] * batch["completion_mask"]
    mean = (entropy * taught).sum() / taught.sum()
    assert row["entropy"] == pytest.approx(mean.item(), rel=1e-4)


def test_with_a_kl_term_all_are_trained(played, monkeypatch):
    rows, loss_of = [], tr.micro_batch_loss

    def counting(model, batch, settings):
        rows.append(len(batch["input_ids"]))
        return loss_of(model, batch, settings)

    monkeypatch.setattr(tr, "micro_batch_loss", counting)
    advantages = torch.tensor([1.0] + [0.0] * 11)
    for beta, expected in ((0.0, 1), (0.1, 12)):
        rows.clear()
        gradients_of(played, advantages, beta=beta)
        assert sum(rows) == expected


def test_a_step_without_any_advantage_has_gradients_of_zero(played):
    _, found, row = gradients_of(played, torch.zeros(12))
    assert found and not any(gradient.any() for gradient in found)
    assert row["loss"] == 0 and row["skipped_updates"] == 0


@pytest.mark.parametrize("max_tokens", [1, 300, 1000, 10**9])
def test_micro_batches_hold_so_many_tokens_at_most(played, max_tokens):
    batches = make_micro_batches(played, torch.arange(12.0), max_tokens, "cpu")
    for batch in batches:
        assert batch["input_ids"].numel() <= max_tokens or len(batch["input_ids"]) == 1
    for batch, after in zip(batches, batches[1:]):  # none could have taken one more
        rows, width = len(batch["input_ids"]) + 1, len(played[int(after["advantages"][0])])
        assert rows * width > max_tokens
    order = torch.cat([batch["advantages"] for batch in batches]).int().tolist()
    assert order == by_length(played)


def test_a_batch_without_a_trainable_token_has_loss_zero(lora):
    nothing = [Trajectory(QUESTION, [], [3, 4], [5, 6], [0, 0])]
    optimizer, settings = adamw(lora.model, 0.0), TrainSettings()
    losses = tr.update(lora.model, optimizer, nothing, torch.zeros(1), 0.0, settings)
    assert losses["loss"] == 0.0 and all(math.isfinite(value) for value in losses.values())


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_skipped_and_leaves_no_trace(played, what):
    """Weights and Adam's moments stay as they were, and the next update is as good as ever."""
    model, settings = models.load_trainable(TrainSettings()).model, TrainSettings()
    parameters, optimizer = trainable(model), adamw(model)
    advantages = torch.linspace(-1, 1, len(played))

    def state():
        values = list(parameters)
        for moments in optimizer.state.values():
            values += moments.values()
        return [value.detach().clone() for value in values]

    tr.update(model, optimizer, played, advantages, 1e-3, settings)
    before = state()
    factor = math.inf if what == "gradient" else 1
    hook = parameters[0].register_hook(lambda gradient: gradient * factor)
    spoiled, twice = (
        advantages * (math.inf if what == "loss" else 1),
        TrainSettings(num_iterations=2),
    )
    losses = tr.update(model, optimizer, played, spoiled, 1e-3, twice)
    hook.remove()
    assert losses["skipped_updates"] == 2 and not math.isfinite(losses["grad_norm"])
    assert all(torch.equal(old, new) for old, new in zip(before, state(), strict=True))
    losses = tr.update(model, optimizer, played, advantages, 1e-3, settings)
    assert losses["skipped_updates"] == 0 and all(p.isfinite().all() for p in parameters)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_layer_moves(played, checkpointing):
    model = models.load_trainable(TrainSettings(gradient_checkpointing=checkpointing)).model
    model.train()
    advantages, settings = torch.linspace(-1, 1, len(played)), TrainSettings(beta=0.01)
    settings.num_iterations = 2
    tr.update(model, adamw(model), played, advantages, 1e-3, settings)
    norms = [p.norm().item() for name, p in model.named_parameters() if "lora_B" in name]
    assert len(norms) == 28 and min(norms) > 0


# Runs


def test_two_steps_and_two_more_are_four(run_train, monkeypatch, tmp_path, capsys):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    options = ["--steps", "4", "--save_every", "2", "--name", "a"]
    once = run_train(whole, *options, curves=True)
    add = logs.Logbook.add

    def stop_at_step_3(log, row, *rest):
        if row["step"] == 3:
            raise KeyboardInterrupt
        return add(log, row, *rest)

    monkeypatch.setattr(logs.Logbook, "add", stop_at_step_3)
    with pytest.raises(SystemExit, match="--resume"):
        run_train(halves, *options)
    monkeypatch.setattr(logs.Logbook, "add", add)
    again = halves / "runs" / "a"
    assert len(log_of(again)) == 3, "one more than the checkpoint: it is forgotten and comes again"
    with open(again / logs.SAMPLES, "a") as file:  # odd characters, and a line cut short
        file.write('{"step": 2, "text": "a\u2028b"}\n{"step": 3, "te')
    with pytest.raises(DataError, match="leave out --steps"):
        tr.main(["--resume", str(again), "--steps", "40"])
    tr.main(["--resume", str(again)])

    assert log_of(again) == log_of(once) and len(log_of(once)) == 4
    weights = "adapter/adapter_model.safetensors"
    assert (again / weights).read_bytes() == (once / weights).read_bytes()
    for run in (once, again):
        rows = map(json.loads, (run / logs.SAMPLES).read_text(encoding="utf-8").split("\n")[:-1])
        assert [row["step"] for row in rows] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    written = {path.name for path in once.iterdir()}
    folders = {"adapter", "adapter.old", "best"}
    results = {"metrics.jsonl", "trajectories.jsonl", "eval.json", "eval_trajectories.jsonl"}
    assert written == folders | results | {"config.json", "curves.png"}
    result = json.loads((once / "eval.json").read_text())
    assert result.keys() == {"before", "after"}
    assert all(result[moment].keys() == {"sampled", "greedy"} for moment in result)
    printed = capsys.readouterr().out
    assert "greedy" in printed
    assert "\nstep 2 of 4: reward " in printed, "progress also where no bar can be drawn"
    assert len(list(halves.iterdir())) == 1, "nothing is written outside the run folder"


KINDS = ["autosearch-released", "autosearch-t0", "stepsearch", "search-penalty"]


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_reward_trains(run_train, tmp_path, name):
    small = ["--steps", "1", "--eval_questions", "", "--name", "r"]
    folder = run_train(tmp_path, "--reward", name, *small)
    (row,) = log_of(folder)
    assert row["reward"] != 0 and math.isfinite(row["grad_norm"])
    saved = json.loads((folder / "trajectories.jsonl").read_text().splitlines()[0])
    assert (saved["self_answer_0"] is not None) == (name == "autosearch-t0")


def test_stepsearch_needs_supporting_titles(monkeypatch, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"id": "q1", "question": "Who?", "golden_answers": ["x"]}\n')
    monkeypatch.setattr(models, "load_base_model", lambda *_: pytest.fail("weights were loaded"))
    message = 'q.jsonl, line 1: "supporting_titles" is missing: --reward stepsearch needs it'
    for option in ("--questions", "--eval_questions"):
        with pytest.raises(DataError, match=message):
            tr.main(["--reward", "stepsearch", option, str(path)])


def test_a_missing_tracker_is_one_line_for_a_new_run_and_a_resumed_one(monkeypatch, tmp_path):
    monkeypatch.setattr(logs, "find_spec", lambda name: None)
    monkeypatch.setattr(models, "load_base_model", lambda *_: pytest.fail("weights were loaded"))
    config = asdict(TrainSettings(report_to="tensorboard"))
    files.write_json(tmp_path / "config.json", config)
    message = "--report_to tensorboard: the package tensorboard is not installed"
    for arguments in (["--report_to", "tensorboard"], ["--resume", str(tmp_path)]):
        with pytest.raises(DataError, match=message):
            tr.main(arguments)


def test_a_dry_run_makes_one_step_at_its_deepest_and_writes_nothing(tmp_path, monkeypatch, capsys):
    played, evaluated, update, evaluate = [], [], tr.update, tr.evaluate

    def noting_update(model, optimizer, trajectories, *rest):
        played.extend(trajectories)
        return update(model, optimizer, trajectories, *rest)

    def noting_evaluate(policy, task, *rest):
        evaluated.extend(task.questions)
        return evaluate(policy, task, *rest)

    monkeypatch.setattr(tr, "update", noting_update)
    monkeypatch.setattr(tr, "evaluate", noting_evaluate)
    monkeypatch.chdir(tmp_path)
    options = "--num_questions 2 --num_generations 2 --max_turn_tokens 24 --eval_batch_size 3"
    tr.main(["--dry_run", *options.split()])

    assert len(played) == 4 and len(evaluated) == 3
    assert {trajectory.search_depth for trajectory in played} == {TrainSettings.max_searches}
    questions = tr.load_tasks(TrainSettings(), None)[0].questions
    longest = sorted((len(question["question"]) for question in questions), reverse=True)
    assert [len(t.question["question"]) for t in played[::2]] == longest[:2]
    passages = data.load_corpus(files.locate(TrainSettings.corpus))
    longest = sorted((len(passage["text"]) for passage in passages), reverse=True)[:3]
    for turn in played[0].turns[:-1]:
        assert [len(passage["text"]) for passage in turn.passages] == longest
    measured = r" +[\d.]+ s   peak +\d+\.\d\d GiB\n"
    size = f"4 trajectories of at most {max(map(len, played))} tokens\n"
    expected = f" +rollout{measured}{size} +update{measured} +evaluation{measured}"
    assert re.search(expected, capsys.readouterr().out)
    assert not list(tmp_path.iterdir())

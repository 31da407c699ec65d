"""GRPO: advantages, loss and gradients by hand, then real training runs of two steps."""

import itertools
import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import WORLD
from transformers import Qwen2Config, Qwen2ForCausalLM

import rollout as ro
import train as tr
from retriever import BM25, DataError
from rollout import RolloutSettings, Trajectory, rollout
from train import TrainSettings, group_advantages, grpo_loss, load_model, make_micro_batches, per_token_logps, update

PLOT_CURVES = tr.plot_curves
QUESTION = {"id": "q7", "question": "?", "golden_answers": ["x"], "metadata": {}}


@pytest.fixture(scope="module")
def lora():
    """(model, tokenizer): the tiny model with a fresh adapter. Tests that move it load their own."""
    torch.manual_seed(0)
    return load_model(TrainSettings())


@pytest.fixture(scope="module")
def played(lora, world):
    """Twelve trajectories of three questions."""
    retriever, questions = world
    lora[0].eval()
    return rollout(*lora, questions[:3], retriever, RolloutSettings(), num_generations=4, self_answers=False)


def test_equal_rewards_have_no_advantage():
    assert group_advantages(torch.tensor([0.9] * 6, dtype=torch.float64), 6).tolist() == [0.0] * 6
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64), 2)
    assert advantages[0] == -advantages[1] > 0 and advantages[2:].tolist() == [0.0, 0.0]


def test_a_reward_that_is_not_finite_names_its_trajectory():
    trajectories = [Trajectory(QUESTION), Trajectory(QUESTION | {"id": "q8"})]
    with pytest.raises(DataError, match="nan for question q8"):
        tr.check_finite(torch.tensor([1.0, math.nan]), trajectories)


def test_totals_that_are_equal_on_paper_are_no_signal():
    """Stopping exactly at t_c is worth 2.3 at any depth; in floating point the sums differ in the last bit."""

    def steps(n):
        searches = [f"<think>a</think><search>{word}</search>" for word in ("nile", "tiber", "rhine", "loire")[:n]]
        return [*searches, "<think>a</think><answer>x</answer>"], "x", [None] * (n - 1) + ["x"]

    totals = [tr.reward.score(*steps(n)).total for n in (1, 2, 3, 4)]
    assert len(set(totals)) > 1, "if all are equal the rounding is needless"
    assert tr.rewards_of([SimpleNamespace(total=total) for total in totals]).unique().tolist() == [2.3]


def test_a_group_of_one_is_refused():
    with pytest.raises(DataError, match="--num_generations 1"):
        tr.check_settings(TrainSettings(num_generations=1), RolloutSettings())


def slow_loss(model, trajectories, advantages, old, ref, epsilon, beta, temperature):
    """The loss, one trajectory and one token at a time, straight from the formula."""
    total = 0.0
    for trajectory, advantage, old_logps, ref_logps in zip(trajectories, advantages, old, ref):
        ids = trajectory.prompt_ids + trajectory.completion_ids
        logits = model(torch.tensor([ids])).logits[0] / temperature
        for t, sampled in enumerate(trajectory.completion_mask):
            if sampled:
                position = len(trajectory.prompt_ids) + t
                logp = logits[position - 1].log_softmax(-1)[ids[position]]
                ratio = torch.exp(logp - old_logps[position])
                clipped = min(max(ratio.item(), 1 - epsilon), 1 + epsilon)
                kl = torch.exp(ref_logps[position] - logp) - (ref_logps[position] - logp) - 1
                total += -min((ratio * advantage).item(), clipped * advantage) + beta * kl.item()
    return total


def test_loss_equals_the_slow_loop(lora, played):
    model = lora[0]
    advantages = torch.linspace(-2, 2, len(played))
    batch = make_micro_batches(played, advantages, len(played), "cpu")[0]
    order = sorted(range(len(played)), key=lambda i: tr.length_of(played[i]))
    with torch.no_grad():
        logps, _ = per_token_logps(model, batch, 0.7)
        noise = torch.Generator().manual_seed(0)
        batch["old_per_token_logps"] = logps + 0.5 * torch.randn(logps.shape, generator=noise)
        batch["ref_per_token_logps"] = logps + 0.5 * torch.randn(logps.shape, generator=noise)
        loss, stats = grpo_loss(logps, batch, 0.2, 0.1)
        slow = slow_loss(model, [played[i] for i in order], advantages[order].tolist(), batch["old_per_token_logps"],
                         batch["ref_per_token_logps"], 0.2, 0.1, 0.7)  # fmt: skip
    assert loss.item() == pytest.approx(slow, rel=1e-4)
    assert 0 < stats["clip_ratio"] < batch["completion_mask"].sum()


def test_ratio_is_one_and_kl_zero_while_the_policy_has_not_moved(lora, played):
    """At learning rate 0 the second pass over the batch recomputes what the first one stored: temperature 0.6."""
    model = lora[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    settings = TrainSettings(temperature=0.6, num_iterations=2, beta=0.5, epsilon=1e-6)
    losses = update(model, optimizer, played, torch.ones(len(played)), 0.0, settings)
    assert losses["kl"] == 0 and losses["clip_ratio"] == 0
    assert losses["loss"] == pytest.approx(-1, abs=1e-6)


@pytest.mark.parametrize("beta, num_iterations, forwards", [(0.0, 1, 1), (0.0, 2, 2), (0.1, 1, 2), (0.1, 2, 3)])
def test_nothing_is_computed_again_and_the_first_ratio_is_exactly_one(lora, played, monkeypatch, beta, num_iterations,
                                                                      forwards):  # fmt: skip
    """Forward passes of a micro-batch: one an update, and one for the reference where there is a KL term."""
    model, calls, ratios, loss_of = lora[0], [], [], tr.grpo_loss
    hook = model.get_base_model().base_model.register_forward_hook(lambda *_: calls.append(1))
    monkeypatch.setattr(tr, "grpo_loss", lambda logps, batch, *rest: (
        ratios.append((logps - batch["old_per_token_logps"]).exp()) or loss_of(logps, batch, *rest)))  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    settings = TrainSettings(beta=beta, num_iterations=num_iterations)
    update(model, optimizer, played, torch.ones(len(played)), 0.0, settings)
    hook.remove()
    assert len(calls) == forwards and (ratios[0] == 1).all()


def test_little_of_the_update_is_padding(lora, world, played):
    """On a batch like a training step's, 12 questions and their 8 rollouts; and what is logged is that share."""

    def padding(trajectories, size):
        batches = make_micro_batches(trajectories, torch.zeros(len(trajectories)), size, "cpu")
        return 1 - sum(map(tr.length_of, trajectories)) / sum(batch["input_ids"].numel() for batch in batches)

    with tr.inference_weights(lora[0]):
        step = rollout(*lora, world[1][:12], world[0], RolloutSettings(), num_generations=8, self_answers=False)
    assert 0 < padding(step, TrainSettings.micro_batch_size) < 0.15
    optimizer = torch.optim.AdamW([p for p in lora[0].parameters() if p.requires_grad], lr=0.0)
    logged = update(lora[0], optimizer, played, torch.ones(12), 0.0, TrainSettings(micro_batch_size=5))["padding"]
    assert logged == padding(played, 5) > padding(played, 1) == 0


def test_sampling_and_training_agree_on_log_probabilities(lora, world, monkeypatch):
    """What the cache gave while sampling is what the padded training batch gives: same positions, same context."""
    model, tokenizer = lora
    drawn, draw = [], ro.sample

    def recording(logits, *arguments):
        tokens = draw(logits, *arguments)
        drawn.append(logits.log_softmax(-1).gather(1, tokens[:, None])[0, 0].item())
        return tokens

    monkeypatch.setattr(ro, "sample", recording)
    for question in world[1][:4]:
        drawn.clear()
        played = rollout(model, tokenizer, [question], world[0], RolloutSettings(), self_answers=False)
        batch = make_micro_batches(played, torch.ones(1), 1, "cpu")[0]
        with torch.no_grad():
            logps = per_token_logps(model, batch, 1.0)[0][batch["completion_mask"].bool()]
        torch.testing.assert_close(logps, torch.tensor(drawn), atol=1e-4, rtol=1e-4)


def test_a_row_alone_and_in_a_padded_batch(lora, played):
    model = lora[0]
    with torch.no_grad():
        together = make_micro_batches(played, torch.ones(12), 12, "cpu")[0]
        logps, entropy = per_token_logps(model, together, 1.0)
        order = sorted(range(len(played)), key=lambda i: tr.length_of(played[i]))
        for row, i in enumerate(order):
            alone = make_micro_batches([played[i]], torch.ones(1), 1, "cpu")[0]
            own_logps, own_entropy = per_token_logps(model, alone, 1.0)
            width = own_logps.shape[1]
            torch.testing.assert_close(logps[row, :width], own_logps[0], atol=1e-4, rtol=0)
            torch.testing.assert_close(entropy[row, :width], own_entropy[0], atol=1e-4, rtol=0)
            assert (logps[row, width:] == 0).all()


def test_masked_tokens_have_no_gradient_and_cannot_poison_it():
    logps = torch.full((1, 4), -1.0, requires_grad=True)
    batch = {"completion_mask": torch.tensor([[1, 0, 1, 0]]), "advantages": torch.tensor([1.0]),
             "old_per_token_logps": torch.tensor([[-1.0, -201.0, -1.0, -1e30]]),
             "ref_per_token_logps": torch.tensor([[-1.0, 199.0, -1.0, 1e30]])}  # fmt: skip
    loss, _ = grpo_loss(logps, batch, 0.2, 0.1)
    loss.backward()
    assert loss.isfinite() and logps.grad.tolist() == [[-1.0, 0.0, -1.0, 0.0]]


def test_passages_have_zero_gradient_through_the_model(lora, played):
    """The last layer's state gets a gradient where a sampled token follows, and nowhere else."""
    model = lora[0]
    batch = make_micro_batches(played[:1], torch.ones(1), 1, "cpu")[0]
    states = []
    hook = model.get_base_model().base_model.norm.register_forward_hook(lambda *args: states.append(args[2]))
    logps, _ = per_token_logps(model, batch, 1.0)
    hook.remove()
    batch["old_per_token_logps"] = logps.detach()
    loss, _ = grpo_loss(logps, batch, 0.2, 0.0)
    (gradient,) = torch.autograd.grad(loss, states[0])
    sampled_next = torch.tensor([0] * (len(played[0].prompt_ids) - 1) + played[0].completion_mask + [0]).bool()
    assert (gradient[0, ~sampled_next] == 0).all() and (gradient[0, sampled_next] != 0).any(1).sum() > 5


def test_eos_is_trained_where_it_is_also_the_padding():
    trajectory = Trajectory(QUESTION, prompt_ids=[3], completion_ids=[5, 6, 0], completion_mask=[1, 1, 1])
    longer = Trajectory(QUESTION, prompt_ids=[3, 4], completion_ids=[5] * 6, completion_mask=[1, 0, 1, 1, 1, 1])
    batch = make_micro_batches([longer, trajectory], torch.tensor([1.0, 2.0]), 2, "cpu")[0]
    assert batch["completion_mask"].tolist() == [[0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1, 1, 1]]
    assert batch["input_ids"].tolist() == [[3, 5, 6, 0, 0, 0, 0, 0], [3, 4, 5, 5, 5, 5, 5, 5]]
    assert batch["advantages"].tolist() == [2.0, 1.0]


def test_a_batch_without_a_trainable_token_has_loss_zero(lora):
    model = lora[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    nothing = [Trajectory(QUESTION, prompt_ids=[3, 4], completion_ids=[5, 6], completion_mask=[0, 0])]
    losses = update(model, optimizer, nothing, torch.zeros(1), 0.0, TrainSettings())
    assert losses["loss"] == 0.0 and all(math.isfinite(value) for value in losses.values())


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_skipped_and_leaves_no_trace(played, what):
    """Weights and Adam's moments stay as they were, and the next update is as good as without it."""
    model, _ = load_model(TrainSettings())
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    advantages = torch.linspace(-1, 1, len(played))
    update(model, optimizer, played, advantages, 1e-3, TrainSettings())
    before = [p.detach().clone() for p in parameters]
    before += [value.clone() for moments in optimizer.state.values() for value in moments.values()]
    hook = parameters[0].register_hook(lambda gradient: gradient * (math.inf if what == "gradient" else 1))
    spoiled = advantages * (math.inf if what == "loss" else 1)
    losses = update(model, optimizer, played, spoiled, 1e-3, TrainSettings(num_iterations=2))
    hook.remove()
    assert losses["skipped_updates"] == 2 and not math.isfinite(losses["grad_norm"])
    after = [*parameters, *(value for moments in optimizer.state.values() for value in moments.values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after))
    losses = update(model, optimizer, played, advantages, 1e-3, TrainSettings())
    assert losses["skipped_updates"] == 0 and all(p.isfinite().all() for p in parameters)


def test_three_steps_of_skipped_updates_stop_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(tr, "group_advantages", lambda rewards, _: torch.full((len(rewards),), math.nan))
    with pytest.raises(DataError, match="not finite in 3 steps in a row: .*; go on with: python train.py --resume"):
        run(monkeypatch, tmp_path, "--steps", "9", "--save_every", "2", "--eval_questions", "", "--name", "a")
    lines = (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # JSON knows no NaN
    assert [(row["skipped_updates"], row["loss"]) for row in rows] == [(1, None)] * 3
    assert json.loads((tmp_path / "runs" / "a" / "adapter" / "state.json").read_text()) == {"step": 2}
    skipped = [{"skipped_updates": number} for number in (1, 1, 0, 1, 1)]
    tr.check_updates(skipped), tr.check_updates(skipped[:2])


HEALTHY = {"frac_reward_zero_std": 0.5, "valid_action_ratio": 0.9, "search_depth": 1.5, "entropy": 0.2}


@pytest.mark.parametrize(("rows", "message"), [
    ([{}] * 9, None),
    ([{"frac_reward_zero_std": 1.0}] * 4, None),
    ([{}] + [{"frac_reward_zero_std": 1.0}] * 5, "no group had a signal for 5 steps"),
    ([{"frac_reward_zero_std": 1.0}] * 5 + [{}], None),
    ([{}, {"valid_action_ratio": 0.49}], "under half of the actions are valid"),
    ([{}, {"search_depth": 0.0}], "nobody searches any more"),
    ([{}, {"search_depth": 0.01}, {"search_depth": 3.99}], None),
    ([{}, {"search_depth": 4.0}], "everybody searches to the limit"),
    ([{}] + [{"entropy": 0.0019}] * 5, "entropy was under 1%"),
    ([{}] + [{"entropy": 0.0019}] * 4, None),
    ([{"entropy": 0.0019}] * 6, None),  # it started there
    ([{}] + [{"entropy": None}] * 5, None),
])
def test_symptoms_of_a_collapse(rows, message):
    found = tr.symptoms([HEALTHY | row for row in rows], max_searches=4)
    assert [text.startswith(message) for text in found] == [True] if message else found == set()


def test_a_symptom_is_told_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tr, "symptoms", lambda rows, _: {"it hurts"} if rows[-1]["step"] else set())
    run(monkeypatch, tmp_path, "--steps", "3", "--eval_questions", "", "--name", "a")
    assert capsys.readouterr().err.count("warning, step 1: it hurts\n") == 1


def test_the_best_is_the_first_with_the_highest_held_out_reward():
    rows = [{}, {"eval/reward": 1.0}, {}, {"eval/reward": 1.5}, {"eval/reward": 1.5}, {"eval/reward": 2.0}, {}]
    assert [tr.is_best(rows[: n + 1]) for n in range(len(rows))] == [False, True, False, True, False, True, False]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_layer_moves(played, checkpointing):
    model, _ = load_model(TrainSettings(gradient_checkpointing=checkpointing))
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    advantages = torch.linspace(-1, 1, len(played))
    update(model, optimizer, played, advantages, 1e-3, TrainSettings(beta=0.01, num_iterations=2))
    norms = {name: p.norm().item() for name, p in model.named_parameters() if "lora_B" in name}
    assert len(norms) == 28 and min(norms.values()) > 0


def test_rollouts_use_the_adapter_and_leave_the_weights_as_they_were(played):
    model, _ = load_model(TrainSettings())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([played[0].prompt_ids])
    model.eval()
    with torch.no_grad():
        adapted = model(ids).logits
        with model.disable_adapter():
            assert not torch.allclose(adapted, model(ids).logits, atol=0.1)
        model.train()
        with tr.inference_weights(model):
            assert not model.training
            torch.testing.assert_close(model(ids).logits, adapted, atol=1e-3, rtol=1e-3)
    assert model.training and all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def run(monkeypatch, folder, *arguments, curves=False):
    """`python train.py` with small settings, in a folder of its own. Returns the run folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(tr, "plot_curves", PLOT_CURVES if curves else lambda *_: None)  # drawing takes seconds
    common = ["--num_questions", "3", "--num_generations", "3", "--eval_limit", "4", "--max_searches", "2",
              "--sample_every", "1"]  # fmt: skip
    tr.main([*common, *arguments])
    return next((folder / "runs").iterdir())


def log_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "seconds" not in k and k != "wall_time"} for row in rows]


def test_two_steps_and_two_more_are_four(monkeypatch, tmp_path, capsys):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    whole.mkdir(), halves.mkdir()
    once = run(monkeypatch, whole, "--steps", "4", "--save_every", "2", "--name", "a", curves=True)
    row_of = tr.metrics_row

    def stop_at_step_3(step, *rest):
        if step == 3:
            raise KeyboardInterrupt
        return row_of(step, *rest)

    monkeypatch.setattr(tr, "metrics_row", stop_at_step_3)
    with pytest.raises(SystemExit, match="--resume"):
        run(monkeypatch, halves, "--steps", "4", "--save_every", "2", "--name", "a")
    monkeypatch.setattr(tr, "metrics_row", row_of)
    again = halves / "runs" / "a"
    assert len(log_of(again)) == 3, "one more than the checkpoint, which is forgotten and comes again"
    with open(again / "trajectories.jsonl", "a") as file:
        file.write('{"step": 2, "text": "a\u2028b"}\n{"step": 3, "te')  # odd characters and a line cut short
    with pytest.raises(DataError, match="leave out --steps"):
        tr.main(["--resume", str(again), "--steps", "40"])
    tr.main(["--resume", str(again)])
    assert log_of(again) == log_of(once) and len(log_of(once)) == 4
    weights = [(folder / "adapter" / "adapter_model.safetensors").read_bytes() for folder in (once, again)]
    assert weights[0] == weights[1]
    assert {path.name for path in once.iterdir()} == {
        "config.json", "metrics.jsonl", "trajectories.jsonl", "adapter", "adapter.old", "best", "eval.json",
        "eval_trajectories.jsonl", "curves.png"}  # fmt: skip
    result = json.loads((once / "eval.json").read_text())
    assert {(moment, kind) for moment in result for kind in result[moment]} == {
        (moment, kind) for moment in ("before", "after") for kind in ("sampled", "greedy")}  # fmt: skip
    printed = capsys.readouterr().out
    assert "greedy" in printed and "\nstep 2 of 4: reward " in printed, "progress also where no bar can be drawn"
    assert len(list(again.parent.parent.iterdir())) == 1, "nothing is written outside the run folder"


def test_one_step_in_4bit(monkeypatch, tmp_path, played):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="4-bit needs bitsandbytes")
    folder = run(monkeypatch, tmp_path, "--steps", "1", "--load_in_4bit", "true", "--eval_questions", "", "--name", "q")
    assert math.isfinite(log_of(folder)[0]["loss"]) and json.loads((folder / "config.json").read_text())["load_in_4bit"]
    model, _ = load_model(TrainSettings(load_in_4bit=True), folder / "adapter")
    assert sum(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules()) == 28
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    update(model, optimizer, played, torch.linspace(-1, 1, len(played)), 1e-3, TrainSettings())
    assert all(p.norm() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_4bit_without_bitsandbytes_is_one_line(monkeypatch):
    for module in (tr, ro):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="bitsandbytes, which is not installed"):
        tr.parse(["--load_in_4bit", "true"])
    assert tr.parse([])[0].load_in_4bit is False


def test_a_loaded_adapter_stays_trainable(lora, tmp_path):
    model = lora[0]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    tr.save_checkpoint(model, optimizer, 3, tmp_path / "adapter")
    again, _ = load_model(TrainSettings(), tr.find_checkpoint(tmp_path))

    def count(m):
        return sum(p.numel() for p in m.parameters() if p.requires_grad)

    assert count(again) == count(model) > 0


@pytest.mark.parametrize("arguments, message", [
    (["--reward", "magic"], "--reward magic: choose one of autosearch"),
    (["--steps", "0"], "--steps 0"),
    (["--topk", "0"], "--topk 0"),
    (["--seed", "-1"], "--seed -1"),
    (["--questions", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--questions", str(WORLD / "train_corpus.jsonl")], "train_corpus.jsonl"),
    (["--corpus", str(WORLD / "train.jsonl")], "train.jsonl"),
    (["--search_cost", "0.3"], "--search_cost is for"),
    (["--resume", "nowhere"], "nowhere"),
    (["--name", "../x"], "without a path"),
])  # fmt: skip
def test_bad_settings_stop_before_anything_is_written(monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tr, "load_model", lambda *_: pytest.fail("the model was loaded first"))
    with pytest.raises((DataError, FileNotFoundError), match=message):
        tr.main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_stepsearch_needs_supporting_titles(monkeypatch, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"id": "q1", "question": "Who?", "golden_answers": ["x"]}\n')
    monkeypatch.setattr(tr, "load_model", lambda *_: pytest.fail("the model was loaded first"))
    with pytest.raises(DataError, match="q.jsonl: question q1 has no metadata.supporting_titles"):
        tr.main(["--reward", "stepsearch", "--questions", str(path)])


@pytest.mark.parametrize("name", ["autosearch-released", "autosearch-t0", "stepsearch", "search-penalty"])
def test_every_kind_of_reward_trains(monkeypatch, tmp_path, name):
    folder = run(monkeypatch, tmp_path, "--steps", "1", "--reward", name, "--eval_questions", "", "--name", "r")
    (row,) = log_of(folder)
    assert row["reward"] != 0 and math.isfinite(row["grad_norm"])
    saved = json.loads((folder / "trajectories.jsonl").read_text().splitlines()[0])
    assert (saved["self_answer_0"] is not None) == (name == "autosearch-t0")


def test_questions_are_drawn_without_repeats_within_an_epoch():
    questions, settings = list(range(10)), SimpleNamespace(num_questions=4, seed=1)
    drawn = [q for step in range(5) for q in tr.draw_questions(questions, settings, step)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == questions and drawn[:10] != drawn[10:]


# Real models: presets, prompts' settings, memory, merging, trackers

PRESETS = sorted(path.stem for path in (WORLD.parent / "presets").glob("*.json"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete_and_can_be_changed(name):
    known = {**TrainSettings.__dataclass_fields__, **RolloutSettings.__dataclass_fields__}
    preset = tr.read_preset(name)
    assert set(preset) <= set(known) and {"model", "prompt_style", "micro_batch_size", "max_context"} <= set(preset)
    settings, rollout_settings, _ = tr.parse(["--preset", name, "--micro_batch_size", "1", "--topk", "2"])
    tr.check_settings(settings, rollout_settings)
    assert (settings.model, settings.micro_batch_size, rollout_settings.topk) == (preset["model"], 1, 2)
    assert rollout_settings.max_turn_tokens == preset["max_turn_tokens"]
    passages = preset["max_searches"] * preset["topk"] * preset["max_passage_chars"] // 4  # four characters a token
    turns = (preset["max_searches"] + 1) * preset["max_turn_tokens"]
    assert 350 + turns + passages <= preset["max_context"], "a whole trajectory fits behind a prompt of 350 tokens"


def test_an_unknown_preset_names_the_known_ones():
    assert {"qwen2.5-0.5b", "qwen2.5-1.5b-instruct", "qwen2.5-3b", "smollm2-135m"} <= set(PRESETS)
    with pytest.raises(DataError, match="qwen2.5-3b-instruct"):
        tr.parse(["--preset", "qwen"])


def test_logits_in_pieces_are_the_same(lora, played, monkeypatch):
    model = lora[0]
    batch = make_micro_batches(played, torch.ones(len(played)), 16, "cpu")[0]
    results = []
    for size in (tr.LOGITS_AT_ONCE, 7 * model.config.vocab_size):
        monkeypatch.setattr(tr, "LOGITS_AT_ONCE", size)
        model.zero_grad()
        logps, entropy = per_token_logps(model, batch, 0.7)
        logps.sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append((logps.detach(), entropy, *grads))
    for whole, pieces in zip(*results):
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)
    model.zero_grad()


def allocated_peak(work, folder):
    """Most bytes that torch had allocated while `work()` ran, beyond those at its start, from the profiler's log."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = [e["args"]["Bytes"] for e in sorted(events, key=lambda e: e["ts"]) if e["name"] == "[memory]"]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("vocab_size", [500, 20000])
def test_the_memory_estimate_is_near_the_measured_peak(bpe_tokenizer, tmp_path, vocab_size, gradient_checkpointing):
    config = Qwen2Config(vocab_size=vocab_size, hidden_size=256, intermediate_size=1024, num_hidden_layers=6,
                         num_attention_heads=8, num_key_value_heads=2)  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    bpe_tokenizer.save_pretrained(tmp_path)
    settings = TrainSettings(model=str(tmp_path), micro_batch_size=4, gradient_checkpointing=gradient_checkpointing)
    limits = RolloutSettings(max_context=400, max_turn_tokens=40, max_searches=2)
    model, _ = load_model(settings)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    longest = Trajectory({}, prompt_ids=[5] * 40)
    for _ in range(3):
        longest.append([7] * 40, sampled=True)
        longest.append([8] * 80, sampled=False)
    assert tr.length_of(longest) == limits.max_context
    advantages = torch.tensor([1.0, -1.0] * 2)
    measured = allocated_peak(lambda: update(model, optimizer, [longest] * 4, advantages, 1e-3, settings), tmp_path)
    parts = tr.estimate_memory(config, settings, limits)
    expected = sum(value for name, value in parts.items() if name.startswith("update"))
    expected += parts["adapter, gradients, Adam"] * 3 / 4  # the weights were there before
    assert measured == pytest.approx(expected, rel=0.3)
    weights = sum(p.numel() * p.element_size() for name, p in model.named_parameters() if "lora" not in name)
    assert parts["weights"] == weights


def test_the_memory_estimate_of_rollouts_is_near_the_measured_peak(bpe_tokenizer, tmp_path, monkeypatch):
    config = Qwen2Config(vocab_size=5000, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
                         num_attention_heads=8, num_key_value_heads=2)  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    bpe_tokenizer.save_pretrained(tmp_path)
    settings = TrainSettings(model=str(tmp_path), num_questions=2, num_generations=8)
    passages = [{"id": str(i), "title": f"City {i}", "text": "The city lies on a river. " * 20} for i in range(3)]
    questions = [{"id": "0", "question": "Which city?", "golden_answers": ["x"], "metadata": {}}]
    limits = RolloutSettings(max_context=1150, max_turn_tokens=8, max_searches=1, max_self_answer_tokens=8,
                             max_passage_chars=100, topk=3)  # fmt: skip
    model, tokenizer = load_model(settings)
    monkeypatch.setattr(tr, "update", lambda *arguments: lengths.append(tr.length_of(arguments[2][0])))
    lengths = []
    measured = allocated_peak(lambda: tr.dry_run(model, tokenizer, None, questions, BM25(passages), settings, limits),
                              tmp_path)  # fmt: skip
    limits.max_context = lengths[0]
    observation = lengths[0] - len(ro.encode_prompt(tokenizer, "Which city?")) - 2 * limits.max_turn_tokens
    limits.max_passage_chars = 4 * observation // limits.topk  # this tokenizer's tokens are letters, not words
    parts = tr.estimate_memory(config, settings, limits)
    expected = sum(value for name, value in parts.items() if name.startswith("rollout"))
    assert measured == pytest.approx(expected, rel=0.3)


def test_a_dry_run_makes_one_step_at_its_largest_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tr.main(["--dry_run", "--num_questions", "1", "--num_generations", "2", "--max_turn_tokens", "12"])
    printed = capsys.readouterr().out
    assert re.search(r"estimate: weights 0.00, .* peak 0.\d\d GiB\n +loaded +\d.\d\d GiB\n", printed)
    length = int(re.search(r"rollout +[\d.]+ s +[\d.]+ GiB   2 trajectories of (\d+) tokens", printed)[1])
    assert length > 5 * 12 + 4 * 3 * 10, "five turns to their limit, and four times three passages"
    assert re.search(r"update +[\d.]+ s", printed) and not list(tmp_path.iterdir())


def test_merging_writes_an_ordinary_model(lora, tmp_path, capsys):
    model, tokenizer = lora
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    tr.save_checkpoint(model, optimizer, 1, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "config.json").write_text("{}")
    arguments = ["--resume", str(tmp_path / "run"), "--merge", str(tmp_path / "merged")]
    tr.main(arguments)
    merged, again = ro.load_policy(tmp_path / "merged")
    ids = torch.tensor([ro.encode_prompt(tokenizer, "Who is the author of Amber Ivy?")])
    assert ro.encode_prompt(again, "Who is the author of Amber Ivy?") == ids[0].tolist()
    with torch.no_grad():
        difference = (merged(ids).logits - model(ids).logits).abs().max()
        with model.disable_adapter():
            without = (merged(ids).logits - model(ids).logits).abs().max()
    assert difference < 0.2 * without, "bfloat16 rounds, but the adapter must be there"
    with pytest.raises(DataError, match="exists already"):
        tr.main(arguments)
    with pytest.raises(DataError, match="--merge writes the model of a run"):
        tr.main(["--merge", "x"])


def test_metrics_go_to_a_tracker(monkeypatch, tmp_path):
    logged, asked = [], []
    tracker = SimpleNamespace(log=lambda row, step: logged.append((row, step)))
    fake = SimpleNamespace(init=lambda **arguments: asked.append(arguments) or tracker)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    report_metrics = tr.open_tracker(TrainSettings(report_to="wandb"), tmp_path / "a")
    report_metrics({"step": 3, "reward": 1.5})
    assert asked[0]["name"] == "a" and asked[0]["config"]["reward"] == "autosearch"
    assert logged == [({"step": 3, "reward": 1.5}, 3)]
    tr.open_tracker(TrainSettings(), tmp_path)({"step": 0})
    monkeypatch.setattr(tr, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="--report_to tensorboard: the package tensorboard is not installed"):
        tr.check_settings(TrainSettings(report_to="tensorboard"), RolloutSettings())

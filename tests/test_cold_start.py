"""Cold start: demonstrations as the rollout would play them, and the fine-tuning on them."""

import random

import pytest
import torch
from conftest import QUESTION, WORLD, CountingRetriever, adamw, log_of, trainable

import reward
import train as tr
from data import cold_start as cs
from plumbing import adapters, data, files, models
from plumbing.files import DataError
from retriever import BM25
from rollout import Sampling, rollout
from train import TrainSettings

PASSAGES = [
    {
        "id": "0",
        "title": "Inferno (novel)",
        "text": "It sold. Inferno is by Dan Brown. So it is.",
    },
    {"id": "1", "title": "Dan Brown", "text": "A writer. Dan Brown was born in Exeter, in 1964."},
    {"id": "2", "title": "Angela Brown", "text": "Angela Brown is a singer from Exeter."},
]
BRIDGE = {
    "id": "b",
    "question": "Where was the author of Inferno born?",
    "golden_answers": ["Exeter"],
    "metadata": {"supporting_titles": ["Dan Brown", "Inferno (novel)"]},
}
ROOM = {"max_turn_tokens": 200, "max_self_answer_tokens": 200, "max_context": 3000}


def settings(**more):
    return TrainSettings(**ROOM | {"cold_start": 1} | more)


def demonstrated(tokenizer, question=BRIDGE, seed=0, **more):
    environment = cs.Environment(tokenizer, CountingRetriever(PASSAGES), settings(**more))
    return cs.demonstrate(random.Random(seed), cs.Demonstration(question, environment))


def test_the_chain_is_followed_and_each_thought_quotes_what_was_found(bpe):
    """The title that the question names comes first, whatever the order in the file."""
    shown = demonstrated(bpe.tokenizer, needless_searches=[1.0])
    assert shown.trajectory.steps == [
        "<think> First Inferno. </think> <search> Inferno </search>",
        "<think> Inferno is by Dan Brown. Next Dan Brown. </think> <search> Dan Brown </search>",
        "<think> Dan Brown was born in Exeter, in 1964. That is enough. </think>"
        " <answer> Exeter </answer>",
    ]
    said = [bpe.tokenizer.decode(ids) for _, ids, _ in shown.branches]
    assert [reward.extract_self_answer(text) for text in said] == ["unknown", "Exeter"]


@pytest.mark.parametrize("needless", [0, 1, 2])
def test_demonstrations_are_valid_and_their_parts_know_who_wrote_them(bpe, needless):
    shares = [float(number == needless) for number in range(3)]
    shown = demonstrated(bpe.tokenizer, needless_searches=shares)
    trajectory = shown.trajectory
    assert trajectory.search_depth == 2 + needless and trajectory.answer == "Exeter"
    assert all(reward.valid_steps(trajectory.steps))
    assert shown.weights == [float(sampled) for sampled in trajectory.completion_mask]
    ids, weights, branches, starts = shown.columns()
    written = [i for i, weight, branch in zip(ids, weights, branches) if weight and not branch]
    assert bpe.tokenizer.decode(written) == "".join(trajectory.steps)
    assert max(branches) == 2 + needless
    for number in range(1, max(branches) + 1):
        branch = [(i, w, s) for i, w, b, s in zip(ids, weights, branches, starts) if b == number]
        said = bpe.tokenizer.decode([i for i, weight, _ in branch if weight])
        assert said.startswith("<think>") and said.endswith("</answer>")
        before = ids[: branch[0][2]]  # it is asked once the passages have been read
        assert bpe.tokenizer.decode(before).endswith("</information>\n\n")


def test_a_rollout_of_the_same_texts_has_the_same_ids_and_mask(bpe, script):
    """Played by the real rollout, turn by turn, a demonstration is what comes out."""
    shown = demonstrated(bpe.tokenizer, needless_searches=[0, 1.0]).trajectory
    script(bpe.tokenizer, shown.steps)
    retriever, how = CountingRetriever(PASSAGES), Sampling(self_answers=False)
    (played,) = rollout(bpe, [BRIDGE], retriever, settings(), how)
    for name in ("prompt_ids", "completion_ids", "completion_mask", "steps", "stop"):
        assert getattr(played, name) == getattr(shown, name), name
    assert retriever.asked == ["Inferno", "Dan Brown", *retriever.asked[2:]]


def test_giving_up_is_demonstrated_at_its_rate(bpe):
    ends = [demonstrated(bpe.tokenizer, seed=i, early_stops=0.5) for i in range(40)]
    given_up = [shown.trajectory.answer == "unknown" for shown in ends]
    assert 8 < sum(given_up) < 32
    assert all(shown.trajectory.search_depth == 1 for shown, up in zip(ends, given_up) if up)


def test_words_are_left_out_where_a_turn_has_no_room(bpe):
    shown = demonstrated(bpe.tokenizer, needless_searches=[1.0])
    longest = max(len(models.encode(bpe.tokenizer, step)) for step in shown.trajectory.steps)
    short = demonstrated(bpe.tokenizer, needless_searches=[1.0], max_turn_tokens=longest - 1)
    steps, shorter = shown.trajectory.steps, short.trajectory.steps
    assert steps[:2] == shorter[:2]
    assert shorter[2].startswith("<think> Dan Brown was born That is enough. </think>")


STRANGERS = [
    ({"supporting_titles": ["Dan Brown", "Angela Brown"]}, {}, "neither the question nor a"),
    ({"supporting_titles": ["Where"]}, {}, "a search for it does not find"),
    ({}, {}, "name no supporting titles"),
    (BRIDGE["metadata"], {"max_searches": 1}, "more than --max_searches"),
    (BRIDGE["metadata"], {"max_context": 950}, "are longer than --max_context"),
    (BRIDGE["metadata"], {"max_turn_tokens": 20}, "need longer turns than --max_turn_tokens"),
    (BRIDGE["metadata"], {"max_self_answer_tokens": 9}, "than --max_self_answer_tokens"),
]


@pytest.mark.parametrize("metadata, more, problem", STRANGERS)
def test_what_cannot_be_shown_is_skipped_and_none_at_all_is_one_line(bpe, metadata, more, problem):
    odd = BRIDGE | {"id": "odd", "metadata": metadata}
    more = {"max_turn_tokens": 100, "max_self_answer_tokens": 100} | more
    with pytest.raises(cs.NotShown, match=problem):
        demonstrated(bpe.tokenizer, odd, **more)
    if not metadata:
        return
    task = data.Task([odd], BM25(PASSAGES))
    with pytest.raises(DataError, match=f"--cold_start: q.jsonl: no question .*: 1 .*{problem}"):
        cs.make(task, bpe.tokenizer, settings(questions="q.jsonl", **more))


def test_the_share_of_questions_that_allow_one_is_known(bpe):
    odd = BRIDGE | {"id": "odd", "metadata": {"supporting_titles": ["Nowhere"]}}
    task = data.Task([BRIDGE, odd], BM25(PASSAGES))
    shown = cs.make(task, bpe.tokenizer, settings(cold_start=5))
    assert len(shown.rows) == 5 and 0.5 <= shown.allowed <= 5 / 9


def test_without_supporting_titles_the_tiny_world_is_shown(bpe):
    task = data.Task([BRIDGE | {"metadata": {}}], BM25(PASSAGES))
    shown = cs.make(task, bpe.tokenizer, settings(cold_start=3))
    known = files.read_text(WORLD / "train_corpus.jsonl")
    for ids, weights, *_ in shown.rows:
        text = bpe.tokenizer.decode([i for i, weight in zip(ids, weights) if weight])
        assert text.split("<search> ")[1].split(" </search>")[0] in known
    assert shown.allowed == 0


def test_the_loss_is_that_of_trajectory_and_self_answers_one_by_one(lora, world):
    """Packed, in micro-batches or at once, against the slow way: each text on its own."""
    environment = cs.Environment(lora.tokenizer, world.retriever, settings())
    rng, rows = random.Random(0), []
    for question in world.questions[2:12]:
        if not question["metadata"].get("hard"):
            shown = cs.demonstrate(rng, cs.Demonstration(question, environment))
            rows.append(shown.columns())
    rows.sort(key=cs.size)
    total, weight, model = 0.0, 0.0, lora.model
    for ids, weights, branches, starts in rows:
        for branch in range(max(branches) + 1):
            at = [i for i, number in enumerate(branches) if number == branch]
            text = (ids[: starts[at[0]]] if branch else []) + [ids[i] for i in at]
            with torch.no_grad():
                logps = model(torch.tensor([text])).logits[0].log_softmax(-1)
            first = len(text) - len(at)
            for place, i in enumerate(at):
                if weights[i]:
                    total -= logps[first + place - 1, ids[i]].item()
                    weight += 1
    for tokens in (1, 1500, 100_000):
        how = settings(micro_batch_tokens=tokens, max_grad_norm=1e9)
        optimizer = torch.optim.SGD(trainable(model), lr=0.0)
        loss = cs.fine_tune(model.train(), optimizer, rows, tr.per_token_logps, how)
        assert loss == pytest.approx(total / weight, rel=1e-4)
    model.eval()


SMALL = ["--cold_start", "40", "--steps", "1", "--eval_questions", ""]


def weights_in(folder):
    return (folder / "adapter_model.safetensors").read_bytes()


def stop_at(monkeypatch, step):
    """A run that is killed at this update of its cold start."""
    fine_tune, done = cs.fine_tune, []

    def killed(*arguments):
        if len(done) == step:
            raise KeyboardInterrupt
        done.append(1)
        return fine_tune(*arguments)

    monkeypatch.setattr(cs, "fine_tune", killed)


def test_a_killed_cold_start_goes_on(run_train, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cs, "SAVE_EVERY", 2)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    whole = run_train(tmp_path / "a", *SMALL, "--name", "a")
    assert "after the cold start, 32 training questions" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        with pytest.raises(SystemExit, match="go on with: python train.py --resume runs/b"):
            run_train(tmp_path / "b", *SMALL, "--name", "b")
    killed = tmp_path / "b" / "runs" / "b"
    assert files.read_json(killed / "cold_start" / "state.json") == {"step": 2}
    assert not (killed / "adapter").exists()
    tr.main(["--resume", "runs/b"])
    for name in ("cold_start", "adapter"):
        assert weights_in(killed / name) == weights_in(whole / name)
    assert weights_in(whole / "cold_start") != weights_in(whole / "adapter")
    assert log_of(killed) == log_of(whole)
    logged = [files.read_log(run / cs.LOG) for run in (whole, killed)]
    assert logged[0] == logged[1] and [row["step"] for row in logged[0]] == [0, 1, 2, 3, 4, 5]
    assert {"valid_action_ratio", "em", "right_self_answer"} < logged[0][-1].keys()


def test_the_reference_is_the_policy_after_the_cold_start(run_train, tmp_path):
    """KL is 0 in the first step, not later; the base model is far from both."""
    run = run_train(tmp_path, *SMALL[:2], "--steps", "2", "--beta", "0.1", *SMALL[4:])
    kls = [row["kl"] for row in log_of(run)]
    assert kls[0] == 0 < kls[1]
    assert sorted(path.name for path in (run / "adapter").iterdir() if path.is_dir()) == []
    policy = models.load_trainable(TrainSettings(), run / "adapter")
    policy.model.load_adapter(run / "cold_start", adapters.REFERENCE)
    before, ids = [p.requires_grad for p in policy.model.parameters()], torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        with adapters.reference_weights(policy.model):
            reference = policy.model(ids).logits
        shown = models.load_trainable(TrainSettings(), run / "cold_start").model(ids).logits
        assert torch.equal(reference, shown)
        assert not torch.equal(reference, policy.model(ids).logits)
    assert [p.requires_grad for p in policy.model.parameters()] == before


def test_runs_can_share_a_cold_start(run_train, tmp_path):
    """--adapter: the same first step as the run that made it."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = run_train(tmp_path / "a", *SMALL)
    more = ["--adapter", str(first / "cold_start"), "--beta", "0.1", *SMALL[2:]]
    second = run_train(tmp_path / "b", *more)
    rows = log_of(first)[0], log_of(second)[0]
    assert rows[0]["reward"] == rows[1]["reward"] and rows[1]["kl"] == 0


def test_a_cold_start_in_4bit_moves_the_adapter(world):
    pytest.importorskip("bitsandbytes", reason="4-bit needs bitsandbytes")
    model, tokenizer = models.load_trainable(settings(load_in_4bit=True))
    more = settings(cold_start=4)
    rows = cs.make(data.Task(world.questions, world.retriever), tokenizer, more).rows
    loss = cs.fine_tune(model, adamw(model), sorted(rows, key=cs.size), tr.per_token_logps, more)
    assert 0 < loss < 10
    assert all(p.norm() > 0 for name, p in model.named_parameters() if "lora_B" in name)


WRONG = [
    (["--needless_searches", "0", "0"], "--needless_searches 0.0 0.0: one of the shares"),
    (["--needless_searches", "-1"], "--needless_searches -1.0: must be 0.0 or more|0 or more"),
    (["--early_stops", "2"], "--early_stops 2.0: must be 1 or less"),
    (["--adapter", "nowhere"], "nowhere: no adapter there"),
    (["--max_turn_tokens", "4"], "--cold_start: .* need longer turns than --max_turn_tokens"),
    (["--questions", "hard.jsonl"], "--cold_start: hard.jsonl: no question can be demonstrated"),
]


@pytest.mark.parametrize("words, problem", WRONG)
def test_what_cannot_work_is_one_line_before_the_model_loads(tmp_path, monkeypatch, words, problem):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load_base_model", pytest.fail)
    lines = files.read_text(WORLD / "train.jsonl").splitlines(True)
    hard = [line for line in lines if '"hard"' in line]
    (tmp_path / "hard.jsonl").write_text("".join(hard))
    with pytest.raises(DataError, match=problem):
        tr.main(["--cold_start", "8", *words])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "valid, em, allowed, warns",
    [(0.95, 0.6, 1.0, 0), (0.85, 0.6, 1.0, 1), (0.95, 0.4, 1.0, 1), (0.95, 0.4, 0.7, 0)],
)
def test_a_cold_start_that_came_to_little_is_said(
    lora, tmp_path, capsys, monkeypatch, valid, em, allowed, warns
):
    means = {"valid_action_ratio": valid, "em": em}
    monkeypatch.setattr(cs, "mean_metrics", lambda trajectories: means)
    files.write_jsonl(tmp_path / cs.LOG, [{"step": 0}])
    task = data.Task([QUESTION], CountingRetriever())
    cs.try_out(lora, task, TrainSettings(), allowed, tmp_path)
    said = capsys.readouterr()
    assert f"valid actions {valid:.2f}, EM {em:.2f}, a self-answer was right in 0.00" in said.out
    assert ("no signal about depth" in said.err) == warns
    assert files.read_log(tmp_path / cs.LOG)[1] == {
        "step": 1,
        **means,
        "right_self_answer": 0,
        "n": 1,
    }

"""Questions, turns, trajectories, reports and run folders made by hand, with every number known."""

import eval as evaluation
from plumbing import files, runs
from rollout import Trajectory, Turn

RIGHT = "<think>I see</think> <answer>Ada Lovelace</answer>"
WRONG = "<answer>unknown</answer>"
QUERIES = ["birthplace of Ada", "river Thames length", "mathematics engine notes", "poet father"]


def question(name="q0", **metadata):
    row = {"id": name, "question": f"Who ({name})?", "golden_answers": ["Ada Lovelace"]}
    return row | {"metadata": metadata}


def search(query, self_answer=WRONG, passages=()):
    text = f"<think>look</think> <search>{query}</search>"
    return Turn(text, "search", query, list(passages), self_answer)


def answer(text="Ada Lovelace"):
    return Turn(f"<think>done</think> <answer>{text}</answer>", "answer")


def trajectory(*turns, q=None, tokens=10, seconds=0.5, **more):
    more["stop"] = "answer" if turns and turns[-1].action == "answer" else "turns"
    more["completion_mask"] = [1] * tokens
    return Trajectory(q or question(), list(turns), seconds=seconds, **more)


def searching(depth, q, final="Ada Lovelace"):
    """So many different searches, then an answer."""
    return trajectory(*map(search, QUERIES[:depth]), answer(final), q=q)


def scored(trajectories):
    """[(Trajectory, Score)]"""
    return [(t, t.score()) for t in trajectories]


def reports(depth, em=1.0):
    """Reports on 4 + 4 + 4 questions (needing 1, 2 and "hard"): `depth` searches, `em` right."""
    cases = []
    for g, metadata in enumerate([{"hops": 1}, {"hops": 2}, {"hops": 1, "hard": True}]):
        for i in range(4):
            final = "Ada Lovelace" if i < 4 * em else "x"
            cases.append(searching(depth, question(f"{g}-{i}", **metadata), final))
    report = evaluation.report(cases)
    return {"sampled": report, "greedy": report}


def make_run(folder, reward_name="autosearch", seed=0, depth=1, em=1.0, **config):
    """A run's folder with its config.json and eval.json; returns its path as a string."""
    folder.mkdir()
    usual = {"model": "m", "reward": reward_name, "search_cost": None, "seed": seed}
    files.write_json(folder / "config.json", usual | {"commit": str(folder)} | config)
    results = {"before": reports(3), "after": reports(depth, em)}
    files.write_json(folder / "eval.json", results)
    return str(folder)


def finished_run(folder, depth, **more):
    """A run with all that training leaves: reports, metrics, held-out trajectories."""
    make_run(folder, depth=depth, **more)
    rows = [{"step": 0, "reward": 1.0}, {"step": 1, "reward": 1.5}]
    files.write_jsonl(folder / "metrics.jsonl", rows)
    evil = {
        "title": "</dd><script>alert(1)</script>",
        "text": "\u202e<img src=x onerror=alert(2)> ${title} $body {{ title }} {% raw %}",
    }
    cases = []
    for i in range(4):
        searches = [search(query, RIGHT, [evil]) for query in QUERIES[:depth]]
        cases.append(trajectory(*searches, answer(), q=question(f"q{i}", hops=i % 2)))
    evaluation.save_trajectories(folder / runs.HELD_OUT, scored(cases))
    return str(folder)


def small_task(folder, questions):
    """Files with these questions and a corpus of one passage: their paths."""
    passage = {"id": "1", "title": "Ada", "text": "A mathematician."}
    files.write_jsonl(folder / "q.jsonl", questions)
    files.write_jsonl(folder / "c.jsonl", [passage])
    return str(folder / "q.jsonl"), str(folder / "c.jsonl")

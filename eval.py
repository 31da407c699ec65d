"""Measure a policy like the paper (EM, F1, SD, SE, OSR), and look at what it does.

    python eval.py --run runs/NAME                            # its held-out questions, greedy
    python eval.py --model M [--adapter A] --questions Q --corpus C --temperature 1 --samples 4
    python eval.py --run runs/NAME --force_depth 0 1 2 3 4    # the paper's Figure 2
    python eval.py --run runs/NAME --ask "Which river ...?"   # one trajectory, no report
    # without a policy, from what runs have saved:
    python eval.py --run runs/NAME --show 3 --where "hops==2 and em==0"
    python eval.py --run runs/NAME --html page.html           # tables, figures, trajectories
    python eval.py --compare runs/A runs/B [--html page.html] # side by side
    python eval.py --curves runs/A runs/B                     # training curves

SD, search depth, is the mean number of executed searches; SE, search efficiency, is EM / SD; OSR,
over-search ratio, the share of questions with a right self-answer after a search before the last
one (section 5 of the paper). Ours: `osr_t0` also counts the self-answer before the first search,
and depth against need compares the searches made with those needed. All are fractions.
"""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

import reward
from plumbing import data, files, logs, look, models, options, page, prompts, runs, show, stats
from plumbing.adapters import inference_weights
from plumbing.options import setting
from retriever import open_retriever
from rollout import RolloutSettings, Sampling, Trajectory, rollout, system_prompt_of


@dataclass
class EvalSettings(RolloutSettings):
    """What to evaluate, or how to look; the settings of rollouts are the run's unless given."""

    run: str | None = setting(None, "run folder: its model, adapter, questions, corpus, settings")
    model: str | None = setting(None, "model folder or name, instead of a run")
    adapter: str | None = setting(None, "LoRA adapter folder; default: the run's")
    questions: str | None = setting(None, "questions, JSONL")
    corpus: str | None = setting(None, "corpus, JSONL, or an index of it")
    retriever_url: str | None = setting(None, "search server to use instead of the corpus")
    temperature: float = setting(0.0, "0 is greedy", low=0)
    samples: int = setting(1, "trajectories per question, with a temperature above 0", low=1)
    batch_size: int = setting(32, "questions rolled out together", low=1)
    limit: int | None = setting(None, "only the first so many questions; default: the run's", low=1)
    seed: int = setting(0, "of sampling and of the bootstrap", low=0)
    by: list[str] | None = setting(None, "metadata keys to group by; default: hops")
    hotpot_rules: bool = setting(False, "F1 as HotpotQA has it: yes and no match in full or not")
    force_depth: list[int] | None = setting(None, "search exactly so often, for each number", low=0)
    out: str | None = setting(None, "JSON file for the report; default: eval.json")
    trajectories: str | None = setting(None, "saved trajectories to measure, instead of a policy")
    show: int = setting(0, "print so many trajectories: with --run alone saved ones", low=0)
    where: str | None = setting(None, 'which of them, for example "hops==2 and em==0"')
    html: str | None = setting(None, "write tables, figures and --show trajectories (10) here")
    compare: list[str] | None = setting(None, "run folders to put side by side")
    reference: str | None = setting(None, "report of --force_depth for --compare to draw")
    curves: list[str] | None = setting(None, "run folders whose training curves to draw")
    figure: str | None = setting(None, "figure file, .png or .svg; default: beside the runs")
    ask: str | None = setting(None, "a question to answer before your eyes")
    gold: list[str] | None = setting(None, "the right answers to --ask, for the scores")


# Metrics


def search_efficiency(em, sd):
    """SE = EM / SD; None where nothing was searched."""
    return em / sd if sd else None


def search_depth(trajectories):
    """SD = mean number of executed searches."""
    return stats.mean(trajectory.search_depth for trajectory in trajectories)


def over_search_ratio(trajectories):
    """OSR = share with a right self-answer after a search before the last one."""
    return stats.mean(map(over_searched, trajectories))


def over_searched(trajectory):
    """Whether a self-answer was right after a search before the last one."""
    searches = [turn for turn in trajectory.turns if turn.searched]
    return any(is_right(turn.self_answer, trajectory) for turn in searches[:-1])


def is_right(self_answer, trajectory):
    """Whether the raw text of a self-answer holds a right answer."""
    answer = reward.extract_self_answer(self_answer)
    return reward.exact_match(answer, trajectory.question["golden_answers"]) == 1


def final_em(trajectory):
    """EM of the final answer."""
    return reward.exact_match(trajectory.answer, trajectory.question["golden_answers"])


def mean_metrics(trajectories, hotpot_rules=False):
    """The metrics of a list of Trajectory: means over them, of valid actions over their turns."""
    f1s, over_t0, valid = [], [], []
    for trajectory in trajectories:
        golds = trajectory.question["golden_answers"]
        f1s.append(reward.f1(trajectory.answer, golds, hotpot_rules))
        at_0 = trajectory.search_depth > 0 and is_right(trajectory.self_answer_0, trajectory)
        over_t0.append(at_0 or over_searched(trajectory))
        valid += reward.valid_steps(trajectory.steps)
    em, sd = stats.mean(map(final_em, trajectories)), search_depth(trajectories)
    return {
        "em": em,
        "f1": stats.mean(f1s),
        "sd": sd,
        "se": search_efficiency(em, sd),
        "osr": over_search_ratio(trajectories),
        "osr_t0": stats.mean(over_t0),
        "valid_action_ratio": sum(valid) / max(1, len(valid)),
        "tokens": stats.mean(trajectory.tokens for trajectory in trajectories),
        "seconds": stats.mean(trajectory.seconds for trajectory in trajectories),
    }


def group_report(trajectories, seed, hotpot_rules):
    """The metrics of a group, with 95% intervals; `n` counts questions, `trajectories` samples."""
    questions = [(t.question["id"], t.question["question"]) for t in trajectories]
    ems, depths = map(final_em, trajectories), [t.search_depth for t in trajectories]
    intervals = {"em": stats.bootstrap(questions, list(ems), seed)}
    intervals["sd"] = stats.bootstrap(questions, depths, seed)
    counts = {"n": len(set(questions)), "trajectories": len(trajectories)}
    return mean_metrics(trajectories, hotpot_rules) | counts | {"ci": intervals}


def report(trajectories, settings=None, by=("hops",), seed=0, hotpot_rules=False):
    """The R of `eval.json`: all metrics, overall and per group of the metadata keys `by` (under
    "hops", those with metadata.hard stand apart). Raises DataError where there is no trajectory."""
    files.check(trajectories, "no report", "there is no trajectory to report on")
    result = group_report(trajectories, seed, hotpot_rules) | {"by": {}}
    for key in by:
        groups = {}
        for trajectory in trajectories:
            groups.setdefault(data.group_of(trajectory.question, key), []).append(trajectory)
        if set(groups) != {"unknown"}:
            names = data.sorted_groups(groups)
            by_name = {name: group_report(groups[name], seed, hotpot_rules) for name in names}
            result["by"][key] = by_name
    return result | {"depth": depth_against_need(trajectories), "settings": settings or {}}


def depth_against_need(trajectories):
    """Searches made against searches needed (metadata.hops): what "adaptive" means; ours.
    {"matrix": {needed, or "hard" (unknown): {made: count}}, "spearman", shares with fewer searches
    than hops ("under"), as many ("exact"), more ("over"), "needless" (mean searches beyond the
    need), "n"}, or None where no hops are known. Not to be mixed up with verdicts, which go by t_c.
    """
    pairs = [(data.group_of(t.question, "hops"), t.search_depth) for t in trajectories]
    needs = [int(need) for need, _ in pairs if need.isdecimal()]
    depths = [made for need, made in pairs if need.isdecimal()]
    if not needs:
        return None
    matrix, columns = {}, range(max(made for _, made in pairs) + 1)
    for need in data.sorted_groups(need for need, _ in pairs if need != "unknown"):
        matrix[need] = {str(made): pairs.count((need, made)) for made in columns}
    extra = np.array(depths) - np.array(needs)
    result = {"matrix": matrix, "spearman": stats.spearman(needs, depths), "n": len(needs)}
    result |= {"under": stats.mean(extra < 0), "exact": stats.mean(extra == 0)}
    return result | {"over": stats.mean(extra > 0), "needless": stats.mean(extra.clip(min=0))}


# Evaluating


def evaluate(policy, task, settings, sampling, batch_size=32):
    """Roll out all questions in order: the trajectories, those of a question side by side. Sampled
    ones depend on `batch_size`: the rows of a batch draw from one random stream."""
    trajectories, starts = [], range(0, len(task.questions), batch_size)
    for start in tqdm(starts, "evaluation", leave=False, disable=None):
        questions = task.questions[start : start + batch_size]
        seed = runs.seed_of(sampling.seed, start)
        how = replace(sampling, ask_before_search=True, seed=seed)
        trajectories += rollout(policy, questions, task.retriever, settings, how)
    return trajectories


def held_out_reward(policy, held_out, settings, weights):
    """Mean reward and EM, greedy, of the first `eval_sample` held-out questions; {} for none."""
    task = data.Task(held_out.questions[: settings.eval_sample], held_out.retriever)
    if not task.questions:
        return {}
    with inference_weights(policy.model):
        greedy = Sampling(temperature=0.0)
        trajectories = evaluate(policy, task, settings, greedy, settings.eval_batch_size)
    totals = [round(trajectory.score(weights).total, 6) for trajectory in trajectories]
    return {"eval/reward": stats.mean(totals), "eval/em": stats.mean(map(final_em, trajectories))}


def measure(policy, held_out, settings, run, moment):
    """Write the reports of a moment ("before" or "after" training) into eval.json, once.
    Returns what the file then holds: {moment: {"sampled": R, "greedy": R}}."""
    path = run / "eval.json"
    results = files.read_json(path) if path.exists() else {}
    if not held_out.questions or moment in results:
        return results
    adapter, url = str(run / "adapter") if moment == "after" else None, settings.retriever_url
    retriever = url or type(held_out.retriever).__name__
    origin = {"model": settings.model, "adapter": adapter, "retriever": retriever}
    origin |= {"seed": settings.seed, "load_in_4bit": settings.load_in_4bit}
    paths = {"questions": settings.eval_questions}
    if not url:
        paths["corpus"] = settings.eval_corpus
    results[moment] = {}
    for decoding, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        how = Sampling(temperature=temperature, seed=settings.seed)
        with inference_weights(policy.model):
            trajectories = evaluate(policy, held_out, settings, how, settings.eval_batch_size)
        depends_on = provenance(origin | {"temperature": temperature}, paths, settings)
        results[moment][decoding] = report(trajectories, depends_on)
    if moment == "after":  # the last ones, greedy
        save_trajectories(run / runs.HELD_OUT, [(t, t.score()) for t in trajectories])
    files.write_json(path, results)
    return results


def provenance(origin, paths, settings):
    """What a report depends on, for its `settings`."""
    hashes = {f"{name}_sha256": runs.sha256(path) for name, path in paths.items()}
    rollouts = {field.name: getattr(settings, field.name) for field in fields(RolloutSettings)}
    prompt = {"prompt": system_prompt_of(settings), "normaliser": "reward.normalize_answer"}
    return origin | paths | hashes | rollouts | prompt | {"versions": runs.versions()}


def save_trajectories(path, pairs):
    """Write [(Trajectory, Score)] as JSONL."""
    rows = [{**trajectory.to_dict(), "score": asdict(score)} for trajectory, score in pairs]
    files.write_jsonl(path, rows)


def read_trajectories(path):
    """[(Trajectory, Score)] of a file of trajectories. Raises DataError, OSError."""
    pairs = []
    for number, row in enumerate(files.read_log(path), start=1):
        where = f"{path}: record {number} is no trajectory"
        with files.on_failure(where):
            score = reward.Score(*(row["score"][key] for key in ("parts", "t_c", "em", "f1")))
            trajectory = Trajectory.from_dict(row)
            turns, parts = max(len(trajectory.turns), 1), len(score.parts)
            files.check(turns == parts, where, f"{parts} parts of its score for {turns} turns")
            pairs.append((trajectory, score))
    files.check(pairs, path, "there is no complete line in it yet")
    return pairs


# Ways of looking


def load(args, config):
    """(policy, Task, origin, paths) of the command line, the last two for `provenance`."""
    url = args.retriever_url or config.get("retriever_url")
    paths, needless = {}, {"questions": args.ask, "corpus": url}
    for name in ("model", "questions", "corpus"):
        if not needless.get(name):
            paths[name] = getattr(args, name) or config.get(f"eval_{name}") or config.get(name)
            files.check(paths[name], "nothing to evaluate", f"give --run, or --{name} and the like")
    adapter, model = args.adapter, files.locate(paths.pop("model"))
    if args.run and not args.model and not adapter:
        adapter = str(runs.find_checkpoint(args.run) or f"{args.run}/adapter")
    files.check(adapter is None or Path(adapter).is_dir(), adapter, "there is no adapter")
    tokenizer, questions = models.load_tokenizer(model), []
    models.check_model(model, tokenizer, args.max_context, adapter)
    if not args.ask:
        questions = data.load_questions(paths["questions"], args.limit)
        prompt = system_prompt_of(args)
        prompts.check_questions(paths["questions"], questions, tokenizer, args, prompt)
        look.check_names(args, questions)
    task = data.Task(questions, open_retriever(paths.get("corpus"), url))
    prompts.warn(tokenizer, system_prompt_of(args), args.prompt_style, task)
    in_4bit = bool(config.get("load_in_4bit") and not args.model)
    origin = {"model": args.model or config.get("model"), "adapter": adapter}
    origin |= {"retriever": url or type(task.retriever).__name__, "load_in_4bit": in_4bit}
    return models.load_policy(model, adapter, in_4bit, args.max_context), task, origin, paths


def look_at_policy(args, config, is_own):
    """Roll a policy out, print and write the report, then show its trajectories.
    is_own: what is measured goes into the run's own tables."""
    out = Path(args.out or (f"{args.run}/eval.json" if is_own else "eval.json"))
    saved = files.read_json(out) if out.exists() else {}
    policy, task, origin, paths = load(args, config)
    how = ("temperature", "samples", "seed", "limit", "hotpot_rules")
    origin |= {name: getattr(args, name) for name in how}
    pairs, reports, by = [], {}, args.by or ["hops"]
    for depth in sorted(set(args.force_depth)) if args.force_depth else [None]:
        sampling = Sampling(args.samples, args.temperature, args.seed, force_depth=depth)
        trajectories = evaluate(policy, task, args, sampling, args.batch_size)
        pairs += [(trajectory, trajectory.score()) for trajectory in trajectories]
        depends_on = provenance(origin | {"force_depth": depth}, paths, args)
        reports[str(depth)] = report(trajectories, depends_on, by, args.seed, args.hotpot_rules)
    if is_own and not args.force_depth and args.temperature == 0:
        save_trajectories(Path(args.run) / runs.HELD_OUT, pairs)
    look.show_trajectories(args, pairs, look.save_reports(args, reports, out, saved, is_own))


def look_at_saved(args, path):
    """Show saved trajectories, if there is a `path`; those of a run with its tables and figures."""
    with files.on_failure(f"{args.run or path}: a damaged file", but=[OSError]):
        pairs, sections = read_trajectories(path) if path else [], []
        if args.trajectories:
            trajectories, by = [trajectory for trajectory, _ in pairs], args.by or ["hops"]
            origin = {"trajectories": str(path), "hotpot_rules": args.hotpot_rules}
            result = report(trajectories, origin, by, args.seed, args.hotpot_rules)
            sections = look.print_report(result, f"{result['n']} questions")
        elif args.html:
            sections = page.run(args.run)
        latest = Path(path or "").name == logs.SAMPLES  # the end of training
        look.show_trajectories(args, pairs, sections, latest)


def ask(policy, retriever, args):
    """The trajectory of --ask; with its self-answers and rewards where --gold is given."""
    row = {"id": "asked", "question": args.ask, "golden_answers": args.gold or [], "metadata": {}}
    how = Sampling(1, args.temperature, args.seed, self_answers=bool(args.gold))
    (trajectory,) = rollout(policy, [row], retriever, args, how)
    print(show.render_trajectory(trajectory, trajectory.score()))


def main(arguments=None):
    about = __doc__.splitlines()[0]
    args = options.parse(EvalSettings, arguments, about)
    look.check_options(args)
    if args.compare or args.curves:
        return look.compare_runs(args, read_trajectories)
    config, own, saved, limit = {}, {}, args.trajectories, None
    if args.run:
        config = runs.read_config(args.run)
        own = asdict(options.read_config(RolloutSettings, args.run))
        limit = None if args.questions else config.get("eval_limit")
    others = (args.model, args.adapter, args.questions, args.corpus, args.retriever_url, args.out)
    # The run's own policy on its own questions, to stand in its tables; or what it has not saved
    is_own = bool(args.run) and not any(others) and args.limit in (None, limit)
    is_fresh = not is_own or bool(args.force_depth or args.temperature)
    args = options.parse(EvalSettings, arguments, about, own | {"limit": limit})
    if args.ask:
        policy, task, _, _ = load(args, config)
        return ask(policy, task.retriever, args)
    if args.run and (args.show or args.html) and not saved and not is_fresh:
        found = [Path(args.run) / name for name in (runs.HELD_OUT, logs.SAMPLES)]
        found = [path for path in found if path.exists()]
        if found or args.html:
            return look_at_saved(args, found[0] if found else None)
    if saved:
        return look_at_saved(args, saved)
    look_at_policy(args, config, is_own and not runs.is_shipped(args.run))


if __name__ == "__main__":
    files.run_script("eval.py", main)

"""The paper's claims on the tiny world, each with a verdict, from runs over three seeds.

    python data/claims.py                        # from the shipped reports, in a second
    python data/claims.py --reports runs --train # trains what is missing in runs/ first: hours

Writes claims.md and two figures beside the reports. What is trained is what `RUNS` lists; runs that
were stopped go on. EM / SD are means over seeds, with the lowest and the highest seed behind them;
`hard` questions hide the answer in one of seven papers.
"""

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from plumbing import figures, files, tables  # noqa: E402
from plumbing.stats import mean  # noqa: E402
from reward import PAPER  # noqa: E402

FORCED = ROOT / "data" / "results" / "forced_depth.json"
PRICES = (0.05, 0.1, 0.2, 0.3, 0.5)
HEAD = """# The claims, on the tiny world

Made by `python data/claims.py` from the reports of at most {seeds} seeds each; `RUNS` in it lists
the settings, and its functions the thresholds. EM / SD on held-out questions: the mean over seeds,
with the lowest and the highest behind it; where there is no such spread, one seed was measured, and
its verdict is a first look.
"""
BREAK_EVEN = """A flat price above these numbers, computed from chances that a policy does not know,
makes giving up the better choice:
"""
OFFSETS = {"0.1": (-9, 9), "0.2": (-12, -16), "0.3": (-26, -4)}  # of labels, in points
GROUPS = {"all": ("", "all")} | {need: ("hops", need) for need in "01234"}
GROUPS["hard"] = ("hops", "hard")
RUNS = {"autosearch": "", "outcome": "--reward outcome"}
for price in PRICES:
    RUNS[f"search-penalty-{price}"] = f"--reward search-penalty --search_cost {price}"
for name in ("no-base", "no-efficiency", "no-quality", "autosearch-released", "autosearch-t0"):
    RUNS[name] = f"--reward {name}"
RUNS["group-shortest"] = "--reward group-shortest"
for G in (4, 16):
    size = f"--num_generations {G} --num_questions {96 // G}"
    RUNS[f"group-shortest-G{G}"] = f"--reward group-shortest {size}"
    RUNS[f"autosearch-G{G}"] = size
# What is measured in another world too, made by make_tinyworld.py --seed 7: after training, and of
# the first also before
ELSEWHERE = ("autosearch", "outcome", "search-penalty-0.1", "search-penalty-0.3")
# Other cold starts, made from the shipped one: options of make_tiny_model.py, then of the runs
FLAT = ("autosearch", "outcome", "search-penalty-0.1", "search-penalty-0.3")
COLD_STARTS = {
    "rarely": ("--early_stop 0.03", "", FLAT),
    "no-famous": ("--no_famous", "", ("autosearch-t0",)),
    "deep": ("--deep", "--max_searches 6 --max_context 1000", FLAT),
}
for start, (_, options, names) in COLD_STARTS.items():
    for name in names:
        model = f"--model runs/model-{start}"
        world = "runs/world-deep" if start == "deep" else "data/tinyworld"
        paths = f"--questions {world}/train.jsonl --corpus {world}/train_corpus.jsonl"
        paths += f" --eval_questions {world}/dev.jsonl --eval_corpus {world}/dev_corpus.jsonl"
        RUNS[f"{start}-{name}"] = f"{RUNS[name]} {model} {paths} {options}"


# Training what is missing


def train_missing(names, seeds, jobs):
    """Train the runs that have no reports yet in runs/, so many at a time."""
    for start, (options, _, _) in COLD_STARTS.items():
        model = Path(f"runs/model-{start}")
        if any(name.startswith(start) for name in names) and not (model / "config.json").exists():
            script(f"data/make_tiny_model.py --start_from data/tiny_model {options} --out {model}")
    if any(name.startswith("deep") for name in names) and not Path("runs/world-deep").exists():
        script("data/make_tinyworld.py --deep --out runs/world-deep")
    wanted = [(name, seed) for name in names for seed in range(seeds)]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(partial(train_one, threads=max(1, os.cpu_count() // jobs)), wanted))
    for name, seed in wanted:
        if name in ELSEWHERE:
            measure_elsewhere(f"runs/{name}-seed{seed}", f"--run runs/{name}-seed{seed}")
    measure_elsewhere("runs", "--model data/tiny_model")


def measure_elsewhere(folder, policy):
    """Write the reports of a policy in another world beside the others, as other_world.json."""
    world, out = Path("runs/world-7"), Path(folder) / "other_world.json"
    if not world.exists():
        script(f"data/make_tinyworld.py --seed 7 --out {world}")
    for decoding, temperature in (("sampled", 1), ("greedy", 0)):
        if not out.exists() or decoding not in files.read_json(out):
            paths = f"--questions {world}/dev.jsonl --corpus {world}/dev_corpus.jsonl --out {out}"
            script(f"eval.py {policy} {paths} --temperature {temperature} --batch_size 128")


def train_one(run, threads):
    """Train a run of (name, seed), or go on with it."""
    name, seed = run
    folder = Path(f"runs/{name}-seed{seed}")
    report = folder / "eval.json"
    if report.exists() and "after" in files.read_json(report):
        return
    options = f"{RUNS[name]} --seed {seed} --name {folder.name} --eval_limit 1000"
    script(f"train.py --resume {folder}" if folder.exists() else f"train.py {options}", threads)
    print(f"{folder} done", flush=True)


def script(command, threads=None):
    """Run one of the project's scripts; its output goes to runs/claims.log."""
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    path, *options = command.split()
    Path("runs").mkdir(exist_ok=True)
    with open("runs/claims.log", "a") as log:
        words = [sys.executable, str(ROOT / path), *options]
        code = subprocess.run(words, env=environment, stdout=log, stderr=log).returncode
    files.check(code == 0, command, "failed; see runs/claims.log")


# Reading reports


class Reports:
    """The reports of runs that are there: {name: [{"before", "after"} a seed]}."""

    def __init__(self, folder, seeds):
        self.runs, self.seeds = {}, seeds
        forced = Path(folder) / "forced_depth.json"
        self.forced = files.read_json(forced if forced.exists() else FORCED)["forced"]
        for name in RUNS:
            paths = [Path(folder) / f"{name}-seed{seed}" / "eval.json" for seed in range(seeds)]
            for path in filter(Path.exists, paths):
                result, elsewhere = files.read_json(path), path.with_name("other_world.json")
                if elsewhere.exists():
                    result["elsewhere"] = files.read_json(elsewhere)
                if "after" in result:
                    self.runs.setdefault(name, []).append(result)
        before = Path(folder) / "other_world.json"
        if before.exists() and self.has("autosearch"):
            self.runs["autosearch"][0]["before, elsewhere"] = files.read_json(before)

    def has(self, name):
        return name in self.runs

    def rows(self, is_elsewhere):
        """(label, run, moment) of each line of a table of all runs, or of those measured in another
        world."""
        if is_elsewhere:
            first = ("before training", "autosearch", "before, elsewhere")
            others = [(f"`{name}`", name, "elsewhere") for name in ELSEWHERE]
            return [row for row in (first, *others) if self.reports(row[1], row[2])]
        rows = [("before training", "autosearch", "before")]
        for name in self.runs:
            for start, (_, _, names) in COLD_STARTS.items():
                if name == f"{start}-{names[0]}":
                    rows.append((f"{start}: before training", name, "before"))
            rows.append((f"`{name}`", name, "after"))
        return rows

    def reports(self, name, moment):
        """{"sampled", "greedy"} of a run for each seed that was measured at this moment."""
        return [result[moment] for result in self.runs.get(name, []) if moment in result]

    def values(self, name, group, metric, decoding, moment):
        """A number of a run for each seed; none for a group that its questions do not have."""
        groups = [tables.groups_of(found[decoding]) for found in self.reports(name, moment)]
        return [found[GROUPS[group]][metric] for found in groups if GROUPS[group] in found]

    def mean(self, name, group="all", metric="em", decoding="sampled", moment="after"):
        return mean(self.values(name, group, metric, decoding, moment))

    def text(self, name, group="all", decoding="sampled", moment="after"):
        """EM / SD, each with the lowest and the highest seed: 0.853 (0.846-0.862) / 2.15 (...)."""
        cells = []
        for metric, digits in (("em", 3), ("sd", 2)):
            found = self.values(name, group, metric, decoding, moment)
            if not found:
                return ""
            spread = f" ({min(found):.{digits}f}-{max(found):.{digits}f})" if len(found) > 1 else ""
            cells.append(f"{mean(found):.{digits}f}{spread}")
        return " / ".join(cells)


# The claims


def verdict(*facts):
    """holds: all facts are true; partly: some are; not here: none is."""
    return "holds" if all(facts) else "partly" if any(facts) else "not here"


def forced_depth(reports):
    """(a) Accuracy rises to a sufficient depth, then no more; over-searching goes on rising."""
    forced, facts, words = reports.forced, [], []
    for need in ("1", "2", "3"):
        at = [tables.groups_of(report)["hops", need] for report in forced.values()]
        em, deepest = [r["em"] for r in at], at[-1]
        facts.append(em[int(need)] >= max(em) - 0.05 and em[int(need) - 1] < em[int(need)] - 0.3)
        facts.append(deepest["osr"] > at[int(need)]["osr"] + 0.3)
        words.append(f"needs {need}: EM {', '.join(f'{value:.2f}' for value in em)}")
    text = f"{'; '.join(words)} at {', '.join(forced)} forced searches; OSR at 4: "
    osr = [tables.groups_of(forced["4"])["hops", need]["osr"] for need in ("1", "2", "3")]
    return verdict(*facts), text + ", ".join(f"{value:.2f}" for value in osr)


def depth_to_the_need(reports):
    """(c) `autosearch` brings depth to the need, from both sides, at equal or better EM."""
    facts, words = [], []
    for need in ("1", "2", "3"):
        start = reports.mean("autosearch", need, "sd", moment="before")
        end = reports.mean("autosearch", need, "sd")
        facts.append(abs(end - int(need)) < 0.15)
        words.append(f"needs {need}: {start:.2f} to {end:.2f} searches")
    ems = [reports.mean("autosearch", decoding=d, moment=m) for d, m in EM_PAIRS]
    facts.append(ems[1] >= ems[0] - 0.01 and ems[3] >= ems[2] - 0.01)
    text = f"temperature 1, {'; '.join(words)}; EM {ems[0]:.3f} to {ems[1]:.3f}"
    return verdict(*facts), f"{text}, greedy {ems[2]:.3f} to {ems[3]:.3f}"


def outcome_over_searches(reports):
    """(d) Training on the final answer (`outcome`) over-searches."""
    depth = [reports.mean("outcome", metric="sd", moment=m) for m in ("before", "after")]
    osr = [reports.mean("outcome", metric="osr", moment=m) for m in ("before", "after")]
    text = f"searches {depth[0]:.2f} to {depth[1]:.2f}, OSR {osr[0]:.2f} to {osr[1]:.2f}"
    return verdict(depth[1] > depth[0] + 0.2, osr[1] > osr[0] + 0.1), f"temperature 1: {text}"


def price_matters(reports):
    """(e) A flat penalty works if its price suits every question."""
    names = list(filter(reports.has, (f"search-penalty-{price}" for price in PRICES)))
    ours = reports.mean("autosearch"), reports.mean("autosearch", "hard")
    best = max(reports.mean(name) for name in names)
    hard = {name: reports.mean(name, "hard") for name in names}
    text = f"EM {ours[0]:.3f} (hard {ours[1]:.2f}) without a price; with one of "
    cells = [f"{n.split('-')[-1]}: {reports.mean(n):.3f} ({hard[n]:.2f})" for n in names]
    worst = min(reports.mean(name) for name in names)
    facts = best > ours[0] - 0.02, worst < ours[0] - 0.1, min(hard.values()) < ours[1] - 0.1
    return verdict(*facts), text + ", ".join(cells)


def price_in_a_deeper_world(reports):
    """(e) A price above the break-even of questions that can be solved: they are given up."""
    ems = {n: reports.mean(f"deep-{n}", "4") for n in ("autosearch", *ELSEWHERE[2:])}
    hard = {n: reports.mean(f"deep-{n}", "hard") for n in ems}
    text = "needs 4: EM " + ", ".join(f"`{name}` {em:.2f}" for name, em in ems.items())
    text += "; hard: " + ", ".join(f"{em:.2f}" for em in hard.values())
    lost = [found["autosearch"] - found["search-penalty-0.3"] for found in (ems, hard)]
    return verdict(lost[0] > 0.1, lost[1] > 0.1), text


def price_and_cold_start(reports):
    """(e) What a price of 0.3 costs depends on how often the cold start gives up."""
    lost, words = [], []
    for start in ("", "rarely-"):
        for decoding in ("sampled", "greedy"):
            names = (f"{start}autosearch", f"{start}search-penalty-0.3")
            ems = [reports.mean(name, "hard", decoding=decoding) for name in names]
            lost.append(ems[0] - ems[1])
            words.append(f"{start or 'shipped, '}{decoding} {ems[1]:.2f} against {ems[0]:.2f}")
    facts = lost[2] < lost[0] / 2, lost[3] < lost[1] / 2
    return verdict(*facts), "hard EM with 0.3 against `autosearch`: " + "; ".join(words)


def another_world(reports):
    """Nothing rests on the shipped world."""
    facts, words = [], []
    for need in ("1", "2", "3"):
        depth = reports.mean("autosearch", need, "sd", moment="elsewhere")
        facts.append(abs(depth - int(need)) < 0.15)
        words.append(f"needs {need}: {depth:.2f}")
    osr = reports.mean("outcome", metric="osr", moment="elsewhere")
    hard = [reports.mean(name, "hard", moment="elsewhere") for name in ELSEWHERE[::3]]
    facts += [osr > 0.7, hard[1] < hard[0] - 0.1]
    text = f"`autosearch`, {'; '.join(words)} searches; `outcome`, OSR {osr:.2f}; hard EM "
    return verdict(*facts), text + f"{hard[0]:.2f}, with a price of 0.3 {hard[1]:.2f}"


def ablation(name, what):
    """(f) What is lost without a part of the reward: more searches, or fewer right answers."""

    def claim(reports):
        lost = reports.mean("autosearch") - reports.mean(name)
        extra = reports.mean(name, metric="sd") - reports.mean("autosearch", metric="sd")
        text = f"EM {reports.text(name)} against {reports.text('autosearch')} (temperature 1)"
        is_so = extra > 0.3 if what == "depth" else lost > 0.03 or extra < -0.3
        return verdict(is_so), text

    return claim


def released_rules(reports):
    """(g) The released code's rules do as well as the paper's."""
    ems = [reports.mean(name) for name in ("autosearch-released", "autosearch")]
    osr = [reports.mean(name, metric="osr") for name in ("autosearch-released", "autosearch")]
    text = f"{reports.text('autosearch-released')} against {reports.text('autosearch')}"
    text += f"; OSR {osr[0]:.3f} against {osr[1]:.3f}"
    return verdict(ems[0] > ems[1] - 0.02, abs(osr[0] - osr[1]) < 0.05), text


def last_needless_search(reports):
    """(h) Asking before the first search too (`autosearch-t0`) removes the last needless search."""
    depths = [reports.mean(name, "0", "sd") for name in ("autosearch", "autosearch-t0")]
    penalties = [reports.mean(f"search-penalty-{price}", "0", "sd") for price in (0.1, 0.3)]
    text = f"needs 0: {depths[0]:.2f} searches with the paper's rules, {depths[1]:.2f} with t = 0"
    text += f"; with a flat price of 0.1 and 0.3: {penalties[0]:.2f} and {penalties[1]:.2f}"
    text += ". One search there is the paper's rule"
    return verdict(depths[1] < 0.2, depths[0] > 0.8), text


def depends_on_the_model(reports):
    """(b) The sufficient depth depends on the model: famous facts that it does not know."""
    before = [reports.mean(name, "0", "em", moment="before") for name in BOTH_STARTS]
    depths = [reports.mean(name, "0", "sd", moment="before") for name in BOTH_STARTS]
    after = [reports.mean(name, "0", "sd") for name in BOTH_STARTS]
    text = f"needs 0, asked at t = 0: searches {after[0]:.2f} where the model knows the fact, "
    text += f"{after[1]:.2f} where it was trained to search it (before: {depths[0]:.2f}, "
    text += f"{depths[1]:.2f}; EM {before[0]:.2f}, {before[1]:.2f})"
    return verdict(after[0] < 0.2, 0.8 < after[1] < 1.2), text


def answer_only(reports):
    """(i) A policy that is paid for self-answers makes a search that it does not need.
    `no-quality` still pays for the first right one, by the efficiency reward."""
    paid = reports.mean("autosearch", "0", "sd")
    names = ("no-quality", "search-penalty-0.1", "search-penalty-0.3")
    unpaid = {name: reports.mean(name, "0", "sd") for name in names}
    text = ", ".join(f"`{name}` {depth:.2f}" for name, depth in unpaid.items())
    text = f"searches where none is needed: `autosearch` {paid:.2f}; {text}"
    return verdict(*(depth < 0.5 for depth in unpaid.values())), text


def group_tells(reports):
    """(j) Self-answers tell more than the group's shortest right rollout does."""
    words, gains = [], []
    for size in ("-G4", "", "-G16"):
        if reports.has("group-shortest" + size) and reports.has("autosearch" + size):
            pair = [reports.mean(n + size, "hard") for n in ("autosearch", "group-shortest")]
            gains.append(pair[0] > pair[1] + 0.05)
            words.append(f"G = {size[2:] or 8}: hard EM {pair[0]:.2f} against {pair[1]:.2f}")
    text = f"{reports.text('group-shortest')} against {reports.text('autosearch')}; "
    return verdict(*gains), text + ", ".join(words)


BOTH_STARTS = ("autosearch-t0", "no-famous-autosearch-t0")
EM_PAIRS = [(d, m) for d in ("sampled", "greedy") for m in ("before", "after")]
CLAIMS = [  # what is claimed, the runs that it needs, who judges
    (
        "(a) Accuracy rises to a sufficient depth, then no more; over-searching goes on",
        [],
        forced_depth,
    ),
    ("(b) That depth depends on the model", list(BOTH_STARTS), depends_on_the_model),
    (
        "(c) `autosearch` brings depth to the need, from both sides, at no loss of EM",
        ["autosearch"],
        depth_to_the_need,
    ),
    ("(d) `outcome` over-searches", ["outcome"], outcome_over_searches),
    (
        "(e) A flat penalty works if its price suits every question",
        ["autosearch", "search-penalty-0.1", "search-penalty-0.3"],
        price_matters,
    ),
    (
        "(e) In a deeper world a price of 0.3, above the break-even of questions that need 4 "
        "searches, gives up on them",
        ["deep-autosearch", "deep-search-penalty-0.1", "deep-search-penalty-0.3"],
        price_in_a_deeper_world,
    ),
    (
        "(e) From a cold start that gives up less, a price of 0.3 costs less than half as much",
        ["rarely-autosearch", "rarely-search-penalty-0.3", "search-penalty-0.3"],
        price_and_cold_start,
    ),
    (
        "(f) Without the efficiency reward depth drifts up",
        ["autosearch", "no-efficiency"],
        ablation("no-efficiency", "depth"),
    ),
    (
        "(f) Without the quality reward depth or accuracy suffers",
        ["autosearch", "no-quality"],
        ablation("no-quality", "accuracy"),
    ),
    (
        "(f) Without the base reward depth or accuracy suffers",
        ["autosearch", "no-base"],
        ablation("no-base", "accuracy"),
    ),
    (
        "(g) The released code's rules do as well as the paper's",
        ["autosearch", "autosearch-released"],
        released_rules,
    ),
    (
        "(h) `autosearch-t0` removes the last needless search",
        ["autosearch", "autosearch-t0", "search-penalty-0.1", "search-penalty-0.3"],
        last_needless_search,
    ),
    (
        "(i) Where no search is needed, a policy not paid for self-answers answers at once",
        ["autosearch", "no-quality", "search-penalty-0.1", "search-penalty-0.3"],
        answer_only,
    ),
    (
        "(j) On hard questions self-answers tell more than the group's shortest right rollout",
        ["autosearch", "group-shortest"],
        group_tells,
    ),
    (
        "(c), (d), (e) in another world than the one trained and measured in",
        list(ELSEWHERE),
        another_world,
    ),
]


# Writing

TABLES = [  # decoding, heading, in another world?
    ("sampled", "temperature 1", False),
    ("greedy", "greedy", False),
    ("sampled", "temperature 1, in another world", True),
    ("greedy", "greedy, in another world", True),
]


def break_even(sure, draws, papers):
    """The price of a search at which going on is worth as much as giving up: the chance of a right
    answer over the searches to be expected, plus what the format reward pays for each. `sure`
    searches are left, then up to so many draws of a person's `papers`, one of which is right."""
    expected = sure + sum((papers - i) / papers for i in range(draws))
    return (draws / papers if draws else 1.0) / expected + PAPER.valid_search


def break_even_rows():
    """Break-even prices before the first search, then after each that did not bring the answer."""
    rows = []
    for need in (1, 2, 3, 4):
        rows.append((f"needs {need}", [break_even(left, 0, 7) for left in range(need, 0, -1)]))
    rows.append(("hard, one fact", [break_even(0, 4 - i, 7 - i) for i in range(4)]))
    two = [break_even(1, 3, 7)] + [break_even(0, 3 - i, 7 - i) for i in range(3)]
    return [*rows, ("hard, two facts", two)]


def markdown(reports):
    """All claims with their verdicts, then prices and all runs, as a page."""
    lines = [HEAD.format(seeds=reports.seeds), "| claim | verdict | numbers |", "|---|---|---|"]
    for text, needed, judge in CLAIMS:
        missing = [name for name in needed if not reports.has(name)]
        if judge is another_world:
            missing = [name for name in needed if not reports.reports(name, "elsewhere")]
        said, numbers = ("not measured", ", ".join(missing)) if missing else judge(reports)
        lines.append(f"| {text} | **{said}** | {numbers} |")
    lines += ["", BREAK_EVEN, "| break-even price | before the first search, then after each |"]
    lines.append("|---|---|")
    for text, prices in break_even_rows():
        lines.append(f"| {text} | {', '.join(f'{price:.2f}' for price in prices)} |")
    for decoding, title, is_elsewhere in TABLES:
        lines += ["", f"| EM / searches, {title} | seeds | {' | '.join(GROUPS)} | OSR |"]
        lines.append("|---" * (len(GROUPS) + 3) + "|")
        for label, name, moment in reports.rows(is_elsewhere):
            how = {"decoding": decoding, "moment": moment}
            cells = [reports.text(name, group, **how) for group in GROUPS]
            osr = reports.mean(name, metric="osr", **how)
            seeds = len(reports.reports(name, moment))
            lines.append(f"| {label} | {seeds} | {' | '.join(cells)} | {osr:.3f} |")
    return "\n".join(lines) + "\n"


def plot_prices(reports, path):
    """EM against searches: the flat penalty by its price, and what needs none."""
    title = "Exact match against searches, temperature 1: a flat price of a search, and AutoSearch"
    priced = [(f"search-penalty-{price}", f"{price:g}") for price in PRICES]
    priced = [("outcome", "0"), *[pair for pair in priced if reports.has(pair[0])]]
    points = [("before training", "autosearch", "before", "o", "#555555")]
    points.append(("autosearch", "autosearch", "after", "s", figures.COLOURS[0]))
    with figures.figure_of(path, 2, (4.6, 3.6), title, "exact match (EM)", sharey=False) as axes:
        for ax, group in zip(axes, ("all", "hard")):
            x = [reports.mean(name, group, "sd") for name, _ in priced]
            y = [reports.mean(name, group) for name, _ in priced]
            style = {"color": figures.COLOURS[1], "marker": "o", "linewidth": 1}
            ax.plot(x, y, label="flat penalty, by its price (0: outcome)", **style)
            for depth, em, (_, price) in zip(x, y, priced):
                offset = OFFSETS.get(price, (6, -11))
                ax.annotate(price, (depth, em), offset, textcoords="offset points")
            for label, name, moment, marker, colour in points:
                at = [reports.mean(name, group, metric, moment=moment) for metric in ("sd", "em")]
                ax.plot(*at, marker, color=colour, markersize=10, label=label)
            ax.set(
                title=f"{group} questions", xlabel="searches per question (SD)", xlim=(-0.3, 4.3)
            )
            ax.set_ylim(bottom=-0.03)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", default="data/results", help="folder of the runs")
    parser.add_argument("--train", action="store_true", help="train what is missing in runs/")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), help="train these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="runs trained at a time")
    args = parser.parse_args(arguments)
    for option in ("seeds", "jobs"):
        number = getattr(args, option)
        files.check(number > 0, f"--{option} {number}", "must be 1 or more")
    if args.train:
        files.check(args.reports == "runs", f"--reports {args.reports}", "--train needs runs")
        train_missing(args.only, args.seeds, args.jobs)
    folder, reports = Path(args.reports), Reports(args.reports, args.seeds)
    for name in ("autosearch", "outcome"):
        files.check(reports.has(name), folder, f"no reports of {name}; --train makes them")
    files.write_text(folder / "claims.md", markdown(reports))
    plot_prices(reports, folder / "prices.png")
    print(f"{folder / 'claims.md'}, {folder / 'prices.png'}")


if __name__ == "__main__":
    files.run_script("claims.py", main)

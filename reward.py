"""What a trajectory is worth: AutoSearch's rewards (arXiv 2604.17337), step by step, in plain Python.

How the default rules, `PAPER`, depart from the paper and from the authors' released code:

 1. The paper gives formulas; the constants are the released code's. Each has one home, a field of `Weights`.
 2. Where the released code does other things (over-search wipes out the outcome reward, efficiency follows the final
    answer instead of t_c, ...), the paper holds; `RELEASED` is this same code with the last fields of `Weights` set.
 3. Answers and queries are read from what the policy wrote in that turn, never from prompt or passages, as the released
    code does, and not from an `<information>` block that the policy made up.
 4. A search with an empty query is invalid, and so is a step with one of our tags inside another one.
 5. Normalising (SQuAD, Search-R1: lower case, no punctuation, no articles) also composes accents and drops Unicode's
    punctuation (en dash, curly apostrophe). An answer of articles only ("A") stays; an empty one matches nothing.
 6. No departure, but it matters: without a search there is no self-answer, so t_c = -1, no efficiency, no quality. A
    right answer earns 1.1 without a search and up to 2.3 with one (released: 2.475), so the policy is never taught to
    answer from memory. "autosearch-t0" (ours) closes this hole: the policy is also asked before its first search.

A trajectory has search steps t = 1..n and an answer step n + 1. The file reads from top to bottom: weights, answers,
parsing, format, t_c, efficiency, quality, and `score`, which puts them together.
"""

import math
import re
import string
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate


@dataclass(frozen=True)
class Weights:
    """Every constant of the rewards (source: the released code), and the switches by which the variants differ."""

    about: str = "the paper's rules: format + outcome + efficiency + quality"

    # One coefficient for each reward that `Score.parts` names; 0 switches it off.
    format: float = 1.0
    outcome: float = 1.0
    efficiency: float = 1.0
    quality: float = 1.0

    # Base reward, format
    valid_search: float = 0.025
    invalid_search: float = -0.025  # also for a query that repeats an earlier one
    valid_answer: float = 0.1
    invalid_answer: float = -0.5
    repeat_cosine: float = 0.8  # a query repeats another above this cosine of their TF-IDF vectors

    # Efficiency reward, per search step
    explore: float = 0.0125  # t_c < 0: no intermediate answer was right, keep searching
    effective_budget: float = 0.2  # 0 < t <= t_c: effective_budget / t_c - effective_slope
    effective_slope: float = 0.025
    over_search: float = -0.05  # t > t_c

    # Beyond the paper and for the baselines
    ask_before_search: bool = False  # the policy is asked at t = 0 too, so that t_c may be 0
    search_cost: float = 0.0  # flat cost of each search
    information_gain: float = 0.0  # StepSearch: share of the supporting passages that the step finds
    redundancy: float = 0.0  # StepSearch: share of the step's passages that were seen before
    hotpot_rules: bool = False  # F1 of yes / no answers is all or nothing

    # What the released code does differently, all off by default
    over_search_erases: bool = False  # right before the last search: every later step is worth over_search, no more
    efficiency_by_outcome: bool = False  # the final answer decides the regime, and the answer step is paid too
    f1_digits: int | None = None  # F1 is rounded; quality also stops at t_c, unseen, as F1 is 1 by then
    first_alias_only: bool = False  # intermediate answers are compared with the first gold alias only
    whole_text_self_answer: bool = False  # a self-answer without tags counts as its whole text (extract_self_answer)
    empty_query_is_valid: bool = False  # <search></search> is well formed, but repeats any earlier query


PAPER = Weights()
RELEASED = replace(
    PAPER, about="the released code's rules, where they differ from the paper's", over_search_erases=True,
    efficiency_by_outcome=True, f1_digits=4, first_alias_only=True, whole_text_self_answer=True,
    empty_query_is_valid=True)
_OUTCOME = replace(PAPER, about="Search-R1: final EM and format", efficiency=0.0, quality=0.0)

REWARDS = {
    "autosearch": PAPER,
    "autosearch-released": RELEASED,
    "autosearch-t0": replace(PAPER, ask_before_search=True, about="the paper's rules, asked at t = 0 too"),
    "no-base": replace(PAPER, format=0.0, outcome=0.0, about="ablation: without the base reward (format, outcome)"),
    "no-efficiency": replace(PAPER, efficiency=0.0, about="ablation: without the efficiency reward"),
    "no-quality": replace(PAPER, quality=0.0, about="ablation: without the quality reward"),
    "outcome": _OUTCOME,
    "outcome-no-format": replace(_OUTCOME, format=0.0, about="Search-R1: final EM alone"),
    "search-penalty": replace(_OUTCOME, search_cost=0.1, about="final EM and format minus a flat cost per search"),
    "stepsearch": replace(_OUTCOME, information_gain=1.0, redundancy=1.0, about="StepSearch: new minus seen passages"),
}


@lru_cache(maxsize=1024)  # a group shares its golds, a trajectory its queries
def normalize_answer(text, keep_lone_articles=True):
    """`text` in lower case and NFC, without punctuation (ASCII's, and Unicode's categories P*) and articles.

    The SQuAD / Search-R1 convention, but a text of nothing but articles keeps them, unless `keep_lone_articles` is off.

    >>> normalize_answer("The 1939–1945  war"), normalize_answer("3,000"), normalize_answer("A"), normalize_answer("?")
    ('19391945 war', '3000', 'a', '')
    """
    text = unicodedata.normalize("NFC", text.lower())
    text = "".join(c for c in text if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    words = re.sub(r"\b(a|an|the)\b", " ", text).split()
    return " ".join(words or text.split() if keep_lone_articles else words)


def _aliases(golden_answers):
    """The normalised gold answers without the blank ones; a single answer may come as a string, None as no answer."""
    golden_answers = [golden_answers] if isinstance(golden_answers, str) else golden_answers or []
    return [alias for alias in map(normalize_answer, golden_answers) if alias]


def exact_match(prediction, golden_answers):
    """EM: 1.0 if the normalised prediction equals a normalised gold alias, else 0.0.

    `prediction`: str, or None (no answer), which matches nothing; nor does an empty one. `golden_answers`: str or list
    of str; blank aliases are ignored. Source: SQuAD's evaluation script, as in Search-R1.

    >>> exact_match("new york city.", ["NYC", "New York City"]), exact_match("", "The"), exact_match("A", "A")
    (1.0, 0.0, 1.0)
    """
    return float(prediction is not None and normalize_answer(prediction) in _aliases(golden_answers))


def f1(prediction, golden_answers, hotpot_rules=False):
    """Word-level F1 (0 to 1) of the normalised prediction, the best over the gold aliases; arguments as `exact_match`.

    `hotpot_rules`: yes, no and noanswer match in full or not at all (HotpotQA's evaluation script).

    >>> round(f1("Paris, France", "Paris"), 3), f1("yes it is", "yes", hotpot_rules=True)
    (0.667, 0.0)
    """
    prediction = normalize_answer(prediction or "")
    best = 0.0
    for alias in _aliases(golden_answers):
        if hotpot_rules and prediction != alias and {prediction, alias} & {"yes", "no", "noanswer"}:
            continue
        ours, gold = Counter(prediction.split()), Counter(alias.split())  # precision: common / ours, recall: / gold
        best = max(best, 2 * (ours & gold).total() / (ours.total() + gold.total()))
    return best


TAG = r"</?(?:think|search|answer|information)>"
INNER = rf"([^<]*(?:(?!{TAG})<[^<]*)*)"  # any text without one of our tags
ACTION = re.compile(rf"<(search|answer)>{INNER}</\1>")
STEP = re.compile(rf"\s*<think>{INNER}</think>\s*<(search|answer)>{INNER}</\2>\s*")


def _own_words(text):
    """`text` without the passages that the policy made up; a block left open hides the rest, or that of its thought."""
    head, close, tail = text.rpartition("</information>")
    closed = re.sub(r"(?s)<information>.*?</information>", " ", head + close)
    return closed + re.sub(r"(?s)<information>.*?(?=</think>|\Z)", " ", tail)


def parse_action(text):
    """The first closed action in a turn's policy-written text: ("search", query), ("answer", answer) or (None, None).

    A search without a query is no action. `text` may be a turn that is still being written. The content never holds one
    of our tags, and nothing inside a policy-written `<information>` block is read.

    >>> parse_action("<think> go on </think> <search> mouth of the Nile </search>")
    ('search', 'mouth of the Nile')
    >>> parse_action("<answer>X</answer><search>q</search>"), parse_action("<think>a</think><search> </search>")
    (('answer', 'X'), (None, None))
    """
    for match in ACTION.finditer(_own_words(text)):
        kind, content = match[1], match[2].strip()
        if content or kind == "answer":
            return kind, content
    return None, None


def extract_self_answer(text, whole_text_if_untagged=False):
    """The answer in the raw text of a self-answer; None if there is none, or if `text` is None (not asked).

    `whole_text_if_untagged` (`Weights.whole_text_self_answer`): a text without tags is the answer as a whole.

    >>> extract_self_answer("<think>t</think><answer> Paris </answer>"), extract_self_answer("Paris")
    ('Paris', None)
    """
    if match := re.search(rf"<answer>{INNER}</answer>", _own_words(text or "")):
        return match[1].strip()
    if text is None or not whole_text_if_untagged:
        return None
    return re.sub("[<>]", "", text).strip()  # the same for EM and F1, and no half-written tag gets out


def is_valid_step(text, last, empty_query_is_valid=False):
    """Whether a turn is exactly one <think>...</think> and one <search>...</search> (<answer> if it is the `last`).

    Blanks around the tags are fine, any other text outside them is not, nor one of our tags inside.

    >>> is_valid_step("<think>a</think> <search>q</search>", last=False), is_valid_step("<answer>x</answer>", last=True)
    (True, False)
    """
    match = STEP.fullmatch(text)
    right_kind = match is not None and match[2] == ("answer" if last else "search")
    return right_kind and (last or empty_query_is_valid or bool(match[3].strip()))


def is_repeat(query, earlier_queries, threshold=PAPER.repeat_cosine):
    """Whether a query repeats an earlier one: cosine of the TF-IDF vectors of normalised queries above `threshold`.

    TF-IDF as scikit-learn's TfidfVectorizer has it by default, fitted on all these queries: tokens of two or more word
    characters, idf = ln((1 + N) / (1 + df)) + 1. As in the released code, a query that normalises to nothing repeats
    any other, as does one when none has a usable token; an earlier "nothing" is compared as the word "none".

    >>> is_repeat("country of the Nile", ["Nile country of"]), is_repeat("country of the Nile", ["capital of France"])
    (True, False)
    """
    if not earlier_queries:
        return False
    query, *earlier = (normalize_answer(text, keep_lone_articles=False) for text in (query, *earlier_queries))
    counts = [Counter(re.findall(r"\w\w+", text or "none")) for text in (query, *earlier)]
    if not query or not any(counts):
        return True
    df = Counter(token for count in counts for token in count)
    idf = {token: math.log((1 + len(counts)) / (1 + df[token])) + 1 for token in df}
    ours, *others = ({token: n * idf[token] for token, n in count.items()} for count in counts)
    dots = [sum(value * other.get(token, 0.0) for token, value in ours.items()) for other in others]
    return any(dot > threshold * math.hypot(*ours.values()) * math.hypot(*other.values())
               for dot, other in zip(dots, others, strict=True))


def valid_steps(steps, weights=PAPER):
    """A bool per step: well formed, and no repeat of an earlier query (of a valid step or not).

    >>> valid_steps(["<think>a</think><search>mouth of the Nile</search>"] * 2 + ["<think>b</think><answer>c</answer>"])
    [True, False, True]
    """
    valid, queries = [], []
    for t, text in enumerate(steps, start=1):
        last = t == len(steps)
        kind, content = parse_action(text)
        query = content if kind == "search" else ""
        repeats = not last and is_repeat(query, queries, weights.repeat_cosine)
        valid.append(is_valid_step(text, last, weights.empty_query_is_valid) and not repeats)
        if query or weights.empty_query_is_valid:
            queries.append(query)
    return valid


def sufficient_depth(self_answers, golden_answers, self_answer_0=None):
    """t_c = min { t : EM(a_inter[t], a_gold) = 1 }, or -1 if no intermediate answer is right: equation (6).

    `self_answers[t - 1]` is a_inter[t]; None where the policy was not asked. `self_answer_0`: asked before any search.

    >>> sufficient_depth(["Rome", None, "Paris"], ["Paris"]), sufficient_depth(["Rome"], ["Paris"])
    (3, -1)
    """
    answers = enumerate([self_answer_0, *self_answers])
    return next((t for t, answer in answers if exact_match(answer, golden_answers)), -1)


def efficiency_rewards(valid, t_c, weights=PAPER, em=0.0):
    """The efficiency reward of every step (a list as long as `valid`); a trajectory's sum peaks at n = t_c.

    Search step t earns explore (t_c < 0) or effective_budget / t_c - effective_slope (t <= t_c), both only if valid, or
    over_search (t > t_c). With t_c = 0 ("autosearch-t0") the whole budget is paid on the first step, whatever that is.
    `em`, of the final answer, matters to the released rules only.

    >>> [round(r, 4) for r in efficiency_rewards([True, True, True, True], t_c=2)]
    [0.075, 0.075, -0.05, 0.0]
    """
    n = len(valid) - 1
    paid = range(1, n + 1)
    if weights.efficiency_by_outcome and n > 0:
        paid = [*paid, n]  # the answer step is paid like the last search
        if em and 0 <= t_c < n:
            valid = list(accumulate(valid, min))  # the released code's walk ends at the first invalid step
        else:
            t_c = n if em else -1
    rewards = [weights.effective_budget if t_c == 0 else 0.0] + [0.0] * n
    for i, t in enumerate(paid):
        if t_c < 0:
            rewards[i] += weights.explore * valid[i]
        elif t <= t_c:
            rewards[i] += (weights.effective_budget / t_c - weights.effective_slope) * valid[i]
        else:
            rewards[i] += weights.over_search
    return rewards


def quality_rewards(self_answers, golden_answers, weights=PAPER, self_answer_0=None):
    """The quality reward of every step: max(0, F1(a_inter[t], a_gold) - best earlier F1), the first best being 0.

    A list of n + 1; the answer step's is 0. What `self_answer_0` gains is paid on the first step, whatever it is.

    >>> [round(r, 3) for r in quality_rewards(["Nile river", "the Nile", "the Nile"], "Nile")]
    [0.667, 0.333, 0.0, 0.0]
    """
    rewards, best = [0.0] * (len(self_answers) + 1), 0.0
    for t, answer in enumerate([self_answer_0, *self_answers]):
        quality = f1(answer, golden_answers, weights.hotpot_rules)
        if weights.f1_digits is not None:
            quality = round(quality, weights.f1_digits)
        rewards[max(t - 1, 0)] += max(0.0, quality - best)
        best = max(best, quality)
    return rewards


def information_rewards(passages, supporting_titles):
    """StepSearch per search step: (share of supporting titles first found here, share of passages seen before).

    `passages`: per step a list of {"title", "text"}. Titles are compared; the original (arXiv 2505.15107) compares
    texts.

    >>> nile, rome = {"title": "Nile", "text": "A river."}, {"title": "Rome", "text": "A city."}
    >>> information_rewards([[nile], [nile, rome]], ["Nile", "Egypt"])
    [(0.5, 0.0), (0.0, 0.5)]
    """
    missing = {normalize_answer(title) for title in supporting_titles}
    needed, seen, rewards = len(missing), set(), []
    for retrieved in passages:
        found = missing & {normalize_answer(passage["title"]) for passage in retrieved}
        texts = [(passage["title"], passage["text"]) for passage in retrieved]
        rewards.append((len(found) / max(needed, 1), sum(text in seen for text in texts) / max(len(texts), 1)))
        missing -= found
        seen.update(texts)
    return rewards


@dataclass
class Score:
    """A scored trajectory of n + 1 steps; `str()` gives its table."""

    parts: list[dict[str, float]]  # n + 1 dicts with the keys format, outcome, efficiency, quality
    t_c: int  # sufficient depth, -1: no intermediate answer was right
    em: float  # of the final answer
    f1: float
    steps: list[float] = field(init=False)  # the parts' sum, per step
    total: float = field(init=False)

    def __post_init__(self):
        self.steps = [sum(part.values()) for part in self.parts]
        self.total = sum(self.steps)

    def __str__(self):
        sums = {name: sum(part[name] for part in self.parts) for name in self.parts[0]}
        lines = ["step  " + "".join(f"{name:>11}" for name in (*sums, "total"))]
        names, totals = [*range(1, len(self.parts)), "answer", "sum"], [*self.steps, self.total]
        for name, part, total in zip(names, [*self.parts, sums], totals, strict=True):
            lines.append(f"{name!s:6}" + "".join(f"{value + 0.0:11.4f}" for value in (*part.values(), total)))
        return "\n".join([*lines, f"t_c = {self.t_c}   EM = {self.em:.0f}   F1 = {self.f1:.3f}"])


def score(steps, golden_answers, self_answers, weights=PAPER, *, self_answer_0=None, passages=None,
          supporting_titles=None):
    """Score one trajectory: base + efficiency + quality, per step and named.

    `steps`: n + 1 texts, what the policy wrote in each turn; the last is the answer step, all before are search steps,
    valid or not. `golden_answers`: str or list of str; None or [] where none is known, which nothing matches.
    `self_answers`: n intermediate answers, extracted, None where the policy was not asked. `self_answer_0`: the one
    before any search, used with `weights.ask_before_search` only. `passages` (a list of {"title", "text"} per step; the
    answer step's may be missing) and `supporting_titles` are needed by "stepsearch". Raises ValueError where a length
    or a needed argument is wrong.

    >>> print(score(["<think>a</think><search>q</search>", "<think>b</think><answer>Nile</answer>"], "Nile", ["Nile"]))
    step       format    outcome efficiency    quality      total
    1          0.0250     0.0000     0.1750     1.0000     1.2000
    answer     0.1000     1.0000     0.0000     0.0000     1.1000
    sum        0.1250     1.0000     0.1750     1.0000     2.3000
    t_c = 1   EM = 1   F1 = 1.000
    """
    n = len(steps) - 1
    if n < 0 or len(self_answers) != n:
        raise ValueError(f"{n + 1} steps, {len(self_answers)} self_answers: needed are n + 1 and n (n >= 0)")
    kind, final = parse_action(steps[-1])
    final = final if kind == "answer" else None
    em = exact_match(final, golden_answers)

    golds = _aliases(golden_answers)[:1] if weights.first_alias_only else golden_answers
    answer_0 = self_answer_0 if weights.ask_before_search else None
    t_c = sufficient_depth(self_answers, golds, answer_0)
    valid = valid_steps(steps, weights)
    efficiency = efficiency_rewards(valid, t_c, weights, em)
    quality = quality_rewards(self_answers, golds, weights, answer_0)

    parts = [{"format": weights.format * (weights.valid_search if ok else weights.invalid_search), "outcome": 0.0,
              "efficiency": weights.efficiency * e, "quality": weights.quality * q}
             for ok, e, q in zip(valid, efficiency, quality, strict=True)]
    parts[-1]["format"] = weights.format * (weights.valid_answer if valid[-1] else weights.invalid_answer)
    parts[-1]["outcome"] = weights.outcome * em

    if weights.over_search_erases and 0 <= t_c < n:
        for part in parts[t_c:]:
            part.update(format=0.0, outcome=0.0, efficiency=weights.efficiency * weights.over_search, quality=0.0)
    for text, part in zip(steps[:-1], parts, strict=False):
        part["efficiency"] -= weights.search_cost * (parse_action(text)[0] == "search")
    if weights.information_gain or weights.redundancy:
        if supporting_titles is None or passages is None or len(passages) not in (n, n + 1):
            raise ValueError(f"stepsearch needs supporting_titles (metadata) and the passages of all {n} search steps")
        for part, (gain, known) in zip(parts, information_rewards(passages[:n], supporting_titles), strict=False):
            part["quality"] += weights.information_gain * gain
            part["efficiency"] -= weights.redundancy * known
    return Score(parts, t_c, em, f1(final, golden_answers, weights.hotpot_rules))

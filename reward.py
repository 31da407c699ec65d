"""What a trajectory is worth: AutoSearch's rewards (arXiv 2604.17337), step by step, no torch.

How the default rules, `PAPER`, depart from the paper and from the authors' released code:
1. The paper gives formulas; the constants are the released code's, each a field of `Weights`.
2. Where the released code differs, the paper holds; `RELEASED` stands in the last section.
3. Only what the policy wrote in a turn is read: no prompt, no passage, no made-up passage.
4. A search with an empty query is invalid, and so is a step with one of our tags inside another.
5. Normalising also composes accents and drops all punctuation; "A" stays, "" matches nothing.
6. No departure, but it matters: without a search there is no self-answer, and a right answer earns
   1.1; with one, up to 2.3 (released: 2.475). Our "autosearch-t0" closes the hole: asked at t = 0.
"""

import math
import re
import string
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache
from unicodedata import category, normalize


@dataclass(frozen=True)
class Weights:
    """Every constant of the rewards (source: the released code), and what the variants change."""

    about: str = "the paper's rules: format + outcome + efficiency + quality"
    # One coefficient for each reward that `Score.parts` names; 0 switches it off.
    format: float = 1.0
    outcome: float = 1.0
    efficiency: float = 1.0
    quality: float = 1.0
    valid_search: float = 0.025  # base reward, format, of a step
    invalid_search: float = -0.025  # also for a query that repeats an earlier one
    valid_answer: float = 0.1
    invalid_answer: float = -0.5
    repeat_cosine: float = 0.8  # a query repeats another above this cosine of their TF-IDF vectors
    explore: float = 0.0125  # efficiency of a step: t_c < 0, nothing was right, keep searching
    effective_budget: float = 0.2  # 0 < t <= t_c: effective_budget / t_c - effective_slope
    effective_slope: float = 0.025
    over_search: float = -0.05  # t > t_c
    # Variants
    ask_before_search: bool = False  # the policy is asked at t = 0 too, so that t_c may be 0
    search_cost: float = 0.0  # flat cost of each search
    information_gain: float = 0.0  # StepSearch: share of the supporting titles that a step finds
    redundancy: float = 0.0  # StepSearch: share of a step's passages that were seen before
    extra_search: float = 0.0  # for each search more than the group's shortest right rollout made
    extra_search_cap: float = 0.3  # the most that is lost so
    released: bool = False  # the released code's reading of all of the above


PAPER = Weights()
RELEASED = replace(PAPER, released=True, about="the released code's rules, where they differ")
OUTCOME = replace(PAPER, efficiency=0.0, quality=0.0, about="Search-R1: final EM and format")
STEPSEARCH = replace(OUTCOME, information_gain=1.0, redundancy=1.0, about="StepSearch: new - seen")
REWARDS = {
    "autosearch": PAPER,
    "autosearch-released": RELEASED,
    "autosearch-t0": replace(PAPER, ask_before_search=True, about="paper's, asked at t = 0 too"),
    "group-shortest": replace(OUTCOME, extra_search=0.1, about="outcome, the shortest right wins"),
    "no-base": replace(PAPER, format=0.0, outcome=0.0, about="ablation: no format, no outcome"),
    "no-efficiency": replace(PAPER, efficiency=0.0, about="ablation: no efficiency reward"),
    "no-quality": replace(PAPER, quality=0.0, about="ablation: no quality reward"),
    "outcome": OUTCOME,
    "outcome-no-format": replace(OUTCOME, format=0.0, about="Search-R1: final EM alone"),
    "search-penalty": replace(OUTCOME, search_cost=0.1, about="outcome minus a cost per search"),
    "stepsearch": STEPSEARCH,
}
HELP = "; ".join(f"{name}: {weights.about}" for name, weights in REWARDS.items())


# For `str.translate`: fillers, variation selectors and format characters (joiners, soft hyphens,
# direction marks) go, controls become blanks.
GLYPHLESS = dict.fromkeys([0x34F, 0x115F, 0x1160, 0x3164, 0xFFA0, *range(0xFE00, 0xFE10)])
GLYPHLESS |= dict.fromkeys(range(0xE0000, 0xE1000))
for code in range(0x20000):
    if category(chr(code)) in ("Cc", "Cf", "Zl", "Zp"):
        GLYPHLESS[code] = None if category(chr(code)) == "Cf" else " "


def visible(text):
    """`text` as scoring, showing and searching see it: less what no eye can see."""
    return text.translate(GLYPHLESS)


@lru_cache(maxsize=1024)  # a group shares its golds, a trajectory its queries
def normalize_answer(text, keep_lone_articles=True):
    """What is `visible` in lower case and NFC, without punctuation (also Unicode's) and articles.
    >>> normalize_answer("The 1939–1945  war"), normalize_answer("A"), normalize_answer("?")
    ('19391945 war', 'a', '')
    """
    text = normalize("NFC", visible(text).lower())
    text = "".join(c for c in text if c not in string.punctuation and category(c)[0] != "P")
    words = re.sub(r"\b(a|an|the)\b", " ", text).split()
    return " ".join(words or (text.split() if keep_lone_articles else []))


def normalized_golds(golden_answers):
    """The gold answers (a string, a list, or None), normalised, without the blank ones."""
    golds = [golden_answers] if isinstance(golden_answers, str) else golden_answers or []
    return [gold for gold in map(normalize_answer, golds) if gold]


def exact_match(prediction, golden_answers):
    """EM: 1.0 if the normalised prediction equals a gold alias; None (no answer) and "" match none.
    >>> exact_match("new york city.", ["NYC", "New York City"]), exact_match("", "The")
    (1.0, 0.0)
    """
    return float(normalize_answer(prediction or "") in normalized_golds(golden_answers))


def f1(prediction, golden_answers, hotpot_rules=False):
    """Word-level F1: 2 * common / (words of prediction + words of gold), the best over the aliases.
    hotpot_rules: yes, no and noanswer match in full or not at all (HotpotQA's evaluation)."""
    prediction, best = normalize_answer(prediction or ""), 0.0
    for alias in normalized_golds(golden_answers):
        if hotpot_rules and prediction != alias and {prediction, alias} & {"yes", "no", "noanswer"}:
            continue
        ours, gold = Counter(prediction.split()), Counter(alias.split())
        best = max(best, 2 * (ours & gold).total() / (ours.total() + gold.total()))
    return best


TAG_NAMES = ("think", "search", "answer", "information")
TAGS = tuple(f"<{slash}{name}>" for name in TAG_NAMES for slash in ("", "/"))
# Any text without one of our tags: "a < b </i>", but not "a <think> b"
INNER = rf"([^<]*(?:(?!{'|'.join(TAGS)})<[^<]*)*)"
ACTION = re.compile(rf"<(search|answer)>{INNER}</\1>")
STEP = re.compile(rf"\s*<think>{INNER}</think>\s*<(search|answer)>{INNER}</\2>\s*")


def own_words(text):
    """`text` less the passages that the policy made up; an open one hides the rest of its thought.
    >>> own_words("<think>a<information>b</think><information>c</information><answer>d</answer>")
    '<think>a <answer>d</answer>'
    """
    head, close, tail = text.rpartition("</information>")
    closed = re.sub(r"(?s)<information>.*?</information>", " ", head + close)
    return closed + re.sub(r"(?s)<information>.*?(?=</think>|\Z)", " ", tail)


def parse_action(text):
    """The first closed action of a turn: ("search", query), ("answer", answer) or (None, None).
    A search without a query is no action. The content never holds one of our tags.
    >>> parse_action("<answer> X </answer><search>q</search>"), parse_action("<search> </search>")
    (('answer', 'X'), (None, None))
    """
    for match in ACTION.finditer(own_words(text)):
        kind, content = match[1], match[2].strip()
        if content or kind == "answer":
            return kind, content
    return None, None


def extract_self_answer(text):
    """The answer in a self-answer's raw text; None if there is none, or for None (not asked)."""
    match = re.search(rf"<answer>{INNER}</answer>", own_words(text or ""))
    return match[1].strip() if match else None


def is_valid_step(text, last):
    """Whether a turn is one <think> and one <search> block, <answer> in the `last`, and no more."""
    match = STEP.fullmatch(text)
    kind, content = (match[2], match[3].strip()) if match else (None, "")
    return kind == "answer" if last else kind == "search" and content != ""


def tfidf(texts):
    """TF-IDF vectors {token: count * (ln((1 + N) / (1 + df)) + 1)} of texts, as scikit-learn's."""
    counts = [Counter(re.findall(r"\w\w+", text)) for text in texts]
    df = Counter(token for count in counts for token in count)
    idf = {token: math.log((1 + len(texts)) / (1 + number)) + 1 for token, number in df.items()}
    return [{token: number * idf[token] for token, number in count.items()} for count in counts]


def cosine(a, b):
    """Cosine of two vectors {token: weight}; 0 where one of them is empty."""
    dot = sum(weight * b.get(token, 0.0) for token, weight in a.items())
    norms = math.hypot(*a.values()) * math.hypot(*b.values())
    return dot / norms if norms else 0.0


def is_repeat(query, earlier_queries, threshold=PAPER.repeat_cosine):
    """Whether a query repeats an earlier one: cosine of their TF-IDF vectors above `threshold`.
    As in the released code, a query that normalises to nothing repeats any other, as does one when
    none has a usable token; an earlier "nothing" is compared as the word "none"."""
    if not earlier_queries:
        return False
    texts = [normalize_answer(text, keep_lone_articles=False) for text in [query, *earlier_queries]]
    vectors = tfidf([text or "none" for text in texts])
    if not texts[0] or not any(vectors):
        return True
    return any(cosine(vectors[0], earlier) > threshold for earlier in vectors[1:])


def valid_steps(steps, weights=PAPER):
    """A bool per step: well formed, and no repeat of an earlier query (of a valid step or not)."""
    valid, queries = [], []
    for t, text in enumerate(steps, start=1):
        last = t == len(steps)
        ok = is_valid_step(text, last)
        kind, query = parse_action(text)
        if kind == "search" and not last:
            ok = ok and not is_repeat(query, queries, weights.repeat_cosine)
            queries.append(query)
        valid.append(ok)
    return valid


def format_rewards(valid, weights=PAPER):
    """The format reward of every step; the last one is the answer step."""
    rewards = [weights.valid_search if ok else weights.invalid_search for ok in valid[:-1]]
    return [*rewards, weights.valid_answer if valid[-1] else weights.invalid_answer]


def sufficient_depth(self_answers, golden_answers):
    """t_c = min { t : EM(a_inter[t], a_gold) = 1 }, or -1 if no self-answer is right: equation (6).
    >>> sufficient_depth(["Rome", None, "Paris"], ["Paris"]), sufficient_depth(["Rome"], ["Paris"])
    (3, -1)
    """
    for t, answer in enumerate(self_answers, start=1):
        if exact_match(answer, golden_answers) == 1:
            return t
    return -1


def efficiency_rewards(valid, t_c, weights=PAPER):
    """The efficiency reward of every step, the answer step's being 0; the sum peaks at n = t_c.
    >>> [round(r, 4) for r in efficiency_rewards([True, True, True, True], t_c=2)]
    [0.075, 0.075, -0.05, 0.0]
    """
    rewards = []
    for t, is_valid in enumerate(valid[:-1], start=1):
        if t_c < 0:  # never answerable: keep exploring
            rewards.append(weights.explore * is_valid)
        elif t <= t_c:  # effective search: worth more, the smaller t_c is
            rewards.append((weights.effective_budget / t_c - weights.effective_slope) * is_valid)
        else:  # over-search
            rewards.append(weights.over_search)
    return [*rewards, 0.0]


def quality_rewards(self_answers, golden_answers, measure=f1):
    """The quality reward of every step: max(0, F1(a_inter[t], a_gold) - best F1 before).
    >>> [round(r, 3) for r in quality_rewards(["Nile river", "the Nile", "the Nile"], "Nile")]
    [0.667, 0.333, 0.0, 0.0]
    """
    rewards, best = [], 0.0
    for answer in self_answers:
        quality = measure(answer, golden_answers)
        rewards.append(max(0.0, quality - best))
        best = max(best, quality)
    return [*rewards, 0.0]


@dataclass
class Score:
    """A scored trajectory of n + 1 steps; `str()` gives its table."""

    parts: list[dict[str, float]]  # n + 1 of {"format", "outcome", "efficiency", "quality"}
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
        lines = ["step  " + "".join(f"{name:>11}" for name in [*sums, "total"])]
        for name, part in zip([*range(1, len(self.parts)), "answer", "sum"], [*self.parts, sums]):
            values = [*part.values(), sum(part.values())]
            lines.append(f"{name!s:6}" + "".join(f"{value + 0.0:11.4f}" for value in values))
        return "\n".join([*lines, f"t_c = {self.t_c}   EM = {self.em:.0f}   F1 = {self.f1:.3f}"])


def score(steps, golden_answers, self_answers, weights=PAPER, self_answer_0=None, **evidence):
    """Score one trajectory: base (format, outcome) + efficiency + quality, per step and named.
    steps: n + 1 texts, what the policy wrote in each turn; the last is the answer step, all before
    are search steps, valid or not. golden_answers: str, list of str, or None where none is known.
    self_answers: n extracted answers, None where the policy was not asked. self_answer_0: the one
    before the first search, for "autosearch-t0". evidence: passages (a list for each step) and
    supporting_titles, for "stepsearch". Raises ValueError for lengths that do not fit.
    >>> steps = ["<think>a</think><search>q</search>", "<think>b</think><answer>Nile</answer>"]
    >>> print(score(steps, "Nile", ["Nile"]))
    step       format    outcome efficiency    quality      total
    1          0.0250     0.0000     0.1750     1.0000     1.2000
    answer     0.1000     1.0000     0.0000     0.0000     1.1000
    sum        0.1250     1.0000     0.1750     1.0000     2.3000
    t_c = 1   EM = 1   F1 = 1.000
    """
    n = len(steps) - 1
    if n < 0 or len(self_answers) != n:
        raise ValueError(f"{n + 1} steps need {n} self_answers, got {len(self_answers)} (n >= 0)")
    kind, answer = parse_action(steps[-1])
    answer = answer if kind == "answer" else None
    em = exact_match(answer, golden_answers)

    t_c = sufficient_depth(self_answers, golden_answers)
    valid = valid_steps(steps, weights)
    rewards = {
        "format": format_rewards(valid, weights),
        "outcome": [0.0] * n + [em],
        "efficiency": efficiency_rewards(valid, t_c, weights),
        "quality": quality_rewards(self_answers, golden_answers),
    }
    if weights.released and n:
        t_c = follow_released_code(rewards, steps, golden_answers, self_answers, weights)
    if weights.ask_before_search:
        t_c = count_t0(rewards, t_c, golden_answers, [self_answer_0, *self_answers], weights)

    parts = []
    for i in range(n + 1):
        parts.append({name: getattr(weights, name) * rewards[name][i] for name in rewards})
    for text, part in zip(steps[:-1], parts):
        if parse_action(text)[0] == "search":
            part["efficiency"] -= weights.search_cost
    if weights.information_gain or weights.redundancy:
        add_information(parts, weights, **evidence)
    return Score(parts, t_c, em, f1(answer, golden_answers))


def count_t0(rewards, t_c, golden_answers, self_answers, weights):
    """autosearch-t0: the self-answer at t = 0, here the first of all, counts, and its gain is paid
    on the first step. Changes `rewards`, as `follow_released_code`, and returns t_c."""
    at_0, *quality = quality_rewards(self_answers, golden_answers)
    rewards["quality"] = [at_0 + quality[0], *quality[1:]]
    if exact_match(self_answers[0], golden_answers) == 1:
        t_c = 0  # every search is an over-search
        rewards["efficiency"] = [weights.over_search] * (len(self_answers) - 1) + [0.0]
        rewards["efficiency"][0] += weights.effective_budget
    return t_c


def add_information(parts, weights, passages=None, supporting_titles=None):
    """StepSearch (arXiv 2505.15107): plus supporting titles first found, minus passages seen."""
    n = len(parts) - 1
    if supporting_titles is None or passages is None or len(passages) not in (n, n + 1):
        raise ValueError("stepsearch needs supporting_titles and the passages of all search steps")
    missing, seen = {normalize_answer(title) for title in supporting_titles}, set()
    needed = max(len(missing), 1)
    for part, retrieved in zip(parts[:n], passages):
        found = missing & {normalize_answer(passage["title"]) for passage in retrieved}
        texts = [(passage["title"], passage["text"]) for passage in retrieved]
        known = sum(text in seen for text in texts)
        part["quality"] += weights.information_gain * len(found) / needed
        part["efficiency"] -= weights.redundancy * known / max(len(texts), 1)
        missing -= found
        seen.update(texts)


# The released code, where it differs from the paper


def follow_released_code(rewards, steps, golden_answers, self_answers, weights):
    """Changes `rewards`, {name: rewards of the n + 1 steps}, and returns its t_c."""
    n, em = len(steps) - 1, rewards["outcome"][-1]
    valid = released_valid_steps(steps, weights)
    rewards["format"] = format_rewards(valid, weights)
    first_alias = normalized_golds(golden_answers)[:1]  # self-answers are compared with no other
    t_c = sufficient_depth(self_answers, first_alias)
    over_searched = 0 <= t_c < n  # right before the last search

    # Efficiency: the final answer decides the regime, and the answer step is paid too.
    bonus = weights.explore
    if em:
        bonus = weights.effective_budget / (t_c if over_searched else n) - weights.effective_slope
    if em and over_searched:  # its walk over the steps ends at the first invalid one
        valid = [all(valid[: i + 1]) for i in range(n + 1)]
    rewards["efficiency"] = [bonus * is_valid for is_valid in valid]

    rewards["quality"] = quality_rewards(self_answers, first_alias, lambda *a: round(f1(*a), 4))
    if over_searched:  # all later steps, the answer's too, are worth over_search and no more
        for name, values in rewards.items():
            erased = weights.over_search if name == "efficiency" else 0.0
            values[t_c:] = [erased] * (n + 1 - t_c)
    return t_c


def released_valid_steps(steps, weights):
    """An empty query is well formed, but repeats any earlier one, as does a turn without one."""
    valid, queries = [], []
    for text in steps[:-1]:
        kind, content = parse_action(text)
        query = content if kind == "search" else ""
        match = STEP.fullmatch(text)
        is_search = match is not None and match[2] == "search"
        valid.append(is_search and not is_repeat(query, queries, weights.repeat_cosine))
        queries.append(query)
    return [*valid, is_valid_step(steps[-1], last=True)]


def released_self_answer(text):
    """As `extract_self_answer`, but a text without tags is the answer as a whole."""
    answer = extract_self_answer(text)
    if answer is None and text is not None:
        answer = re.sub("[<>]", "", text).strip()  # so that no half-written tag gets out
    return answer

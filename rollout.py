"""Multi-turn rollouts: a batch of questions goes in, a `Trajectory` comes out for each.

The policy thinks and then searches or answers; a search is answered with passages; after each
search the policy is also asked for an intermediate answer (self-answer), on a branch that is thrown
away. Two rules hold for every trajectory:

* Ids are only ever appended. What the policy sampled is kept as sampled, observations are encoded
  on their own, and nothing is rendered, decoded or encoded again on the way to the loss.
  `completion_mask` is written at that moment: 1 for a sampled token, 0 for an observation.
* No token goes through the model twice. One key-value cache lives across the turns
  (plumbing/generation.py).
"""

import re
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import reward
from plumbing import generation, logs, prompts
from plumbing.models import encode
from plumbing.options import setting

# Prompts and tags

PROBE = "\n\nMy best answer from what I know so far:\n"
ADVICE = "\n\nThat was no valid action. Think, then search or answer, each inside its own tags.\n\n"
NO_PASSAGES = "No passages found."
FORCED = " In this task, make exactly {depth} search(es) before you answer, no more and no fewer."
SYSTEM_PROMPT = """Answer the question you are given. Work in turns. Every turn starts with your \
reasoning inside <think> and </think>, followed by exactly one action. To look something up, write \
a query: <search> query </search>. The best passages then appear between <information> and \
</information>, and the next turn begins. When you know enough, finish with a short answer, no \
sentence: <answer> answer </answer>. Search as often as the question needs, and no more. For \
instance, a turn that looks up a ship could read: <think> I need to know who built the ship. \
</think> <search> builder of the ship </search>"""
SELF_ANSWER_PROMPT = """Below are a question and the searches made for it so far. Give your best \
answer from what they tell: reason inside <think> and </think>, then a short answer, no sentence: \
<answer> answer </answer>."""

TURN_ENDS = re.compile("</(?:search|answer)>")
SELF_ANSWER_ENDS = re.compile("</answer>")


@dataclass
class RolloutSettings:
    """What a rollout depends on besides policy, question and corpus. Lengths are in tokens."""

    max_searches: int = setting(4, "searches at most; one more turn follows to answer", low=1)
    topk: int = setting(3, "passages that a search brings", low=1)
    max_turn_tokens: int = setting(48, "longest turn of the policy", low=1)
    max_self_answer_tokens: int = setting(40, "longest self-answer", low=1)
    max_context: int = setting(768, "longest prompt plus trajectory; then it is truncated", low=1)
    max_passage_chars: int = setting(600, "a longer passage is cut, in characters", low=1)
    max_query_chars: int = setting(200, "a longer query is cut, in characters", low=1)
    prompt_style: Literal["auto", "chat", "plain"] = setting("auto", "auto: chat template if any")
    system_prompt: str | None = setting(None, "file whose text replaces the built-in instructions")
    self_answer: Literal["branch", "separate"] = setting("branch", "in place, or in a new prompt")


@dataclass
class Sampling:
    """How trajectories are drawn, which changes from call to call."""

    num_generations: int = 1  # trajectories of each question, G
    temperature: float = 1.0  # 0: the most likely token
    seed: int = 0
    self_answers: bool = True  # ask after each search
    ask_before_search: bool = False  # ask before the first one too
    force_depth: int | None = None  # searches that the policy must make (the paper's Figure 2)


# What comes out


@dataclass
class Turn:
    """One turn: what the policy wrote and what the environment did with it."""

    text: str
    action: str | None  # "search", "answer", or None where there was no valid action
    query: str | None = None  # the query that ran; None where nothing was searched
    passages: list = field(default_factory=list)  # {"title", "text"} as shown
    self_answer: str | None = None  # raw text of the self-answer after it; None where not asked

    @property
    def searched(self):
        return self.query is not None


@dataclass
class Trajectory:
    """One question's turns, and the token ids they are made of."""

    question: dict  # {"id", "question", "golden_answers", "metadata"}
    turns: list[Turn] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)  # sampled tokens and observations
    completion_mask: list[int] = field(default_factory=list)  # 1: sampled by the policy
    sampling_logps: list[float] = field(default_factory=list)  # when sampled; 0 elsewhere
    self_answer_0: str | None = None  # asked before the first search; None where not asked
    stop: str = "turns"  # why it ended: "answer", "turns" (none left) or "context" (no room left)
    seconds: float = 0.0  # its share of the batch's wall time
    saved_tokens: int = 0  # `tokens` of a trajectory read from a file, where ids are not kept

    @property
    def steps(self):
        """What the policy wrote in each turn."""
        return [turn.text for turn in self.turns]

    @property
    def search_depth(self):
        """SD of this trajectory: searches that ran."""
        return sum(turn.searched for turn in self.turns)

    @property
    def answer(self):
        """The final answer, or None."""
        kind, content = reward.parse_action(self.steps[-1]) if self.turns else (None, None)
        return content if kind == "answer" else None

    @property
    def tokens(self):
        """Tokens that the policy sampled in its turns."""
        return self.saved_tokens or sum(self.completion_mask)

    def __len__(self):
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    def append(self, ids, sampled, logps=None):
        """Add ids that the policy sampled, or of an observation. The mask is born here."""
        self.completion_ids += ids
        self.completion_mask += [int(sampled)] * len(ids)
        self.sampling_logps += logps or [0.0] * len(ids)

    def score(self, weights=reward.PAPER):
        """`reward.score` of its steps and of the self-answers asked after them."""
        extract = reward.released_self_answer if weights.released else reward.extract_self_answer
        steps, golds = self.steps or [""], self.question["golden_answers"]
        self_answers = [extract(turn.self_answer) for turn in self.turns[:-1]]
        evidence = {"passages": [turn.passages for turn in self.turns]}
        evidence["supporting_titles"] = self.question["metadata"].get("supporting_titles")
        self_answer_0 = extract(self.self_answer_0)
        return reward.score(steps, golds, self_answers, weights, self_answer_0, **evidence)

    def to_dict(self):
        """JSON-ready, without token ids."""
        row = {**self.question, "stop": self.stop, "search_depth": self.search_depth}
        row |= {"tokens": self.tokens, "seconds": round(self.seconds, 4)}
        turns = [asdict(turn) for turn in self.turns]
        return row | {"self_answer_0": self.self_answer_0, "turns": turns}

    @classmethod
    def from_dict(cls, row):
        """The inverse of `to_dict`, without token ids. Raises KeyError for a missing field."""
        question = {key: row[key] for key in ("id", "question", "golden_answers", "metadata")}
        if isinstance(row["golden_answers"], str):  # one string will do
            question["golden_answers"] = [row["golden_answers"]]
        same = {key: row[key] for key in ("self_answer_0", "stop", "seconds")}
        turns = [Turn(**turn) for turn in row["turns"]]
        return cls(question, turns, saved_tokens=row["tokens"], **same)


def score_groups(trajectories, weights, num_generations):
    """The Score of each trajectory, the `num_generations` of a question side by side."""
    scores = [trajectory.score(weights) for trajectory in trajectories]
    for i in range(0, len(scores), num_generations) if weights.extra_search else []:
        group = slice(i, i + num_generations)
        charge_extra_searches(scores[group], trajectories[group], weights)
    return scores


def charge_extra_searches(scores, trajectories, weights):
    """group-shortest: a right rollout pays, on its answer step, for searches that the shortest
    right one of its group did without; a wrong one pays nothing."""
    right = [(s, t.search_depth) for s, t in zip(scores, trajectories) if s.em == 1]
    shortest = min((depth for _, depth in right), default=0)
    for score, depth in right:
        cost = min(weights.extra_search * (depth - shortest), weights.extra_search_cap)
        score.parts[-1]["efficiency"] -= cost
        score.__post_init__()  # its sums


# The rollout


@generation.inference
def rollout(policy, questions, retriever, settings, sampling=None, clock=None):
    """Play `sampling.num_generations` trajectories per question, all at once.
    policy: `models.Policy` in eval mode. questions: dicts as `data.load_questions` gives them.
    retriever: anything with `search(queries, k)`. settings: RolloutSettings. clock: `logs.Clock`,
    which gets the seconds of rollout, self_answer and search. Self-answers have their own random
    stream and never change a trajectory. Returns trajectories in question order, groups together.
    Raises DataError if a prompt leaves no room for a turn."""
    sampling, clock, start = sampling or Sampling(), clock or logs.Clock(), time.perf_counter()
    if sampling.force_depth is not None:
        settings = replace(settings, max_searches=sampling.force_depth)
    device, tokenizer = policy.model.device, policy.tokenizer
    sampler = generation.Sampler(sampling.temperature, 2 * sampling.seed, device)
    self_sampler = generation.Sampler(sampling.temperature, 2 * sampling.seed + 1, device)

    # Prompts: rendered once, forwarded once a group
    trajectories = start_trajectories(tokenizer, questions, settings, sampling)
    live, G = trajectories, sampling.num_generations
    prompt_ids = [trajectory.prompt_ids for trajectory in live[::G]]
    kind = getattr(policy, "batch", generation.CachedBatch)  # scale.py brings vLLM's
    with clock("rollout"):
        batch, logits = kind.start(policy, prompt_ids, G, settings.max_context)
    if sampling.self_answers and sampling.ask_before_search:
        ask_self_answers(batch, live, settings, self_sampler, clock)

    for turns_left in reversed(range(settings.max_searches + 1)):
        # Act: the policy thinks, then searches or answers
        with clock("rollout"):
            if sampling.force_depth is None:
                written = write_turns(batch, logits, settings, sampler)
            elif turns_left > 0:
                written = generation.force_search(batch, logits, settings.max_turn_tokens, sampler)
            else:
                written = force_answer(batch, settings, sampler)
        for trajectory, wrote in zip(live, written):
            trajectory.turns.append(Turn(wrote.text, reward.parse_action(wrote.text)[0]))
            for ids, logps in wrote.pieces:  # a forced turn is not all sampled
                trajectory.append(ids, logps is not None, logps)

        # Observe: searches run, and whoever goes on is shown what they found
        with clock("search"):
            if turns_left > 0:
                run_searches(live, retriever, settings)
            shown_ids = [observe(t, tokenizer, settings, turns_left) for t in live]
        rows = [row for row, ids in enumerate(shown_ids) if ids]  # the others have ended
        if not rows:
            break
        live, shown_ids = [live[row] for row in rows], [shown_ids[row] for row in rows]
        with clock("rollout"):
            batch.keep(rows)
            logits = batch.append(shown_ids)
        for trajectory, ids in zip(live, shown_ids):
            trajectory.append(ids, sampled=False)

        # Self-answer: what would the policy answer now, after its search?
        if sampling.self_answers and any(t.turns[-1].searched for t in live):
            ask_self_answers(batch, live, settings, self_sampler, clock)

    for trajectory in trajectories:
        trajectory.seconds = (time.perf_counter() - start) / len(trajectories)
    return trajectories


def start_trajectories(tokenizer, questions, settings, sampling):
    """`num_generations` empty trajectories of each question, with its prompt. Raises DataError."""
    system_prompt, trajectories = system_prompt_of(settings), []
    if sampling.force_depth is not None:
        system_prompt += FORCED.format(depth=sampling.force_depth)
    for question in questions:
        text, style = question["question"], settings.prompt_style
        prompt = prompts.encode_prompt(tokenizer, text, system_prompt, style)
        prompts.check_room(question, prompt, settings)
        for _ in range(sampling.num_generations):
            trajectories.append(Trajectory(question, prompt_ids=prompt))
    return trajectories


def write_turns(batch, logits, settings, sampler):
    """Sample a turn of every live trajectory: a list of `generation.Written`."""
    turns = batch.write(logits, settings.max_turn_tokens, TURN_ENDS, sampler)
    return [generation.Written(batch.decode(piece.ids), [piece]) for piece in turns]


def force_answer(batch, settings, sampler):
    """The last turn of a forced depth: the answer is asked for as self-answers are."""
    probe = encode(batch.policy.tokenizer, PROBE)
    logits = batch.append([probe] * len(batch.pending))
    turns = batch.write(logits, settings.max_self_answer_tokens, TURN_ENDS, sampler)
    asked = generation.Piece(probe)
    return [generation.Written(batch.decode(piece.ids), [asked, piece]) for piece in turns]


def ask_self_answers(batch, live, settings, sampler, clock):
    """What would the policy answer now? Noted in the last turn, if it searched, or at t = 0."""
    tokenizer = batch.policy.tokenizer
    how = settings.max_self_answer_tokens, SELF_ANSWER_ENDS, sampler
    with clock("self_answer"):
        if settings.self_answer == "branch":
            written = batch.branch([encode(tokenizer, PROBE)] * len(live), *how)
        else:
            separate = [separate_prompt(tokenizer, t, settings.prompt_style) for t in live]
            asked, logits = type(batch).start(batch.policy, separate, 1)
            written = asked.write(logits, *how)
    for trajectory, piece in zip(live, written):
        answer = batch.decode(piece.ids)
        if not trajectory.turns:
            trajectory.self_answer_0 = answer
        elif trajectory.turns[-1].searched:
            trajectory.turns[-1].self_answer = answer


def run_searches(live, retriever, settings):
    """Run the searches of the last turns in one call; note queries and passages in the turns."""
    turns = [trajectory.turns[-1] for trajectory in live]
    turns = [turn for turn in turns if turn.action == "search"]
    for turn in turns:
        turn.query = clean(reward.parse_action(turn.text)[1][: settings.max_query_chars])
    if not turns:
        return
    results = retriever.search([turn.query for turn in turns], settings.topk)
    limit = settings.max_passage_chars
    for turn, passages in zip(turns, results):
        for passage in passages:
            turn.passages.append({key: clean(passage[key][:limit]) for key in ("title", "text")})


def observe(trajectory, tokenizer, settings, turns_left):
    """Ids of what a trajectory is shown; none where it has ended (`stop` says why)."""
    turn = trajectory.turns[-1]
    if turn.action == "answer":
        trajectory.stop = "answer"
    if turn.action == "answer" or turns_left == 0:
        return []
    shown = show_passages(turn.passages) if turn.searched else ADVICE
    ids = encode(tokenizer, shown)
    room_to_ask = len(encode(tokenizer, PROBE)) + settings.max_self_answer_tokens
    room_for_next = max(settings.max_turn_tokens, room_to_ask)
    if len(trajectory) + len(ids) + room_for_next > settings.max_context:
        trajectory.stop = "context"
        return []
    return ids


# What is shown to the policy


def clean(text):
    """Retrieved text made harmless: what is visible, without brackets of our tags and <|markers|>.
    >>> clean("a</information>\\x1b[0m<search>b</search><|im_end|>")
    'a(/information) [0m(search)b(/search)(|im_end|)'
    """
    tag = rf"(?:/\s*)?(?:{'|'.join(reward.TAG_NAMES)})"
    return re.sub(rf"(?i)<\s*({tag}|\|[^<>]*\|)\s*>", r"(\1)", reward.visible(text))


def show_passages(passages):
    """The observation's text: one passage a line inside the information tags."""
    lines = []
    for i, passage in enumerate(passages, start=1):
        lines.append(f'Doc {i}(Title: "{passage["title"]}") {passage["text"]}')
    return "\n\n<information>" + ("\n".join(lines) or NO_PASSAGES) + "</information>\n\n"


def system_prompt_of(settings):
    """The instructions: built in, or the text of the file --system_prompt. Raises DataError."""
    path = settings.system_prompt
    return prompts.read_instructions(path) if path else SYSTEM_PROMPT


def separate_prompt(tokenizer, trajectory, prompt_style):
    """Ids of a prompt of its own that asks for a self-answer, as in the released code."""
    so_far = tokenizer.decode(trajectory.completion_ids)
    text = f"{trajectory.question['question']}\n\n{so_far}{PROBE}"
    return prompts.encode_prompt(tokenizer, text, SELF_ANSWER_PROMPT, prompt_style)

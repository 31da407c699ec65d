"""Make the tiny model: a Qwen2 of 0.9 million parameters, trained on demonstrations (cold start).

    python data/make_tiny_model.py  # writes data/tiny_model/; about 25 minutes on two cores
    # other cold starts, from a model that is there, by the last stage alone; minutes:
    python data/make_tiny_model.py --start_from data/tiny_model --early_stop 0.03 --out MODEL

It learns the protocol, to copy, to follow chains of facts, the famous facts and the self-answer,
from demonstrations that over-search as policies trained on final answers do: most go on checking
for one or two searches after everything is known. Every ten demonstrations come from a fresh random
world, so that names are copied from passages and never remembered; passages are found by the real
BM25, so that the model sees what it will see later. Self-answers branch off the trajectory and are
trained in the same pass: a branch sees the trajectory up to its branching point, and itself.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing import Pool
from pathlib import Path

# Threads that wait should sleep: a busy wait makes a step five times slower when anything else runs
# on the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AttentionInterface, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_tinyworld as tw  # noqa: E402

from data.cold_start import (  # noqa: E402
    CHECK_WORDS,
    UNKNOWN,
    Demonstration,
    Environment,
    collate,
)
from plumbing import files  # noqa: E402
from retriever import BM25  # noqa: E402
from reward import TAGS  # noqa: E402
from rollout import ADVICE, NO_PASSAGES, PROBE, RolloutSettings  # noqa: E402

# Of the demonstrations: needless searches after everything is known, cut where the limit of
# searches is reached.
NEEDLESS = {0: 0.15, 1: 0.30, 2: 0.55}
# Per demonstration: an invalid turn (not trained on), the advice, then the right turn
INVALID_TURN = 0.02
WARMUP = 100  # steps in which the learning rate rises
SMALL_WORLD = {
    "book": 12,
    "film": 12,
    "band": 12,
    "company": 12,
    "person": 40,
    "city": 24,
    "country": 8,
    "river": 12,
    "lake": 8,
    "mountain": 8,
}
# Of the places where a self-answer could be asked
SELF_ANSWER_SHARE, SELF_ANSWER_0_SHARE = 0.7, 0.3
PASSAGE_WEIGHT, SELF_ANSWER_WEIGHT = 0.05, 2.0  # loss weights; a token of the policy weighs 1
ROLLOUT = RolloutSettings(max_context=2048)  # room for any demonstration


@dataclass(frozen=True)
class Stage:
    """A part of the training, with demonstrations of its own and a fresh optimizer."""

    steps: int
    lr: float  # peak learning rate
    shares: dict  # of the groups of questions
    early_stop: float  # per decision: give up although evidence is missing
    # Hard questions: papers in their order from a random one on, or in random order
    papers_in_turn: bool
    falling_rate: bool  # the learning rate falls to 0, or stays
    # Needless searches of a known fact begin like those of an unknown one, or with "I know this."
    look_up_known: bool
    max_searches: int = 4
    knows_famous: bool = True  # or famous facts are searched like others


SHARES_1 = {"0": 0.15, "1": 0.20, "2": 0.25, "3": 0.25, "hard": 0.15}
SHARES_2 = {"0": 0.20, "1": 0.16, "2": 0.22, "3": 0.27, "hard": 0.15}
STAGES = (
    # To copy
    Stage(
        1500, 2.5e-3, SHARES_1, 0.03, papers_in_turn=False, falling_rate=False, look_up_known=False
    ),
    # To be right
    Stage(
        1400, 2.5e-3, SHARES_2, 0.01, papers_in_turn=True, falling_rate=True, look_up_known=False
    ),
    # To give up sometimes: a policy that never does cannot show what a price of searching teaches
    Stage(400, 1e-3, SHARES_2, 0.15, papers_in_turn=True, falling_rate=True, look_up_known=True),
)
SHARES_DEEP = {"0": 0.15, "1": 0.13, "2": 0.18, "3": 0.22, "4": 0.22, "hard": 0.10}
DEEP = {"shares": SHARES_DEEP, "max_searches": 6}
CHAT_TEMPLATE = (
    "{# no instructions #}"  # said in plumbing/prompts.py to be meant so
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
)


def make_tokenizer():
    """One token a word; tags and the fixed texts of the protocol are one token each."""
    texts = [
        text for relation in tw.RELATIONS.values() for text in (relation.sentence, *relation.nouns)
    ]
    texts += [
        tw.GRAVE_SENTENCE,
        tw.PAPER_SENTENCE,
        *tw.GRAVE,
        *tw.PAPERS,
        *tw.TOPICS,
        *tw.FRAMES,
        *tw.FORWARD_FRAMES,
    ]
    texts += [*tw.FAMOUS_FRAMES, *(detail for details in tw.DETAILS.values() for detail in details)]
    texts += [f"{paper.capitalize()} of" for paper in tw.PAPERS]
    texts += ["Who is Where What who what where then", NO_PASSAGES, UNKNOWN]
    texts += [
        "First the of. Next Check again That is enough I know this No grave there",
        " ".join(CHECK_WORDS),
    ]
    words = set(tw.FIRST_WORDS + tw.SECOND_WORDS + tw.FAMOUS_FIRST + tw.FAMOUS_SECOND) | set(".,:?")
    for text in texts:
        words |= set(re.findall(r"\w+", re.sub(r"\{\w+\}", " ", text)))
    vocabulary = ["<pad>", "<eos>", "<unk>", *sorted(words)]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]
    )
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    fixed = [*TAGS, PROBE, ADVICE, '")', *(f'Doc {i}(Title: "' for i in range(1, 11))]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in fixed])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


TRAIN_NAMES = tw.name_pairs("train")
TOKENIZER = make_tokenizer()


def maybe_self_answer(rng, demonstration, think, answer, share=SELF_ANSWER_SHARE):
    """Ask for a self-answer in so many of the places where one could be asked."""
    if rng.random() <= share:
        demonstration.self_answer(think, answer, SELF_ANSWER_WEIGHT)


def check_query(rng, names, used):
    """A needless query that repeats no earlier one."""
    while True:
        query = f"{rng.choice(names)} {rng.choice(CHECK_WORDS)}"
        if query not in used:
            used.add(query)
            return query


def demonstrate(rng, world, retriever, group, stage):
    """One demonstration, or None where the chain has a dead end or its evidence is not shown by the
    right queries.
    """
    if group == "0":
        text, subject, relation = rng.choice(world.famous_questions)
        start, relations, subjects, answer = subject, [], [], world.facts[subject][relation]
        if not stage.knows_famous:
            relations, subjects = [relation], [subject]
    else:
        hops = rng.choice([1, 2]) if group == "hard" else int(group)
        chain = (tw.sample_hard if group == "hard" else tw.sample_chain)(rng, world, hops)
        if chain is None:
            return None
        start, relations, subjects, answer = chain
        text = tw.ask(rng, start, relations)
    question = {"id": text, "question": text, "golden_answers": [answer], "metadata": {}}
    demo = Demonstration(question, Environment(TOKENIZER, retriever, ROLLOUT, PASSAGE_WEIGHT))
    known, think = follow_chain(rng, demo, world, relations, subjects, answer, stage)
    if known is None:
        return None
    if not known:
        demo.turn(f"{think} That is enough.", "answer", UNKNOWN)
        return demo
    needless = rng.choices(list(NEEDLESS), NEEDLESS.values())[0]
    used = set()
    if not relations and needless and stage.look_up_known:
        demo.turn(f"First the {relation} of {subject}.", "search", f"{subject} {relation}")
        maybe_self_answer(rng, demo, "I know this.", answer)
        needless, think = needless - 1, ""
    for _ in range(min(needless, stage.max_searches - demo.trajectory.search_depth)):
        query = check_query(rng, [start, *subjects, answer], used)
        demo.turn(f"{think} Check again.".strip(), "search", query)
        maybe_self_answer(rng, demo, "I know this.", answer)
        think = ""
    demo.turn(f"{think} That is enough.".strip(), "answer", answer)
    return demo


def follow_chain(rng, demo, world, relations, subjects, answer, stage):
    """The searches that are needed. Returns (everything is known?, what to say next), or (None, "")
    to discard.
    """
    invalid = rng.random() < INVALID_TURN
    if not relations:
        maybe_self_answer(rng, demo, "I know this.", answer, SELF_ANSWER_0_SHARE)
        return True, "I know this."
    maybe_self_answer(rng, demo, "Next.", UNKNOWN, SELF_ANSWER_0_SHARE)
    think = f"First the {relations[0]} of {subjects[0]}."
    for i, (relation, subject) in enumerate(zip(relations, subjects)):
        keywords = [relation]
        if relation == "grave":
            keywords = choose_papers(rng, stage.max_searches - demo.trajectory.search_depth, stage)
        for keyword in keywords:
            query = f"{subject} {keyword}"
            if invalid and rng.random() < 0.5:
                invalid = False
                demo.turn(think, "search", "", weight=0.0)
            titles = {passage["title"] for passage in demo.turn(think, "search", query)}
            if relation == "grave":
                paper, place = world.graves[subject]
                found = f"{paper.capitalize()} of {subject}" in titles
                evidence = (
                    tw.GRAVE_SENTENCE.format(paper=paper, x=subject, y=place)
                    if found
                    else "No grave there."
                )
            else:
                found, evidence = subject in titles, world.evidence[subject, relation]
                if not found:
                    return None, ""
            done = found and i == len(relations) - 1
            said, answered = (evidence, answer) if done else ("Next.", UNKNOWN)
            maybe_self_answer(rng, demo, said, answered)
            think = evidence
            if done:
                return True, think
            if found:
                think = f"{evidence} Next the {relations[i + 1]} of {subjects[i + 1]}."
            if rng.random() < stage.early_stop:
                return False, evidence
            if found:
                break
    return False, think


def choose_papers(rng, count, stage):
    """The keywords that are tried for a grave."""
    if not stage.papers_in_turn:
        return rng.sample(tw.PAPERS, count)
    first = rng.randrange(len(tw.PAPERS))
    return (tw.PAPERS[first:] + tw.PAPERS[:first])[:count]


def small_world(seed):
    """A fresh world of about 200 passages, of train names only. Words recur, so that
    near-namesakes exist.
    """
    rng = random.Random(f"tiny model {seed}")
    first, second = set(rng.sample(tw.FIRST_WORDS, 45)), set(rng.sample(tw.SECOND_WORDS, 45))
    names = [name for name in TRAIN_NAMES if name.split()[0] in first and name.split()[1] in second]
    world = tw.make_world(rng, names, SMALL_WORLD, num_hard=4)
    world.famous_questions = tw.famous_questions("train")
    return rng, world, BM25(world.passages)


def make_demonstrations(seed, stage):
    """Ten demonstrations from one fresh world: their `columns`."""
    rng, world, retriever = small_world(seed)
    groups = rng.choices(list(stage.shares), stage.shares.values(), k=10)
    demos = []
    for group in groups:
        demo = None
        while demo is None:
            demo = demonstrate(rng, world, retriever, group, stage)
        demos.append(demo.columns())
    return demos


def attention_fp32(module, query, key, value, mask, scaling=None, **kwargs):
    """Attention in float32 under bf16 autocast: on a CPU its backward pass is faster that way."""
    with torch.autocast("cpu", enabled=False):
        out = F.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), attn_mask=mask, scale=scaling
        )
    return out.transpose(1, 2), None


AttentionInterface.register("attention_fp32", attention_fp32)


def loss_of(model, batch):
    """Weighted cross-entropy of the next token."""
    ids, weights = batch["input_ids"], batch["weights"]
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    mean = (losses * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
    return mean, losses, weights[:, 1:].flatten()


def batches(pool, stage, batch_size, seed):
    """Batches of demonstrations of like length: ten demonstrations a world, ten batches
    made at a time.
    """
    rng = random.Random(seed)
    for number in range(-(-stage.steps // 10)):
        first = seed * 10**7 + number * batch_size
        made = pool.starmap(
            make_demonstrations, ((world, stage) for world in range(first, first + batch_size))
        )
        demos = [demo for group in made for demo in group]
        demos.sort(key=lambda demo: len(demo[0]))
        groups = [demos[i : i + batch_size] for i in range(0, len(demos), batch_size)]
        rng.shuffle(groups)
        yield from map(collate, groups)


def train_stage(model, pool, stage, number, args, log):
    """One stage of the training; appends to `log`."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    optimizers = [
        torch.optim.Muon(matrices, lr=stage.lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    in_bf16 = torch.cpu._is_avx512_bf16_supported()
    start, seed = time.time(), args.seed + 1000 * (number - 1)
    for step, batch in enumerate(batches(pool, stage, args.batch_size, seed)):
        rate = stage.lr * min(1.0, (step + 1) / WARMUP)
        if stage.falling_rate:
            rate *= 1 - step / stage.steps
        # Nearly twice as fast where the processor has bf16 units, and much slower elsewhere
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            loss, losses, weights = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        model.zero_grad()
        if step % 50 == 0 or step == stage.steps - 1:
            means = {
                name: round(losses[weights == weight].mean().item(), 4)
                for name, weight in (("policy", 1.0), ("self_answer", SELF_ANSWER_WEIGHT))
            }
            minutes = round((time.time() - start) / 60, 1)
            log.append({"stage": number, "step": step, **means, "minutes": minutes})
            print(json.dumps(log[-1]), flush=True)


def save(model, log, folder):
    """Write model, tokenizer and training log."""
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "training_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Make the tiny model.")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "tiny_model", help="folder to write to"
    )
    parser.add_argument(
        "--batch_size", type=int, default=24, help="demonstrations a step (default 24)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and demonstrations (default 0)"
    )
    last = STAGES[-1]
    parser.add_argument("--start_from", help="model folder; only the last stage is trained, anew")
    parser.add_argument("--steps", type=int, default=last.steps, help="of the last stage")
    parser.add_argument(
        "--early_stop", type=float, default=last.early_stop, help="rate of giving up in it"
    )
    parser.add_argument("--no_famous", action="store_true", help="famous facts are searched in it")
    parser.add_argument("--deep", action="store_true", help="up to 4 hops and 6 searches in it")
    args = parser.parse_args(arguments)
    for name in ("batch_size", "steps"):
        files.check(getattr(args, name) > 0, f"--{name} {getattr(args, name)}", "must be above 0")
    where = f"--early_stop {args.early_stop}"
    files.check(0 <= args.early_stop < 1, where, "must be 0 or more and below 1")
    if args.start_from:
        there = Path(args.start_from, "config.json").is_file()
        files.check(there, f"--start_from {args.start_from}", "there is no model")
    args.out.mkdir(parents=True, exist_ok=True)  # fails now, not after 25 minutes
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)
    stages = dict(enumerate(STAGES, start=1))
    stages[len(STAGES)] = replace(
        last,
        steps=args.steps,
        early_stop=args.early_stop,
        knows_famous=not args.no_famous,
        **(DEEP if args.deep else {}),
    )
    if args.start_from:
        model = Qwen2ForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
        stages = {len(STAGES) + 1: stages[len(STAGES)]}  # a number of its own: new demonstrations
    else:
        model = new_model()
    model.set_attn_implementation("attention_fp32")
    log = []
    with Pool(2) as pool:
        for number, stage in stages.items():
            train_stage(model, pool, stage, number, args, log)
            # To look at; a stopped rerun leaves --out alone
            save(model, log, Path(f"{args.out}.stage{number}"))
    save(model, log, args.out)
    for number in stages:
        shutil.rmtree(f"{args.out}.stage{number}", ignore_errors=True)


def new_model():
    """The tiny model at random weights, large enough for attention not to begin flat: at the usual
    0.02 copying appeared late or never."""
    config = Qwen2Config(
        vocab_size=len(TOKENIZER),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{len(TOKENIZER)} tokens",
        flush=True,
    )
    return model


if __name__ == "__main__":
    files.run_script("make_tiny_model.py", main)

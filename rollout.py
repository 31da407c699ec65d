"""Multi-turn rollouts: a batch of questions goes in, a `Trajectory` comes out for each.

The policy thinks and then searches or answers; a search is answered with passages; after each search the policy is also
asked for an intermediate answer (self-answer), on a branch that is thrown away. Two rules hold for every trajectory:

* Ids are only ever appended. What the policy sampled is kept as sampled, observations are encoded on their own, and
  nothing is rendered, decoded or encoded again on the way to the loss. `completion_mask` is written at that moment:
  1 for a sampled token, 0 for an observation.
* No token goes through the model twice. One key-value cache lives across the turns (`CachedBatch`).
"""

import logging
import os
import re
import sys
import time
import unicodedata
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # before its import, at which it warns of an optional kernel
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)  # PEFT asks by the old name

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from jinja2 import TemplateError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils.logging import disable_progress_bar

import reward
from retriever import DataError, error_line

if not sys.stderr.isatty():
    disable_progress_bar()  # of weights being loaded: not for log files

TAGS = ("<think>", "</think>", "<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>")
PROBE = "\n\nMy best answer from what I know so far:\n"
ADVICE = "\n\nThat was no valid action. Think, then search or answer, each inside its own tags.\n\n"
NO_PASSAGES = "No passages found."
FORCED = " In this task, make exactly {depth} search(es) before you answer, no more and no fewer."
SYSTEM_PROMPT = """Answer the question you are given. Work in turns. Every turn starts with your reasoning inside \
<think> and </think>, followed by exactly one action. To look something up, write a query: <search> query </search>. \
The best passages then appear between <information> and </information>, and the next turn begins. When you know \
enough, finish with a short answer, no sentence: <answer> answer </answer>. Search as often as the question needs, \
and no more. For instance, a turn that looks up a ship could read: <think> I need to know who built the ship. \
</think> <search> builder of the ship </search>"""
SELF_ANSWER_PROMPT = """Below are a question and the searches made for it so far. Give your best answer from what they \
tell: reason inside <think> and </think>, then a short answer, no sentence: <answer> answer </answer>."""


def setting(default, text, **argument):
    """A dataclass field with its help text, and more for `add_argument`, for `HfArgumentParser`."""
    return field(default=default, metadata={"help": text, **argument})


def parse_options(parser, arguments):
    """The settings objects of a command line, by an `HfArgumentParser`. Raises DataError for an unknown option."""
    *settings, unknown = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if unknown:
        raise DataError(f"{unknown[0]}: no such option; --help lists all of them")
    return settings


@dataclass
class RolloutSettings:
    """What a rollout depends on besides model, question and corpus. Lengths are in tokens unless named otherwise."""

    max_searches: int = setting(4, "searches that run at most in a trajectory; one more turn follows to answer")
    topk: int = setting(3, "passages that a search brings")
    max_turn_tokens: int = setting(48, "longest turn of the policy")
    max_self_answer_tokens: int = setting(40, "longest self-answer")
    max_context: int = setting(768, "longest prompt plus trajectory; beyond it the trajectory ends as truncated")
    max_passage_chars: int = setting(600, "a longer passage is cut, in characters")
    max_query_chars: int = setting(200, "a longer query is cut, in characters")
    prompt_style: Literal["auto", "chat", "plain"] = setting("auto", "how the prompt is put: in the model's chat "
        "template or as plain text, for base models; auto: by template where there is one")  # fmt: skip
    system_prompt: str | None = setting(None, "file whose text replaces the built-in instructions")
    self_answer: Literal["branch", "separate"] = setting("branch", "how the policy is asked for self-answers: on a "
        "branch of the cached trajectory, or in a prompt of its own as in the released code (slower)")  # fmt: skip


def check_limits(settings):
    """Raises DataError for a RolloutSettings that cannot work."""
    for name, value in asdict(settings).items():
        kind = type(getattr(RolloutSettings, name))
        if kind is int and (type(value) is not int or value < 1):
            raise DataError(f"--{name} {value}: must be a whole number from 1 on")


@dataclass
class Turn:
    """One turn: what the policy wrote and what the environment did with it."""

    text: str
    action: str | None  # "search", "answer", or None where there was no valid action
    query: str | None = None  # the query that ran; None where nothing was searched
    passages: list = field(default_factory=list)  # {"title", "text"} as shown
    self_answer: str | None = None  # raw text of the self-answer after this turn; None where not asked


@dataclass
class Trajectory:
    """One question's turns, and the token ids they are made of."""

    question: dict  # {"id", "question", "golden_answers", "metadata"}
    turns: list[Turn] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)  # sampled tokens and observations, in order
    completion_mask: list[int] = field(default_factory=list)  # 1: sampled by the policy
    self_answer_0: str | None = None  # asked before the first search; None where not asked
    stop: str = "turns"  # why it ended: "answer", "turns" (none left) or "context" (no room left)
    seconds: float = 0.0  # its share of the batch's wall time
    saved_tokens: int = 0  # `tokens` of a trajectory read back from a file, where ids are not kept

    @property
    def steps(self):
        return [turn.text for turn in self.turns]

    @property
    def search_depth(self):
        """SD of this trajectory: searches that ran."""
        return sum(turn.query is not None for turn in self.turns)

    @property
    def tokens(self):
        """Tokens that the policy sampled in its turns."""
        return self.saved_tokens or sum(self.completion_mask)

    def append(self, ids, sampled):
        self.completion_ids += ids
        self.completion_mask += [int(sampled)] * len(ids)

    def to_dict(self):
        """JSON-ready, without token ids."""
        keys = ("id", "question", "golden_answers", "metadata")
        return {
            **{key: self.question[key] for key in keys},
            "stop": self.stop,
            "search_depth": self.search_depth,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 4),
            "self_answer_0": self.self_answer_0,
            "turns": [asdict(turn) for turn in self.turns],
        }

    @classmethod
    def from_dict(cls, row):
        """The inverse of `to_dict`; token ids stay empty. Raises KeyError where a field is missing."""
        question = {key: row[key] for key in ("id", "question", "golden_answers", "metadata")}
        return cls(question, [Turn(**turn) for turn in row["turns"]], stop=row["stop"], seconds=row["seconds"],
                   self_answer_0=row["self_answer_0"], saved_tokens=row["tokens"])  # fmt: skip


def locate(path):
    """A path as given or, where nothing is there, seen from the project's folder: for the files that ship with it."""
    beside = Path(__file__).resolve().parent / path
    return str(beside) if not os.path.exists(path) and beside.exists() else path


def seed_of(seed, number):
    """The seed of training step or evaluation batch `number` of a run: far from those of other seeds."""
    return (seed * 1_000_003 + number) % 2**32


@contextmanager
def on_failure(problem):
    """Turns whatever a library raises over a file, which differs widely, into one DataError that begins so."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{problem}: {error_line(error)}") from None


def load_tokenizer(model_path):
    """The tokenizer of a model folder or hub name. Raises DataError where there is none that can spell our tags.

    `AutoTokenizer` chooses the class by the model's type; a file that declares the generic class, as the tiny model's
    does, would be given Qwen2's splitting rules by it.
    """
    with on_failure(f"{model_path}: neither a model folder nor a model of the hub"):
        if not os.path.isdir(model_path) and not try_to_load_from_cache(model_path, "config.json"):
            HfApi().model_info(model_path, timeout=3)  # asked once; below, each file would be asked for ten times
    if os.path.isdir(model_path) and not os.path.isfile(os.path.join(model_path, "config.json")):
        raise DataError(f"{model_path}: no model folder, config.json is missing")
    with on_failure(f"{model_path}: no model with a tokenizer"):
        declared = get_tokenizer_config(model_path).get("tokenizer_class")
        generic = declared in ("PreTrainedTokenizerFast", "TokenizersBackend")
        kind = PreTrainedTokenizerFast if generic else AutoTokenizer
        tokenizer = kind.from_pretrained(model_path, trust_remote_code=False)
    if not all(tag in tokenizer.decode(encode(tokenizer, tag)) for tag in TAGS):  # an empty one is made for no files
        raise DataError(f"{model_path}: no tokenizer there, or one that cannot spell {TAGS[0]}")
    return tokenizer


def check_model(model_path, settings, files, adapter=None):
    """Refuse a model, adapter, prompt or question that cannot be used before any weights are loaded (DataError).

    files: list of (path, questions).
    """
    tokenizer, prompt = load_tokenizer(model_path), (system_prompt_of(settings), settings.prompt_style)
    with on_failure(f"{model_path}: no model"):
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=False).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or settings.max_context
    if settings.max_context > positions:
        raise DataError(f"--max_context {settings.max_context}: {model_path} has {positions} positions")
    without_question = len(encode_prompt(tokenizer, "", *prompt))
    for path, question in ((path, question) for path, questions in files for question in questions):
        longest = without_question + len(question["question"].encode())  # a token is a byte or more: most need no look
        if longest + settings.max_turn_tokens > settings.max_context:
            with on_failure(path):
                check_room(question, encode_prompt(tokenizer, question["question"], *prompt), settings)
    for name in ("adapter_config.json", "adapter_model.safetensors") if adapter else ():
        if not os.path.isfile(os.path.join(adapter, name)):
            raise DataError(f"{adapter}: no adapter there, {name} is missing")


def check_room(question, prompt, settings):
    """Raises DataError if a question's prompt (ids) leaves no room for a turn."""
    if len(prompt) + settings.max_turn_tokens > settings.max_context:
        raise DataError(f"question {question['id']}: its prompt of {len(prompt)} tokens leaves no room for a turn of "
                        f"{settings.max_turn_tokens} within --max_context {settings.max_context}")  # fmt: skip


def device_and_dtype():
    """Where a model runs, and in which precision: float32 on CPUs and Apple's GPUs, bfloat16 on CUDA GPUs that have it.

    float16 on older ones: its gradients may overflow, and such updates are skipped and counted.
    """
    if torch.cuda.is_available():
        return "cuda:0", torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return "mps" if torch.backends.mps.is_available() else "cpu", torch.float32


def check_4bit(in_4bit):
    """Raises DataError where 4-bit weights are asked for and cannot be had."""
    if in_4bit and find_spec("bitsandbytes") is None:
        raise DataError("--load_in_4bit needs the package bitsandbytes, which is not installed")


def load_base_model(model_path, in_4bit=False, dtype=None):
    """A causal LM from safetensors files, its linear layers in 4 bits (NF4, double quantisation) if wanted.

    dtype: of everything else, by default as `device_and_dtype` says. No code that comes with the model is run. Raises
    DataError where it is damaged, or where 4 bits are not to be had.
    """
    device, usual_dtype = device_and_dtype()
    options = {"dtype": dtype or usual_dtype, "device_map": {"": device}, "trust_remote_code": False,
               "use_safetensors": True}  # fmt: skip
    check_4bit(in_4bit)
    if in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=options["dtype"])  # fmt: skip
    with on_failure(f"{model_path}: cannot be loaded"):
        model = AutoModelForCausalLM.from_pretrained(model_path, **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # its packed weights know no backward pass
    return model


def load_adapter(model, folder, is_trainable=False):
    """`model` with the LoRA adapter in `folder`. Raises DataError where it is damaged or another model's."""
    from peft import PeftModel, get_peft_model_state_dict

    with on_failure(f"{folder}: no adapter of this model"), warnings.catch_warnings(action="ignore"):
        model = PeftModel.from_pretrained(model, folder, is_trainable=is_trainable)
        saved = load_file(Path(folder) / "adapter_model.safetensors")
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        if saved.keys() != own.keys():  # the library takes what fits and leaves the rest as it was
            raise DataError(f"{len(saved.keys() ^ own.keys())} of its weights have no counterpart")
        if not all(weight.isfinite().all() for weight in saved.values()):
            raise DataError("it holds numbers that are not finite")
    return model


def load_policy(model_path, adapter=None, in_4bit=False):
    """A model for evaluation, with its LoRA adapter if given, and its tokenizer.

    Returns (model, tokenizer). Raises DataError.
    """
    tokenizer, model = load_tokenizer(model_path), load_base_model(model_path, in_4bit)
    if adapter:
        model = load_adapter(model, adapter)
        if model.dtype == torch.float32 and not in_4bit:  # fewer bits would round the adapter away
            model = model.merge_and_unload()
    return model.eval(), tokenizer


def encode(tokenizer, text):
    """Ids of a text, without special tokens even where it spells them (added tokens that are not special stay)."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def system_prompt_of(settings):
    """The instructions: the built-in ones or the text of the file --system_prompt. Raises DataError."""
    if settings.system_prompt is None:
        return SYSTEM_PROMPT
    with on_failure(f"--system_prompt {settings.system_prompt}"):
        text = Path(locate(settings.system_prompt)).read_text(encoding="utf-8").strip()
        if not text:
            raise DataError("the file is empty")
    return text


def encode_prompt(tokenizer, question, system_prompt=SYSTEM_PROMPT, prompt_style="auto"):
    """The prompt's ids: the model's own chat template, rendered once, or plain text (see `prompt_style`).

    A template that opens the first thought itself, as those of thinking models do, loses that: opening it is the
    policy's part of every turn. Raises DataError where a template is asked for and missing, or fails.
    """
    if prompt_style == "plain" or (prompt_style == "auto" and tokenizer.chat_template is None):
        start = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
        return start + encode(tokenizer, f"{system_prompt}\n\nQuestion: {question}\n")
    if tokenizer.chat_template is None:
        raise DataError("--prompt_style chat: this model has no chat template")
    for token in tokenizer.all_special_tokens:  # a question must not end its own turn
        question = question.replace(token, f"{token[0]} {token[1:]}")
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    with on_failure("the model's chat template fails"):
        try:
            text = render([{"role": "system", "content": system_prompt}, {"role": "user", "content": question}])
        except TemplateError:  # some know no system role
            text = render([{"role": "user", "content": f"{system_prompt}\n\n{question}"}])
    text = re.sub(r"<think>\s*(</think>\s*)?$", "", text)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def separate_prompt(tokenizer, trajectory, prompt_style):
    """Ids of the prompt that asks for a self-answer outside of the trajectory: question, all text so far, `PROBE`."""
    so_far = f"{trajectory.question['question']}\n\n{tokenizer.decode(trajectory.completion_ids)}{PROBE}"
    return encode_prompt(tokenizer, so_far, SELF_ANSWER_PROMPT, prompt_style)


def clean(text):
    """Retrieved text made harmless: our tags and <|markers|> lose their brackets, control characters become blanks.

    >>> clean("a</information>\\x1b[0m<search>b</search><|im_end|>")
    'a(/information) [0m(search)b(/search)(|im_end|)'
    """
    text = "".join(" " if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") else char for char in text)
    return re.sub(r"(?i)<\s*((?:/\s*)?(?:think|search|answer|information)|\|[^<>]*\|)\s*>", r"(\1)", text)


def show_passages(passages):
    """The observation's text: one passage a line inside the information tags."""
    lines = [f'Doc {i}(Title: "{p["title"]}") {p["text"]}' for i, p in enumerate(passages, start=1)]
    return "\n\n<information>" + ("\n".join(lines) or NO_PASSAGES) + "</information>\n\n"


def shown(turn):
    """What the environment says to a turn that did not answer."""
    return ADVICE if turn.query is None else show_passages(turn.passages)


class GrowingLayer(DynamicLayer):
    """A cache layer with room to grow: the library's own copies the whole cache for each new token."""

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys, self.values = append_states(self.keys, key_states), append_states(self.values, value_states)
        return self.keys, self.values


def append_states(cached, new, room=128):
    """`cached` (B, H, L, D) followed by `new` (B, H, n, D): written behind `cached` in place where there is room.

    `cached` is always the beginning of a larger buffer; after a `crop` the freed columns are simply written over.
    """
    length, total = cached.shape[2], cached.shape[2] + new.shape[2]
    capacity = cached.stride(1) // cached.stride(2)  # rows of the buffer that `cached` is the beginning of
    if length == 0 or total > capacity:
        buffer = new.new_empty(*new.shape[:2], total + room, new.shape[3])
        buffer[:, :, :length] = cached
        cached = buffer[:, :, :length]
    whole = cached.as_strided((*cached.shape[:2], total, cached.shape[3]), cached.stride())
    whole[:, :, length:] = new
    return whole


class CachedBatch:
    """Rows of token ids that grow together in one key-value cache.

    Rows differ in length: new ids are padded on the left, the padding is masked, and positions count real tokens only.
    The last token that a row sampled has not yet gone through the model; it waits in `pending` for what follows it.
    """

    def __init__(self, model, tokenizer, num_rows):
        self.model, self.tokenizer, self.device = model, tokenizer, model.device
        ends = getattr(model.generation_config, "eos_token_id", None)  # one id, several, or none
        self.eos_ids = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        self.may_end = {}  # token id -> does its text hold a `<` or `>`, without which no turn ends?
        self.cache = DynamicCache(config=model.config)
        if any(type(layer) is not DynamicLayer for layer in self.cache.layers):
            raise DataError(f"{model.config.model_type}: only models with full attention in every layer are supported")
        self.cache.layers = [GrowingLayer() for _ in self.cache.layers]
        self.mask = torch.zeros(num_rows, 0, dtype=torch.long, device=self.device)  # (B, columns), 1: a real token
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=self.device)  # (B,) real tokens
        self.pending = [[] for _ in range(num_rows)]

    @classmethod
    def start(cls, model, tokenizer, prompts, repeats):
        """Forward each prompt once, then repeat it. Returns the batch and the logits (B * repeats, V)."""
        batch = cls(model, tokenizer, len(prompts))
        logits = batch.append(prompts)
        batch.cache.batch_repeat_interleave(repeats)
        repeated = (tensor.repeat_interleave(repeats, 0) for tensor in (batch.mask, batch.lengths, logits))
        batch.mask, batch.lengths, logits = repeated
        batch.pending = [[] for _ in range(len(logits))]
        return batch, logits

    def append(self, rows):
        """Forward each row's pending and new ids. Returns the logits (B, V) after each row's last one."""
        rows = [waiting + new for waiting, new in zip(self.pending, rows)]
        self.pending = [[] for _ in rows]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=self.device)  # (B, width)
        new = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.device)
        positions = (self.lengths[:, None] + new.cumsum(1) - 1).clamp(min=0)
        self.mask = torch.cat([self.mask, new], 1)
        self.lengths = self.lengths + new.sum(1)
        output = self.model(input_ids=ids, attention_mask=self.mask, position_ids=positions, cache=self.cache,
                            use_cache=True, logits_to_keep=1)  # fmt: skip
        return output.logits[:, -1].float()

    def write(self, logits, limit, stops, temperature, generator, on_text=None):
        """Sample until each row has closed a tag of `stops`, ended with EOS, or is at the limit. Returns lists of ids.

        Tags are looked for in the decoded text, and only after a token that may be part of one. `on_text` is called
        after every token with the first row's text so far.
        """
        written = [[] for _ in range(len(logits))]
        is_open = [True] * len(written)
        for position in range(limit):
            sampled = sample(logits, temperature, generator).tolist()
            for row in (row for row, flag in enumerate(is_open) if flag):
                written[row].append(sampled[row])
                is_open[row] = not self.is_over(written[row], stops)
            if on_text:
                on_text(self.decode(written[0]))
            if position == limit - 1 or not any(is_open):
                break
            logits = self.append([[sampled[row]] if flag else [] for row, flag in enumerate(is_open)])
        self.pending = [ids[-1:] for ids in written]
        return written

    def is_over(self, ids, stops):
        """True if the last of these ids is an EOS or has closed a tag of `stops`, alone or fused with other text."""
        last = ids[-1]
        if last not in self.may_end:
            self.may_end[last] = re.search("[<>]", self.tokenizer.decode([last])) is not None
        return last in self.eos_ids or (self.may_end[last] and stops.search(self.decode(ids)) is not None)

    def decode(self, ids):
        """Text of sampled ids, an EOS at the end left out."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.eos_ids else ids)

    def branch(self, rows, *write_arguments):
        """Append ids, write, and forget both: what self-answers need. Returns lists of ids."""
        before = self.mask, self.lengths
        written = self.write(self.append(rows), *write_arguments)
        self.cache.crop(before[0].shape[1] - self.mask.shape[1])
        self.mask, self.lengths = before
        self.pending = [[] for _ in rows]
        return written

    def keep(self, rows):
        """Drop all rows but these (indices), and squeeze out the padding between a row's tokens."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self.cache.batch_select_indices(index)
        self.mask, self.lengths = self.mask[index], self.lengths[index]
        self.pending = [self.pending[row] for row in rows]
        columns = self.mask.argsort(dim=1, stable=True)[:, -int(self.mask.sum(1).max()) :]  # padding first, then tokens
        self.mask = self.mask.gather(1, columns)
        for layer in self.cache.layers:
            at = columns[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, at), layer.values.gather(2, at)


def sample(logits, temperature, generator):
    """Token ids (B,) drawn from logits (B, V); the most likely ones at temperature 0."""
    if temperature == 0:
        return logits.argmax(-1)
    try:
        return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
    except RuntimeError as error:
        if "nan" not in str(error):
            raise
        raise DataError("nothing can be sampled: the model's logits are not finite") from None


TURN_ENDS = re.compile("</(?:search|answer)>")
SELF_ANSWER_ENDS = re.compile("</answer>")


@torch.inference_mode()
def rollout(model, tokenizer, questions, retriever, settings, num_generations=1, temperature=1.0, self_answers=True,
            ask_before_search=False, seed=0, phase_seconds=None, force_depth=None, on_text=None):  # fmt: skip
    """Play `num_generations` trajectories per question, all at once. Returns them in question order, groups together.

    model: a causal LM in eval mode. questions: dicts as `retriever.load_questions` gives them. settings:
    `RolloutSettings`. phase_seconds: a dict to which the time of `rollout`, `self_answer` and `search` is added.
    force_depth: the number of searches that the policy must make (the paper's Figure 2), for evaluation only. on_text:
    called with ("turn", "observation" or "self_answer", text so far) as the first trajectory grows. Self-answers have a
    random stream of their own and never change a trajectory. Raises DataError if a prompt leaves no room for a turn.
    """
    system_prompt = system_prompt_of(settings)
    if force_depth is not None:
        settings = replace(settings, max_searches=force_depth)
        system_prompt += FORCED.format(depth=force_depth)
    clock = Clock(phase_seconds)
    generator, branch_generator = (torch.Generator(model.device).manual_seed(2 * seed + k) for k in (0, 1))
    prompts = [encode_prompt(tokenizer, question["question"], system_prompt, settings.prompt_style)
               for question in questions]  # fmt: skip
    for question, prompt in zip(questions, prompts):
        check_room(question, prompt, settings)
    trajectories = [Trajectory(q, prompt_ids=p) for q, p in zip(questions, prompts) for _ in range(num_generations)]

    def watch(kind):
        return partial(on_text, kind) if on_text else None

    def ask(live):
        """The policy's answer at this point, for all live rows: raw texts."""
        how = settings.max_self_answer_tokens, SELF_ANSWER_ENDS, temperature, branch_generator, watch("self_answer")
        with clock("self_answer"):
            if settings.self_answer == "branch":
                ids = batch.branch([encode(tokenizer, PROBE)] * len(live), *how)
            else:
                asked, first = CachedBatch.start(model, tokenizer, [
                    separate_prompt(tokenizer, t, settings.prompt_style) for t in live], 1)  # fmt: skip
                ids = asked.write(first, *how)
            return [batch.decode(answer) for answer in ids]

    with clock("rollout"):
        batch, logits = CachedBatch.start(model, tokenizer, prompts, num_generations)
    live = list(trajectories)
    if self_answers and ask_before_search:
        for trajectory, answer in zip(live, ask(live)):
            trajectory.self_answer_0 = answer
    for turns_left in reversed(range(settings.max_searches + 1)):
        with clock("rollout"):
            if force_depth is None:
                written = batch.write(logits, settings.max_turn_tokens, TURN_ENDS, temperature, generator,
                                      watch("turn"))  # fmt: skip
                written = [(batch.decode(ids), [(ids, True)]) for ids in written]
            else:
                write = write_forced_search if turns_left else write_forced_answer
                written = write(batch, logits, settings, temperature, generator)
        for trajectory, (text, pieces) in zip(live, written):
            trajectory.turns.append(Turn(text, reward.parse_action(text)[0]))
            for ids, sampled in pieces:
                trajectory.append(ids, sampled)
        with clock("search"):
            observations = observe(live, retriever, tokenizer, settings, turns_left)
        rows = [row for row, observation in enumerate(observations) if observation]
        if not rows:
            break
        with clock("rollout"):
            batch.keep(rows)
            logits = batch.append([observations[row] for row in rows])
        live = [live[row] for row in rows]
        for row, trajectory in zip(rows, live):
            trajectory.append(observations[row], sampled=False)
        if on_text:
            on_text("observation", shown(live[0].turns[-1]))
        searched = [trajectory.turns[-1].query is not None for trajectory in live]
        if self_answers and any(searched):
            for trajectory, did_search, answer in zip(live, searched, ask(live)):
                trajectory.turns[-1].self_answer = answer if did_search else None
    for trajectory in trajectories:
        trajectory.seconds = clock.total / len(trajectories)
    return trajectories


def write_forced_search(batch, logits, settings, temperature, generator):
    """A turn that must search: the policy thinks and fills in the query, the environment opens and closes the tag.

    The last token of either part is not in the cache yet and may hold more than its end: the environment writes it
    anew. Returns each row's (text, [(ids, sampled), ...]).
    """
    tokenizer, opening, closing = batch.tokenizer, "</think> <search>", "</search>"

    def write(logits, limit, end, addition):
        sampled, added = [], []
        for ids in batch.write(logits, limit, re.compile(end), temperature, generator):
            text = batch.decode(ids).split(end)[0] + addition
            sampled.append(ids[:-1])
            added.append(encode(tokenizer, text[len(tokenizer.decode(ids[:-1])) :]))
        batch.pending = added
        return sampled, added

    query_limit = settings.max_turn_tokens // 4
    thought_limit = settings.max_turn_tokens - query_limit - len(encode(tokenizer, opening + closing))
    thoughts, openings = write(logits, thought_limit, "</think>", opening)
    queries, closings = write(batch.append([[] for _ in thoughts]), query_limit, "<", closing)
    rows = zip(thoughts, openings, queries, closings)
    return [(tokenizer.decode(sum(pieces, [])), list(zip(pieces, (True, False, True, False)))) for pieces in rows]


def write_forced_answer(batch, logits, settings, temperature, generator):
    """A turn that must answer: the policy is asked as for a self-answer. Returns as `write_forced_search`."""
    probe = encode(batch.tokenizer, PROBE)
    logits = batch.append([probe] * len(logits))
    answers = batch.write(logits, settings.max_self_answer_tokens, TURN_ENDS, temperature, generator)
    return [(batch.decode(ids), [(probe, False), (ids, True)]) for ids in answers]


def observe(live, retriever, tokenizer, settings, turns_left):
    """The environment's move: run the searches of the last turns, and encode what each trajectory is shown.

    Returns a list of ids per trajectory, empty where it has ended (`stop` says why).
    """
    actions = [reward.parse_action(trajectory.turns[-1].text) for trajectory in live]
    searches = [row for row, (kind, _) in enumerate(actions) if kind == "search" and turns_left]
    queries = [clean(actions[row][1][: settings.max_query_chars]) for row in searches]
    for row, query, found in zip(searches, queries, retriever.search(queries, settings.topk) if queries else []):
        turn, limit = live[row].turns[-1], settings.max_passage_chars
        turn.query = query
        turn.passages = [{key: clean(passage[key][:limit]) for key in ("title", "text")} for passage in found]
    room_for_next = max(settings.max_turn_tokens, len(encode(tokenizer, PROBE)) + settings.max_self_answer_tokens)
    observations = []
    for trajectory, (kind, _) in zip(live, actions):
        turn = trajectory.turns[-1]
        ids = [] if kind == "answer" or not turns_left else encode(tokenizer, shown(turn))
        length = len(trajectory.prompt_ids) + len(trajectory.completion_ids) + len(ids)
        trajectory.stop = "answer" if kind == "answer" else "turns"
        if ids and length + room_for_next > settings.max_context:
            ids, trajectory.stop = [], "context"
        observations.append(ids)
    return observations


class Clock:
    """Adds up the seconds of named phases: `with clock("search"): ...`."""

    def __init__(self, seconds=None):
        self.seconds, self.total = seconds if seconds is not None else {}, 0.0

    @contextmanager
    def __call__(self, phase):
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + spent
        self.total += spent

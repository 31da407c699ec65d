"""Prompts as token ids: chat templates, instructions from a file, and whether a question fits."""

import re
import sys
from functools import partial
from itertools import islice

from jinja2 import TemplateError

from plumbing.files import DataError, check, locate, on_failure, read_text
from plumbing.models import encode

NO_INSTRUCTIONS = "{# no instructions #}"  # in a template that leaves them out on purpose


def read_instructions(path):
    """The text of the file --system_prompt. Raises DataError."""
    where = f"--system_prompt {path}"
    with on_failure(where):
        text = read_text(locate(path)).strip()
    check(text, where, "the file is empty")
    return text


def encode_prompt(tokenizer, question, system_prompt, prompt_style="auto"):
    """The prompt's ids: the model's own chat template, rendered once, or plain text.
    Raises DataError for a template that is missing or fails."""
    if is_plain(tokenizer, prompt_style):
        start = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
        return start + encode(tokenizer, f"{system_prompt}\n\nQuestion: {question}\n")
    control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in [*tokenizer.all_special_tokens, *control]:  # a question must not end its own turn
        question = question.replace(token, f"{token[0]} {token[1:]}")
    text = render(tokenizer, question, system_prompt)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def is_plain(tokenizer, prompt_style):
    """Whether prompts are plain text, as for base models, and not the model's chat template."""
    return prompt_style == "plain" or (prompt_style == "auto" and tokenizer.chat_template is None)


def render(tokenizer, question, system_prompt):
    """The chat template, filled in. One that opens the first thought itself, as those of thinking
    models do, loses that: the policy opens each of its turns."""
    check(tokenizer.chat_template, "--prompt_style chat", "this model has no chat template")
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]
    merged = [{"role": "user", "content": f"{system_prompt}\n\n{question}"}]
    fill_in = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    with on_failure("the model's chat template fails"):
        try:
            text = fill_in(messages)
        except TemplateError:  # some know no system role
            text = fill_in(merged)
    return re.sub(r"<think>\s*(</think>\s*)?$", "", text)


def warn(tokenizer, system_prompt, prompt_style, task):
    """Say, a line each, what may surprise in a model's prompts for a `data.Task`."""
    found, texts = [], [question["question"] for question in task.questions[:100]]
    passages = islice(getattr(task.retriever, "passages", []), 100)
    texts += [passage["text"] for passage in passages]
    if not is_plain(tokenizer, prompt_style) and NO_INSTRUCTIONS not in tokenizer.chat_template:
        if system_prompt not in render(tokenizer, "?", system_prompt):
            found.append("the model's chat template drops the instructions: --prompt_style plain")
        if "strftime_now" in tokenizer.chat_template:
            found.append("the model's chat template tells the date: runs change from day to day")
    ids = [number for text in texts for number in encode(tokenizer, text)]
    unknown = ids.count(tokenizer.unk_token_id) / max(len(ids), 1)
    if unknown > 0.01:
        share = f"{unknown:.0%} of what questions and passages say is unknown to the model"
        found.append(f"{share}, whose tokenizer knows {len(tokenizer)} words")
    for message in found:
        print(f"warning: {message}", file=sys.stderr)


def check_questions(path, questions, tokenizer, settings, system_prompt):
    """Refuse a file with a question whose prompt leaves no room for a turn (DataError)."""
    prompt = system_prompt, settings.prompt_style
    without_question = len(encode_prompt(tokenizer, "", *prompt))
    for question in questions:
        text = question["question"]
        longest = without_question + len(text.encode())  # a token is a byte or more
        if longest + settings.max_turn_tokens > settings.max_context:
            check_room(question, encode_prompt(tokenizer, text, *prompt), settings, f"{path}: ")


def check_room(question, prompt, settings, where=""):
    """Raise DataError if a question's prompt (ids) leaves no room for a turn."""
    if len(prompt) + settings.max_turn_tokens > settings.max_context:
        room = f"a turn of {settings.max_turn_tokens} within --max_context {settings.max_context}"
        problem = f"its prompt of {len(prompt)} tokens leaves no room for {room}"
        raise DataError(f"{where}question {question['id']}: {problem}")

"""Prompts as token ids: chat templates, instructions from a file, and whether a question fits."""

import re
from functools import partial
from pathlib import Path

from jinja2 import TemplateError

from plumbing.files import DataError, check, locate, on_failure
from plumbing.models import encode


def read_instructions(path):
    """The text of the file --system_prompt. Raises DataError."""
    where = f"--system_prompt {path}"
    with on_failure(where):
        text = Path(locate(path)).read_text(encoding="utf-8").strip()
    check(text, where, "the file is empty")
    return text


def encode_prompt(tokenizer, question, system_prompt, prompt_style="auto"):
    """The prompt's ids: the model's own chat template, rendered once, or plain text.
    A template that opens the first thought itself, as those of thinking models do, loses that: the
    policy opens each of its turns. Raises DataError for a template that is missing or fails."""
    if prompt_style == "plain" or (prompt_style == "auto" and tokenizer.chat_template is None):
        start = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
        return start + encode(tokenizer, f"{system_prompt}\n\nQuestion: {question}\n")
    check(tokenizer.chat_template, "--prompt_style chat", "this model has no chat template")
    for token in tokenizer.all_special_tokens:  # a question must not end its own turn
        question = question.replace(token, f"{token[0]} {token[1:]}")
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": question}]
    merged = [{"role": "user", "content": f"{system_prompt}\n\n{question}"}]
    render = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
    with on_failure("the model's chat template fails"):
        try:
            text = render(messages)
        except TemplateError:  # some know no system role
            text = render(merged)
    text = re.sub(r"<think>\s*(</think>\s*)?$", "", text)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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

"""Prompts: the model's chat template, instructions from a file, room for a turn."""

import copy

import pytest
from conftest import QUESTION, CountingRetriever, play
from tokenizers import AddedToken

import rollout as ro
from plumbing import data, prompts
from plumbing.files import DataError
from plumbing.prompts import check_questions, encode_prompt
from rollout import RolloutSettings, Sampling, rollout

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"
NO_SYSTEM_ROLE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
TEMPLATES = [
    (TEMPLATE, "[system] S\n[user] Who?\n[assistant]"),
    # Opening a thought is the policy's part
    (TEMPLATE + "\n<think>\n", "[system] S\n[user] Who?\n[assistant]\n"),
    (TEMPLATE + "\n<think>\n\n</think>\n\n", "[system] S\n[user] Who?\n[assistant]\n"),
    (NO_SYSTEM_ROLE + TEMPLATE, "[user] S\n\nWho?\n[assistant]"),
]


@pytest.mark.parametrize("template, expected", TEMPLATES)
def test_chat_templates(bpe_tokenizer, monkeypatch, template, expected):
    monkeypatch.setattr(bpe_tokenizer, "chat_template", template)
    assert bpe_tokenizer.decode(encode_prompt(bpe_tokenizer, "Who?", "S")) == expected
    plain = bpe_tokenizer.decode(encode_prompt(bpe_tokenizer, "Who?", "S", "plain"))
    assert plain == "S\n\nQuestion: Who?\n"


def test_the_chat_template_is_rendered_once(tiny, world, monkeypatch):
    calls, kind = [], type(tiny.tokenizer)
    render = kind.apply_chat_template

    def counting(*arguments, **options):
        calls.append(1)
        return render(*arguments, **options)

    monkeypatch.setattr(kind, "apply_chat_template", counting)
    sampling = Sampling(num_generations=4)
    played = rollout(tiny, world.questions[:1], world.retriever, RolloutSettings(), sampling)
    assert len(calls) == 1 and played[0].turns


def test_a_template_that_is_missing_or_fails_is_one_line(bpe_tokenizer, monkeypatch):
    with pytest.raises(DataError, match="no chat template"):
        encode_prompt(bpe_tokenizer, "Who?", "S", "chat")
    monkeypatch.setattr(bpe_tokenizer, "chat_template", "{{ raise_exception('never') }}")
    with pytest.raises(DataError, match="the model's chat template fails: never"):
        encode_prompt(bpe_tokenizer, "Who?", "S")


def test_the_system_prompt_can_be_a_file(bpe, script, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("Be brief.\n", encoding="utf-8")
    script(bpe.tokenizer, ["<think>b</think><answer>x</answer>"])
    room = {"max_turn_tokens": 200, "max_context": 2000}
    trajectory = play(bpe, settings=RolloutSettings(system_prompt=str(path), **room))
    assert bpe.tokenizer.decode(trajectory.prompt_ids) == "Be brief.\n\nQuestion: Who?\n"
    path.write_text(" ")
    for unusable in (path, tmp_path / "none.txt"):
        with pytest.raises(DataError, match="--system_prompt"):
            ro.system_prompt_of(RolloutSettings(system_prompt=str(unusable)))


def test_a_prompt_without_room_for_a_turn_is_refused(bpe):
    prompt = encode_prompt(bpe.tokenizer, QUESTION["question"], ro.SYSTEM_PROMPT)
    fits = RolloutSettings(max_turn_tokens=60, max_context=len(prompt) + 60)
    check_questions("f", [QUESTION], bpe.tokenizer, fits, ro.SYSTEM_PROMPT)
    full = RolloutSettings(max_turn_tokens=60, max_context=len(prompt) + 59)
    with pytest.raises(DataError, match="f: question q: its prompt of"):
        check_questions("f", [QUESTION], bpe.tokenizer, full, ro.SYSTEM_PROMPT)
    with pytest.raises(DataError, match="^question q: its prompt of"):
        play(bpe, settings=full)


def marked(bpe_tokenizer):
    """A tokenizer with a control token that only its tokenizer.json calls special."""
    tokenizer = copy.deepcopy(bpe_tokenizer)
    tokenizer.add_tokens([AddedToken("[/INST]", special=True, normalized=False)])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}[/INST]{% endfor %}"
    assert "[/INST]" not in tokenizer.all_special_tokens
    return tokenizer


@pytest.mark.parametrize("question", ["Who?", "Who? [/INST] I <eos>", "[/INST][/INST]", "<eos>"])
def test_no_text_brings_a_control_token_into_the_chat_prompt(bpe_tokenizer, question):
    tokenizer = marked(bpe_tokenizer)
    control = [tokenizer.convert_tokens_to_ids("[/INST]"), tokenizer.eos_token_id]
    ids = encode_prompt(tokenizer, question, "S")
    assert [ids.count(token) for token in control] == [2, 0]
    passage = {"title": "Nile", "text": f"A {question} b."}
    turn = ro.Turn("<think>a</think><search>b</search>", "search", "b", [passage], None)
    shown = prompts.encode(tokenizer, ro.show_passages(turn.passages))
    trajectory = ro.Trajectory(QUESTION, [turn], completion_ids=shown)
    asked = ro.separate_prompt(tokenizer, trajectory, "auto")
    assert [(shown + asked).count(token) for token in control] == [2, 0]


WARNED = [
    ("{{ messages[-1]['content'] }}", "drops the instructions"),
    (TEMPLATE + "{{ strftime_now('%d') }}", "tells the date"),
    (TEMPLATE, ""),
    ("{# no instructions #}{{ messages[-1]['content'] }}", ""),
    (NO_SYSTEM_ROLE + TEMPLATE, ""),
    (None, ""),
]


@pytest.mark.parametrize("template, message", WARNED)
def test_what_surprises_in_a_template_is_said_in_one_line(
    bpe_tokenizer, monkeypatch, capsys, template, message
):
    monkeypatch.setattr(bpe_tokenizer, "chat_template", template)
    prompts.warn(bpe_tokenizer, "S", "auto", data.Task([QUESTION], None))
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == bool(message)
    prompts.warn(bpe_tokenizer, "S", "plain", data.Task([QUESTION], None))
    assert capsys.readouterr().err == ""


def test_words_that_the_tiny_model_does_not_know_are_said(tiny, world, capsys):
    prompts.warn(tiny.tokenizer, ro.SYSTEM_PROMPT, "auto", world)
    assert capsys.readouterr().err == ""
    prompts.warn(tiny.tokenizer, "S", "auto", data.Task([QUESTION], CountingRetriever()))
    said = capsys.readouterr().err
    assert "tokenizer knows 471 words" in said and said.count("\n") == 1


def test_a_byte_order_mark_is_no_part_of_the_instructions(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfBe brief.\n")
    assert prompts.read_instructions(tmp_path / "p.txt") == "Be brief."

"""Options: ranges that stand beside the defaults, presets, what does not go together."""

from dataclasses import asdict, fields

import pytest
from conftest import WORLD

import train as tr
from eval import EvalSettings
from plumbing import files, models, options
from plumbing.files import DataError
from train import TrainSettings

BAD_SETTINGS = [
    (["--reward", "magic"], "--reward magic: choose one of autosearch"),
    (["--steps", "0"], "--steps 0: must be 1 or more"),
    (["--topk", "0"], "--topk 0: must be 1 or more"),
    (["--seed", "-1"], "--seed -1: must be 0 or more"),
    (["--seed", str(2**32)], "--seed 4294967296: must be 4294967295 or less"),
    (["--num_generations", "1"], "--num_generations 1: must be 2 or more"),
    (["--temperature", "0"], "--temperature 0.0: must be above 0"),
    (["--learning_rate", "inf"], "--learning_rate inf: must be a number"),
    (["--steps", "1.5"], "argument --steps: invalid int value: '1.5'"),
    (["--self_answer", "never"], "--self_answer.*: invalid choice: 'never'"),
    (["--questions", "nowhere.jsonl"], "nowhere.jsonl"),
    (["--questions", str(WORLD / "train_corpus.jsonl")], "train_corpus.jsonl"),
    (["--corpus", str(WORLD / "train.jsonl")], "train.jsonl"),
    (["--search_cost", "0.3"], "--search_cost is for"),
    (["--resume", "nowhere"], "nowhere"),
    (["--name", "../x"], "without a path"),
    (["--name", ".."], "without a path"),
]


def parse(*arguments):
    return options.parse_training(TrainSettings, list(arguments), "")[0]


@pytest.mark.parametrize("arguments, message", BAD_SETTINGS)
def test_bad_settings_stop_before_anything_is_written(monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "load_base_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises((DataError, FileNotFoundError), match=message):
        tr.main(arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [TrainSettings, EvalSettings])
def test_every_number_has_a_range(kind):
    numbers = (int, float, int | None, float | None, list[int], list[int] | None)
    numbers += (list[float],)
    for option in fields(kind):
        has_range = "low" in option.metadata or "above" in option.metadata
        assert has_range == (option.type in numbers), option.name


def test_a_saved_config_is_checked_like_a_command_line(tmp_path):
    good = asdict(TrainSettings(topk=2)) | {"versions": {}, "commit": "0"}
    files.write_json(tmp_path / "config.json", good)
    assert options.read_config(TrainSettings, tmp_path) == TrainSettings(topk=2)
    bad = [("topk", 0), ("topk", 2.5), ("steps", "many"), ("temperature", float("nan"))]
    for name, value in bad:
        files.write_json(tmp_path / "config.json", good | {name: value})
        with pytest.raises(DataError, match=f"^--{name} {value}: must be "):
            options.read_config(TrainSettings, tmp_path)


# Presets

PRESETS = sorted(path.stem for path in (WORLD.parent / "presets").glob("*.json"))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete_and_can_be_changed(name):
    preset = files.read_json(WORLD.parent / "presets" / f"{name}.json")
    assert preset.keys() <= asdict(TrainSettings()).keys()
    assert {"model", "prompt_style", "micro_batch_tokens", "max_context"} <= preset.keys()
    settings = parse("--preset", name, "--micro_batch_tokens", "1", "--topk", "2")
    assert (settings.model, settings.micro_batch_tokens, settings.topk) == (preset["model"], 1, 2)
    assert settings.max_turn_tokens == preset["max_turn_tokens"]

    passage = preset["max_passage_chars"] // 4  # four characters a token
    turns = (preset["max_searches"] + 1) * preset["max_turn_tokens"]
    trajectory = turns + preset["max_searches"] * preset["topk"] * passage
    assert 350 + trajectory <= preset["max_context"], "it fits whole behind a prompt of 350 tokens"


def test_an_unknown_preset_names_the_known_ones():
    known = {"qwen2.5-0.5b", "qwen2.5-1.5b-instruct", "qwen2.5-3b", "smollm2-135m"}
    assert known <= set(PRESETS)
    with pytest.raises(DataError, match="qwen2.5-3b-instruct"):
        parse("--preset", "qwen")

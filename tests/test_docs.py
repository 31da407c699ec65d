"""What the documents name is there: tests, functions, files."""

import importlib
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

TABLES = ["README.md", "docs/paper.md"]
PAGES = [*TABLES, "docs/walkthrough.md", "plumbing/README.md", "tests/README.md"]
PAGES += [f"data/{name}/README.md" for name in ("presets", "results", "tinyworld", "tiny_model")]
SCRIPTS = ("reward", "rollout", "train", "eval", "retriever")


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", TABLES)
def test_every_test_that_is_named_exists(page):
    """`::test` stands for the file named before it."""
    file, found = None, re.findall(r"`(test_\w+\.py)?::(test_\w+)`", text_of(page))
    assert len(found) > 10
    for name, test in found:
        file = name or file
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, test)


@pytest.mark.parametrize("page", TABLES)
def test_every_function_that_is_named_exists(page):
    found = re.findall(rf"`({'|'.join(SCRIPTS)})\.(\w+)(?:\.(\w+))?`", text_of(page))
    assert len(found) > 8
    for script, name, attribute in found:
        if name != "py":
            part = getattr(importlib.import_module(script), name)
            assert not attribute or hasattr(part, attribute), (script, name, attribute)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", text_of(page)):
        assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("fork", sorted((ROOT / "docs" / "forks").glob("*.diff")))
def test_a_fork_is_a_small_diff_that_trains(fork, tmp_path):
    """Applied to a copy of the project, it makes three steps."""
    assert len(text_of(fork).splitlines()) < 15
    for path in [*ROOT.glob("*.py"), ROOT / "plumbing", ROOT / "data"]:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, tmp_path / path.name)
    subprocess.run(["git", "apply", str(fork)], cwd=tmp_path, check=True)
    words = (
        "--steps 3 --num_questions 2 --num_generations 3 --eval_limit 4 --max_searches 2".split()
    )
    words += ["--reward", "brief"] if fork.stem == "reward" else []
    command = [sys.executable, "train.py", *words, "--name", "fork"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "runs" / "fork" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3
    if fork.stem == "reward":
        assert json.loads(rows[0])["reward/brevity"] < 0

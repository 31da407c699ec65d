"""The layout that keeps the code readable: sizes, and who imports whom."""

import ast

import pytest
from conftest import ROOT

BUDGETS = {"reward": 400, "rollout": 380, "train": 350, "eval": 390, "retriever": 230, "scale": 200}
SCRIPTS = {name: ROOT / f"{name}.py" for name in BUDGETS}
PLUMBING = {f"plumbing.{path.stem}": path for path in (ROOT / "plumbing").glob("*.py")}
MODULES = SCRIPTS | PLUMBING
WIDTH, PLUMBING_BUDGET, TOTAL_BUDGET = 100, 230, 4500
FUNCTION, PARAMETERS, LOOP = 60, 7, 45
LONGER = {("rollout", "rollout"): 70}


def lines(name):
    return MODULES[name].read_text(encoding="utf-8").splitlines()


def nodes(name, *kinds):
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def functions(name):
    return nodes(name, ast.FunctionDef, ast.AsyncFunctionDef)


def length(node):
    return node.end_lineno - node.lineno + 1


def imports(name):
    """The project's modules that a module imports at its top level."""
    found = set()
    for node in ast.parse(MODULES[name].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_sizes(name):
    text = lines(name)
    assert len(text) <= BUDGETS.get(name, PLUMBING_BUDGET)
    assert [line for line in text if len(line) > WIDTH or "fmt: skip" in line] == []
    for node in functions(name):
        assert length(node) <= LONGER.get((name, node.name), FUNCTION), node.name


def test_all_together():
    assert sum(len(lines(name)) for name in MODULES) <= TOTAL_BUDGET


@pytest.mark.parametrize("name", SCRIPTS)
def test_parameters(name):
    for node in functions(name):
        given = node.args
        named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in named)
        assert count + (given.vararg is not None) <= PARAMETERS, node.name


@pytest.mark.parametrize("name", PLUMBING)
def test_plumbing_imports_no_script_but_reward(name):
    inside = {alias.name for node in nodes(name, ast.Import) for alias in node.names}
    inside |= {node.module for node in nodes(name, ast.ImportFrom)}
    assert inside & set(SCRIPTS) <= {"reward"}


def test_imports_have_no_cycle():
    left = {name: imports(name) for name in MODULES}
    while left:
        free = {name for name, needed in left.items() if not needed & set(left)}
        assert free, f"a cycle among {sorted(left)}"
        left = {name: needed for name, needed in left.items() if name not in free}


def test_a_training_step_is_seen_at_once():
    (train,) = [node for node in functions("train") if node.name == "train"]
    steps = [node for node in ast.walk(train) if isinstance(node, ast.For)]
    (step,) = [node for node in steps if getattr(node.target, "id", "") == "step"]
    assert length(step) <= LOOP

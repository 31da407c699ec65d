"""Whether what is trained is what samples: models and adapters for which it is not are refused."""

from collections import Counter

import torch
from transformers import DynamicCache

from plumbing.files import check, on_failure


@torch.no_grad()
def check_cache(model, ids, name):
    """Refuse a model that gives other logits for a text in two parts, padded on the left, the first
    one in its cache: rollouts would sample from something else (DataError). ids: of the text."""
    half, pad = len(ids) // 2, -1
    columns = torch.tensor([[pad, *ids[:half], pad, *ids[half:]]], device=model.device)
    mask = (columns != pad).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"cache": DynamicCache(config=model.config), "use_cache": True}
    with on_failure(f"{name}: not supported"):
        whole = model(input_ids=columns[columns != pad][None], use_cache=False).logits[:, half:]
        for start, end in ((0, half + 1), (half + 1, len(ids) + 2)):  # the first part, the second
            inputs["input_ids"] = columns[:, start:end].clamp(min=0)
            inputs["position_ids"] = positions[:, start:end]
            inputs["attention_mask"] = mask[:, :end]
            logits = model(**inputs).logits[:, 1:]
    difference, largest = (whole - logits).abs().max(), whole.abs().max()
    problem = f"not supported: cache and padding change its logits by {difference:.2g}"
    check(difference <= torch.finfo(logits.dtype).eps ** 0.5 * largest, name, problem)


@torch.no_grad()
def check_branches(model, ids, name):
    """Refuse a model that does not keep two branches of a text apart, packed one behind the other
    as a cold start has self-answers (DataError). ids: of a text, whose second half is a branch."""
    half = len(ids) // 2
    trunk, branch = ids[:half], ids[half:]
    n, whole = len(branch), torch.tensor([ids], device=model.device)
    packed = torch.tensor([[*ids, *branch[::-1], *branch]], device=model.device)
    positions = [*range(half), *(3 * [*range(half, len(ids))])]
    first = torch.arange(packed.shape[1], device=model.device).sub(half).clamp(min=-1) // n
    seen = (first == first[:, None]) | (first < 0)  # its own branch, and the trunk
    hidden = torch.zeros(seen.shape, dtype=model.dtype, device=model.device)
    hidden.masked_fill_(~seen.tril(), torch.finfo(model.dtype).min)
    inputs = {"attention_mask": hidden[None, None], "use_cache": False}
    inputs["position_ids"] = torch.tensor([positions], device=model.device)
    with on_failure(f"{name}: no cold start"):
        expected = model(input_ids=whole, use_cache=False).logits[:, len(trunk) :]
        logits = model(input_ids=packed, **inputs).logits[:, -n:]
    difference, largest = (expected - logits).abs().max(), expected.abs().max()
    problem = f"no cold start: self-answers change each other's logits by {difference:.2g}"
    check(difference <= torch.finfo(logits.dtype).eps ** 0.5 * largest, name, problem)


@torch.no_grad()
def check_logits(model, ids, name):
    """Refuse a model whose log-probabilities the loss, which takes hidden states in train mode to
    the output embedding itself, would get wrong: scaled or capped logits, dropout (DataError)."""
    ids = torch.tensor([ids], device=model.device)
    with on_failure(f"{name}: not supported"):
        logits = model(input_ids=ids, use_cache=False).logits
        states = model.train().base_model(input_ids=ids, use_cache=False).last_hidden_state
        trained = model.get_output_embeddings()(states)
    model.eval()
    difference, largest = (logits - trained).abs().max(), logits.abs().max()
    problem = f"not supported: its logits would be trained {difference:.2g} beside the sampled ones"
    check(difference <= 4 * torch.finfo(logits.dtype).eps * largest, name, problem)


def check_adapter(model, where):
    """Refuse an adapter of a matrix with two users: merging, for rollouts, would change both."""
    users = Counter(id(w) for part in model.modules() for w in part.parameters(recurse=False))
    is_shared = any(users[id(weight)] > 1 for weight in adapted_weights(model))
    check(not is_shared, where, "it adapts the matrix that input and output embeddings share")


def adapted_weights(model):
    """The weights that change when a LoRA adapter is merged; some may be named twice."""
    from peft.tuners.lora import LoraLayer

    weights = []
    for module in model.modules():
        if isinstance(module, LoraLayer):
            weights += module.get_base_layer().parameters(recurse=False)
    return weights

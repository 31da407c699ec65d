"""Which weights a policy computes with: adapters merged or switched off, and in which precision."""

from contextlib import contextmanager, nullcontext

import torch

from plumbing.checks import adapted_weights

REFERENCE = "reference"  # name of the adapter that a cold start left


@contextmanager
def reference_weights(model):
    """The policy that the KL term compares with: after a cold start that, or without an adapter."""
    if REFERENCE not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    model.set_adapter(REFERENCE)
    try:
        yield
    finally:
        model.set_adapter("default")


def half_precision(model):
    """Products in the 16 bits of the model's weights, where it has such: its adapter's too."""
    if model.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(model.device.type, model.dtype)


def scale_gradients(model, factor):
    """Multiply all gradients, in place."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor


@contextmanager
def inference_weights(model):
    """Eval mode, the adapter merged into float32 weights: rollouts are a third faster.
    Afterwards the weights are put back bit by bit: subtracting would leave rounding errors."""
    was_training, weights = model.training, []
    model.eval()
    if model.dtype == torch.float32 and not getattr(model, "is_loaded_in_4bit", False):
        weights = adapted_weights(model)
        kept = [weight.detach().clone() for weight in weights]
        model.merge_adapter()  # fewer bits would round the adapter away
    try:
        yield
    finally:
        if weights:
            model.unmerge_adapter()
            with torch.no_grad():
                for weight, original in zip(weights, kept):
                    weight.copy_(original)
        model.train(was_training)

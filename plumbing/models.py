"""Tokenizers and models: loading, 4-bit weights, LoRA adapters, merging."""

import logging
import os
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Before the imports: bitsandbytes warns of an optional kernel, and PEFT asks by an old name.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)

import torch
import transformers
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from plumbing.checks import check_adapter, check_branches, check_cache, check_logits
from plumbing.files import check, locate, on_failure
from reward import TAGS

if not sys.stderr.isatty():
    transformers.utils.logging.disable_progress_bar()  # of weights being loaded: not for log files


class Policy(NamedTuple):
    """What samples and is trained."""

    model: object  # a causal LM
    tokenizer: object


def load_tokenizer(path):
    """The tokenizer of a model folder or hub name. Raises DataError where there is none.
    `AutoTokenizer` chooses the class by the model's type; a file that declares the generic class,
    as the tiny model's does, would be given Qwen2's splitting rules by it."""
    if os.path.isdir(path):
        has_config = os.path.isfile(os.path.join(path, "config.json"))
        check(has_config, path, "no model folder, config.json is missing")
    stranger = f"{path}: neither a model folder nor a model of the hub"
    silence, answers = f"cannot reach the hub for {path}", [HfHubHTTPError, HFValidationError]
    with on_failure(stranger), on_failure(f"{silence} (or give a folder)", but=answers):
        if not os.path.isdir(path) and not try_to_load_from_cache(path, "config.json"):
            HfApi().model_info(path, timeout=3)  # once; below, each file would be asked for
    with on_failure(f"{path}: no model with a tokenizer"):
        declared = get_tokenizer_config(path).get("tokenizer_class")
        is_generic = declared in ("PreTrainedTokenizerFast", "TokenizersBackend")
        kind = PreTrainedTokenizerFast if is_generic else AutoTokenizer
        tokenizer = kind.from_pretrained(path, trust_remote_code=False)
    # Where there are no files, an empty tokenizer is made.
    lost = [tag for tag in TAGS if tag not in tokenizer.decode(encode(tokenizer, tag))]
    check(not lost, path, f"no tokenizer there, or one that cannot spell {' '.join(lost)}")
    return tokenizer


def encode(tokenizer, text):
    """Ids of a text, without special tokens even where it spells them (other added tokens stay)."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


def load_config(path, max_context=0):
    """The configuration of a causal LM, less its dropout: training must see, in train mode too, the
    policy that sampled; and less a window that no trajectory leaves. Raises DataError."""
    with on_failure(f"{path}: no model"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for part in (config, config.get_text_config()):
        for name, value in vars(part).items():
            if "drop" in name and isinstance(value, float):
                setattr(part, name, 0.0)
        is_alike = not getattr(part, "layer_types", None)  # in all layers
        if is_alike and (getattr(part, "sliding_window", None) or 0) >= max(max_context, 1):
            part.sliding_window = None
    return config


def check_model(path, tokenizer, max_context, adapter=None):
    """Refuse a model or adapter that cannot be used before any weights are loaded (DataError)."""
    config = load_config(path, max_context).get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or max_context
    where, problem = f"--max_context {max_context}", f"{path} has {positions} positions"
    check(max_context <= positions, where, problem)
    last, size = max(tokenizer.get_vocab().values()), config.vocab_size
    check(last < size, path, f"the tokenizer has an id {last}, the model {size} embeddings")
    is_full = all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)
    check(is_full, path, "only models with full attention in every layer are supported")
    for file in ("adapter_config.json", "adapter_model.safetensors") if adapter else ():
        check((Path(adapter) / file).is_file(), adapter, f"no adapter there, {file} is missing")


def device_and_dtype():
    """Where a model runs, and in which precision: bfloat16 on CUDA GPUs that have it, or float16,
    whose gradients may overflow (such updates are skipped and counted); elsewhere float32."""
    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"  # one of several, under accelerate
        return device, torch.bfloat16 if has_bf16 else torch.float16
    return "mps" if torch.backends.mps.is_available() else "cpu", torch.float32


def check_4bit(in_4bit):
    """Whether to use 4-bit weights, None being the default. Raises DataError if it cannot."""
    is_installed = find_spec("bitsandbytes") is not None
    if in_4bit is None:
        return torch.cuda.is_available() and is_installed
    problem = "needs the package bitsandbytes, which is not installed"
    check(is_installed or not in_4bit, "--load_in_4bit", problem)
    return in_4bit


def load_base_model(path, in_4bit=False, **options):
    """A causal LM from safetensors files, its linear layers in 4 bits (NF4) if wanted.
    options: dtype of everything else, by default as `device_and_dtype` says; config. No code that
    comes with the model is run. Raises DataError for a damaged one, or if it cannot have 4 bits."""
    device, dtype = device_and_dtype()
    options = {"dtype": dtype, "device_map": {"": device}, "use_safetensors": True} | options
    if check_4bit(in_4bit):
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        nf4 |= {"load_in_4bit": True, "bnb_4bit_compute_dtype": options["dtype"]}
        options["quantization_config"] = transformers.BitsAndBytesConfig(**nf4)
    with on_failure(f"{path}: cannot be loaded"):
        model = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options)
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # its packed weights know no backward pass
    return model


def load_adapter(model, folder, is_trainable=False):
    """`model` with the LoRA adapter in `folder`. Raises DataError if it is damaged or another's."""
    from peft import PeftModel, get_peft_model_state_dict

    problem = f"{folder}: no adapter of this model"
    with on_failure(problem), warnings.catch_warnings(action="ignore"):
        model = PeftModel.from_pretrained(model, folder, is_trainable=is_trainable)
        saved = load_file(Path(folder) / "adapter_model.safetensors")
        own = get_peft_model_state_dict(model, save_embedding_layers=False)
    strangers = len(saved.keys() ^ own.keys())  # the library takes what fits and is silent
    check(not strangers, problem, f"{strangers} of its weights have no counterpart")
    is_finite = all(weight.isfinite().all() for weight in saved.values())
    check(is_finite, problem, "it holds numbers that are not finite")
    check_adapter(model, folder)
    return model


def load_policy(path, adapter=None, in_4bit=False, max_context=0):
    """The Policy for evaluation, with its LoRA adapter if given. Raises DataError."""
    tokenizer, config = load_tokenizer(path), load_config(path, max_context)
    model = load_base_model(path, in_4bit, config=config)
    check_cache(model, encode(tokenizer, " ".join(TAGS)), path)
    if adapter:
        model = load_adapter(model, adapter)
        if model.dtype == torch.float32 and not in_4bit:  # fewer bits would round it away
            model = model.merge_and_unload()
    return Policy(model.eval(), tokenizer)


def load_trainable(settings, adapter=None):
    """The Policy to train, with a fresh LoRA adapter or the one in the folder `adapter`.
    Raises DataError where what is trained would not be what samples."""
    from peft import LoraConfig, get_peft_model

    path = locate(settings.model)
    tokenizer = load_tokenizer(path)
    config = load_config(path, settings.max_context)
    model = load_base_model(path, settings.load_in_4bit, config=config)
    text = encode(tokenizer, " ".join(TAGS))
    check_cache(model, text, settings.model)
    check_logits(model, text, settings.model)
    if settings.cold_start:
        check_branches(model, text, settings.model)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    if adapter:
        return Policy(load_adapter(model, adapter, is_trainable=True), tokenizer)
    shape = {"r": settings.lora_r, "lora_alpha": settings.lora_alpha, "task_type": "CAUSAL_LM"}
    where, lora = settings.lora_targets, LoraConfig(target_modules=settings.lora_targets, **shape)
    with on_failure(f"--lora_targets {where}"), warnings.catch_warnings(action="ignore"):
        model = get_peft_model(model, lora)
        check_adapter(model, f"--lora_targets {where}")
    return Policy(model, tokenizer)
